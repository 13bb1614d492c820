"""Peers forked from a process that has everything imported, so that they are up in a second, and ways to stop them."""

import ctypes
import faulthandler
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from tests.multiprocess.harness_commands import MARK, SMALL, Command, Event

ROUND_S, SILENCE_S = 8.0, 2.0
# Each peer's own: a run does not decide them for those who join.
NETWORK = [f"network.round_timeout_s={ROUND_S}", f"network.silence_s={SILENCE_S}", "network.stall_s=4"]
SETTINGS = [
    "name=faults",
    "peers=6",
    *(setting for setting in SMALL if not setting.startswith("network.round_timeout_s=")),
    *NETWORK,
    "steps=1000000",
    "sample.tokens=0",
    "log.every=100",
]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["swarmkit.peers.node", "swarmkit.peer", "swarmkit.report", "torch.optim.adamw"])


class _Process:
    """A forked process, seen as a Popen."""

    def __init__(self, *arguments: Any) -> None:
        self._process = _CONTEXT.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("peer", timeout or 0.0)
        return self._process.exitcode


def _run(
    arguments: Sequence[str], folder: str, output: str, environ: dict[str, str], phase: str, namespace: str
) -> None:
    """The peer's process: `swarmkit` with these arguments, as a command of its own would be."""
    if namespace:
        with Path("/run/netns", namespace).open() as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    os.setsid()
    os.chdir(folder)
    said = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(said, number)
    faulthandler.register(signal.SIGUSR1)  # tells where it hangs
    os.environ.update(environ)
    tempfile.tempdir = None
    if phase:
        PHASES[phase](Path(folder, "armed"))
    sys.argv = ["swarmkit", *arguments]
    from swarmkit.cli import main

    main()


class Peer(Command):
    """A `swarmkit start` or `join`; with a `phase` it stops there, once told to `arm`."""

    def __init__(self, arguments: Sequence[str], folder: Path, phase: str = "", namespace: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.output = folder / f"output-{secrets.token_hex(3)}.txt"
        self.output.touch()
        self.mark = secrets.token_hex(8)
        self.temporary = Path(tempfile.mkdtemp(prefix="sk", dir="/tmp"))
        self.pids: set[int] = set()
        self.started = time.time()
        environ = {
            MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        self.process: Any = _Process(list(arguments), str(folder), str(self.output), environ, phase, namespace)

    def alive(self) -> dict[int, str]:
        """As Command's; the environment of a forked process is that of its parent."""
        found = super().alive()
        if self.process.poll() is None:
            found[self.process.pid] = "the peer"
        return found

    @property
    def id(self) -> str:
        return str(self.wait_for("its start", lambda: self.events(0, "run_start"))[-1]["id"])

    def rounds(self) -> list[Event]:
        """Rounds that gave a result."""
        return [event for event in self.events(0, "round") if event["failed"] is None]

    def wait_for_members(self, ids: Collection[str], timeout: float = 60.0, since: float = 0.0) -> Event:
        """Wait until exactly these have contributed to a round that closed after `since`."""

        def met() -> Event | None:
            newest = self.rounds()[-1:]
            good = newest and set(newest[0]["members"]) == set(ids) and min(newest[0]["weights"]) > 0
            good = good and newest[0]["time"] > since
            return newest[0] if good else None

        found: Event = self.wait_for(f"a round of {len(ids)}", met, timeout)
        return found

    def assert_ended(self, timeout: float = 5.0) -> None:
        """Wait until nothing of a dead peer runs any more."""
        deadline = time.monotonic() + timeout
        while alive := self.alive():
            assert time.monotonic() < deadline, f"left behind: {alive}"
            time.sleep(0.05)

    def arm(self) -> None:
        """From now on its phase stops it."""
        (self.folder / "armed").touch()

    def is_stopped(self) -> bool:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        """Kill -9 of the process; p2pd has to end by itself."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


class Swarm:
    """Peers that are ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers: list[Peer] = []

    def start(self, *settings: str, phase: str = "", namespace: str = "") -> Peer:
        return self._add(Peer(["start", *SETTINGS, *settings], self._next(), phase, namespace))

    def join(self, *settings: str, phase: str = "", namespace: str = "") -> Peer:
        door = next(peer for peer in self.peers if peer.process.poll() is None)
        return self._add(
            Peer(["join", door.address(), "threads=1", *NETWORK, *settings], self._next(), phase, namespace)
        )

    def _next(self) -> Path:
        return self.folder / f"{len(self.peers)}"

    def _add(self, peer: Peer) -> Peer:
        self.peers.append(peer)
        return peer

    def close(self) -> None:
        for peer in self.peers:
            peer.clean()


def assert_agree(peers: Sequence[Peer], since: int = 0) -> None:
    """Of each round that all of them closed they hold the same bits."""
    ends = [{event["round"]: event["digest"] for event in peer.rounds() if event["round"] >= since} for peer in peers]
    common = set.intersection(*(set(end) for end in ends))
    assert common
    assert all(len({end[number] for end in ends}) == 1 for number in common)


# -- phases of a round -------------------------------------------------------------------------------------------------


def _stop(armed: Path) -> None:
    if armed.exists():
        os.kill(os.getpid(), signal.SIGSTOP)


def before_hello(armed: Path) -> None:
    """Before the coordinator has heard of this member."""
    from swarmkit.peers import collective

    meet = collective._Member._meet

    async def stopped(self: Any) -> Any:
        _stop(armed)
        return await meet(self)

    collective._Member._meet = stopped  # type: ignore[method-assign]


def while_sending(armed: Path) -> None:
    """When one of the others has its part, and the rest have not."""
    from swarmkit.peers import exchange

    parts = exchange.Reduction._parts

    async def stopped(self: Any, chunks: Any) -> AsyncIterator[bytes]:
        async for data in parts(self, chunks):
            yield data
            _stop(armed)

    exchange.Reduction._parts = stopped  # type: ignore[method-assign]


def while_reducing(armed: Path) -> None:
    """When this member has everybody's part of its slice, and nobody has the mean."""
    from swarmkit.peers import exchange

    reduce = exchange.Reduction._reduce

    async def stopped(self: Any, number: int) -> None:
        if len(self.agreement.members) > 1 and len(self._arrived[number]) == len(self._contributors) - 1:
            _stop(armed)
        await reduce(self, number)

    exchange.Reduction._reduce = stopped  # type: ignore[method-assign]


def before_report(armed: Path) -> None:
    """When this member has the result and has not said so."""
    from swarmkit.peers import collective

    ask: Callable[..., Awaitable[Any]] = collective._Member._ask

    async def stopped(self: Any, method: str, message: Any) -> Any:
        if method == "report":
            _stop(armed)
        return await ask(self, method, message)

    collective._Member._ask = stopped  # type: ignore[method-assign]


def before_commit(armed: Path) -> None:
    """When this coordinator has heard success from all, and nobody has heard of it."""
    from swarmkit.peers import session

    await_reports = session.Session._await_reports

    async def stopped(self: Any) -> Any:
        trouble = await await_reports(self)
        if trouble is None and len(self._members) > 1:
            _stop(armed)
        return trouble

    session.Session._await_reports = stopped  # type: ignore[method-assign]


PHASES = {
    function.__name__: function
    for function in (before_hello, while_sending, while_reducing, before_report, before_commit)
}
