"""The nursery: a small process that imports the heavy libraries once, forks peers and leaves none of them behind."""

import contextlib
import faulthandler
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from swarmkit.peers.hygiene import die_with_parent

MAX_MESSAGE = 1 << 20
_FOR_CHILDREN = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def serve(fd: int, preload: Sequence[str], cleanup: Sequence[str], grace_s: float) -> NoReturn:
    """Obey the supervisor at the other end of `fd` until it goes; then end every peer and remove `cleanup`.

    Peers have `grace_s` between SIGTERM and SIGKILL.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    for module in preload:
        importlib.import_module(module)
    with socket.socket(fileno=fd) as link:
        _Nursery(link, grace_s).run()
    for folder in cleanup:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


class _Nursery:
    """Runs in one thread: a fork copies only the thread that calls it, so there must be no other."""

    def __init__(self, link: socket.socket, grace_s: float) -> None:
        self._link = link
        self._grace_s = grace_s
        self._children: dict[int, int] = {}  # pid -> the supervisor's number for the child
        self._wake, self._wake_end = os.pipe()
        for end in (self._wake, self._wake_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._begin_end())
        self._ending = False

    def _begin_end(self) -> None:
        self._ending = True

    def run(self) -> None:
        while not self._ending:
            readable, _, _ = select.select([self._link.fileno(), self._wake], [], [])
            self._drain_wake()
            self._reap()
            if self._link.fileno() in readable and not self._ending:
                self._ending = not self._obey()
        self._end_all()

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 512)

    def _obey(self) -> bool:
        """Handle one message; False when the supervisor is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self._link, MAX_MESSAGE, 1)
        except ConnectionError:
            return False
        if not data:
            return False
        message = json.loads(data)
        if "signal" in message:
            self._signal(message["child"], message["signal"])
        else:
            self._fork(message, fds[0])
        return True

    def _fork(self, message: dict[str, object], fd: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal that comes before the child has handlers of its own must wait for them, not meet ours.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_CHILDREN)
        pid = os.fork()
        if pid == 0:
            _become_child(self._link, (self._wake, self._wake_end), message, fd)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_CHILDREN)
        os.close(fd)
        self._children[pid] = int(str(message["child"]))
        self._tell({"child": message["child"], "pid": pid})

    def _signal(self, child: int, number: int) -> None:
        # Only the processes that are not reaped yet: their ids cannot belong to anybody else.
        for pid, known in self._children.items():
            if known == child:
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)

    def _reap(self) -> None:
        while self._children:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return
            # The helpers of a dead peer, before its id is free for others: they share its process group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(found.si_pid, signal.SIGKILL)
            _, status = os.waitpid(found.si_pid, 0)
            child = self._children.pop(found.si_pid, None)
            if child is not None:
                self._tell({"child": child, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, object]) -> None:
        try:
            self._link.send(json.dumps(message).encode())
        except OSError:
            self._ending = True

    def _end_all(self) -> None:
        for number, patience in ((signal.SIGTERM, self._grace_s), (signal.SIGKILL, 5.0)):
            deadline = time.monotonic() + patience
            for child in set(self._children.values()):
                self._signal(child, number)
            while self._children and time.monotonic() < deadline:
                select.select([self._wake], [], [], 0.2)
                self._drain_wake()
                self._reap()


def _become_child(link: socket.socket, fds: Sequence[int], message: dict[str, object], fd: int) -> NoReturn:
    """Turn a fork of the nursery into a peer: session, signals and files of its own."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        # SIGPIPE stays ignored, as Python has it: a socket whose other end died is an error, not the end of the peer.
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_CHILDREN)
        os.setsid()
        die_with_parent()
        if os.getppid() == 1:
            os._exit(1)  # the nursery died before the line above
        link.close()
        for other in fds:
            os.close(other)
        _redirect(str(message["log"]))
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        module, _, name = str(message["entry"]).partition(":")
        with socket.socket(fileno=fd) as own:
            code = int(getattr(importlib.import_module(module), name)(own, message["arguments"]))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the outermost loop of a process: whatever it was goes to its log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: str) -> None:
    """Send what the peer and its libraries print to its log."""
    os.makedirs(os.path.dirname(log), exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(null)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
