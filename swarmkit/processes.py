"""Children: starts peers through a nursery, talks with them, and ends them all."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmkit.nursery import MAX_MESSAGE

Message = dict[str, Any]


class Link:
    """One end of the line between a supervisor and a peer: JSON objects, whole or not at all."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setblocking(False)
        self.closed = False

    def fileno(self) -> int:
        """Descriptor for select."""
        return self._end.fileno()

    def send(self, message: Mapping[str, object], *, patience: float = 0.0) -> bool:
        """Send, waiting at most `patience` seconds for a reader that is behind; False when it was not sent.

        Never raises: a supervisor that is slow, stopped or dead must not disturb a peer.
        """
        data = json.dumps(message).encode()
        deadline = time.monotonic() + patience
        while not self.closed:
            try:
                self._end.send(data)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.01)
            except OSError:
                self.closed = True
            else:
                return True
        return False

    def receive(self) -> list[Message]:
        """Everything that has arrived; sets `closed` when the other end is gone."""
        messages: list[Message] = []
        while not self.closed:
            try:
                data = self._end.recv(MAX_MESSAGE)
            except BlockingIOError:
                return messages
            except OSError:
                data = b""
            if not data:
                self.closed = True
                return messages
            messages.append(json.loads(data))
        return messages

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self._end.close()


@dataclass(slots=True)
class Child:
    """A process that the nursery started for us."""

    number: int
    name: str
    link: Link
    pid: int | None = None  # None until the nursery has forked it
    code: int | None = None  # exit code, or minus the signal that killed it
    started: float = field(default_factory=time.monotonic)

    @property
    def is_running(self) -> bool:
        """True until the nursery said how it ended."""
        return self.code is None


class Children:
    """The processes of a run.

    When this process closes it or dies, the nursery ends them, with `grace_s` between SIGTERM and SIGKILL, and removes
    the `cleanup` folders.
    """

    def __init__(
        self, preload: Sequence[str], *, cleanup: Sequence[Path] = (), threads: int = 1, grace_s: float = 10.0
    ) -> None:
        self._grace_s = grace_s
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = json.dumps([theirs.fileno(), list(preload), [str(folder) for folder in cleanup], grace_s])
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from swarmkit.nursery import serve; serve(*{arguments})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal is for the supervisor, which tells the others
                # Read when the libraries load, so it cannot wait for a setting in the peer.
                env={
                    # Threads that spin while they wait starve each other when cores are shared: seven times slower.
                    "OMP_WAIT_POLICY": "PASSIVE",
                    **os.environ,
                    "OMP_NUM_THREADS": str(threads),
                    "HIVEMIND_MEMORY_SHARING_STRATEGY": "file_descriptor",
                },
            )
        self._link = ours
        self._link.setblocking(False)
        self.all: list[Child] = []
        self._nursery_died = False

    def fileno(self) -> int:
        """Descriptor that becomes readable when a child starts or ends."""
        return self._link.fileno()

    def spawn(self, name: str, entry: str, arguments: Mapping[str, object], *, log: Path) -> Child:
        """Start `entry` ("module:function", called with its end of the link and `arguments`); returns at once."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child = Child(len(self.all), name, Link(ours))
        message = {"child": child.number, "entry": entry, "arguments": arguments, "log": str(log)}
        with theirs:
            self._post(json.dumps(message).encode(), theirs.fileno())
        self.all.append(child)
        return child

    def _post(self, data: bytes, fd: int | None = None) -> None:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.send_fds(self._link, [data], [] if fd is None else [fd])
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def signal(self, child: Child, number: int) -> None:
        """Send a signal to a child that still runs; SIGKILL goes to its helpers as well."""
        if child.is_running:
            with contextlib.suppress(OSError):
                self._post(json.dumps({"child": child.number, "signal": int(number)}).encode())

    def give_up(self) -> None:
        """End all at once when none is there yet: the nursery, which still imports, would first have to hear of it."""
        if all(child.pid is None for child in self.all):
            self._process.kill()

    def poll(self) -> list[Child]:
        """Learn what happened and return the children that have just ended."""
        ended: list[Child] = []
        while True:
            try:
                data = self._link.recv(MAX_MESSAGE)
            except BlockingIOError:
                return ended
            except OSError:
                data = b""
            if not data:
                # Killed from outside: its children have died with it.
                for child in self.running():
                    child.code = -signal.SIGKILL
                    ended.append(child)
                self._nursery_died = True
                return ended
            message = json.loads(data)
            child = self.all[message["child"]]
            if "pid" in message:
                child.pid = message["pid"]
            else:
                child.code = message["code"]
                ended.append(child)

    def running(self) -> list[Child]:
        """Those that have not ended."""
        return [child for child in self.all if child.is_running]

    def close(self) -> None:
        """End all that still run, the nursery included; safe to call twice."""
        self._link.close()  # the nursery hears it, ends its children and goes
        try:
            self._process.wait(self._grace_s + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children die with it
            self._process.wait()
        for child in self.all:
            child.link.close()
