"""Runs `swarmkit` as users do, watches its events, and finds whatever it leaves behind."""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from swarmkit.peers.hygiene import DYING_WITH_PARENT

MARK = "SWARMKIT_TEST_MARK"
Event = dict[str, Any]

# A model and a run that end in seconds, with rounds a fraction of a second apart.
SMALL = [
    "threads=1",
    "device=cpu",
    "batch_size=8",
    "model.layers=1",
    "model.dim=32",
    "model.heads=2",
    "model.context=32",
    "strategy=diloco",
    "strategy.sync.h=8",
    "strategy.outer_momentum=0.5",
    "optimizer.lr=0.005",
    "eval.every=0",
    "sample.tokens=8",
    "network.round_timeout_s=15",
    "network.silence_s=2",
    "network.heartbeat_s=0.5",
    "launch.baseline=false",
    "log.plots=false",
]

# What a joiner sets for itself.
OWN = ["threads=1", "log.plots=false"]


class Command:
    """A `swarmkit` command in a process group, temporary folder and environment of its own; it dies with the tests."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self.folder = folder
        self.output = folder / f"output-{secrets.token_hex(3)}.txt"
        self.mark = secrets.token_hex(8)
        # Short: the paths of unix sockets must be.
        self.temporary = Path(tempfile.mkdtemp(prefix="sk", dir="/tmp"))
        self.pids: set[int] = set()
        self.started = time.time()
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*DYING_WITH_PARENT, sys.executable, "-c", "from swarmkit.cli import main; main()", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env={
                    **os.environ,
                    MARK: self.mark,
                    "TMPDIR": str(self.temporary),
                    "XDG_CACHE_HOME": str(folder / "cache"),
                    # Or each command would look through all fonts for its report, which takes many seconds.
                    "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib")),
                    "OMP_NUM_THREADS": "1",
                },
                start_new_session=True,
            )

    # -- what it says --------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.text[-3000:]}") from None

    def wait_for(self, what: str, found: Callable[[], Any], timeout: float = 60.0) -> Any:
        """Poll until `found` gives something; fails when the command ends before."""
        deadline = time.monotonic() + timeout
        while True:
            value = found()
            if value:
                return value
            assert self.process.poll() is None, f"ended before {what}:\n{self.text[-3000:]}"
            assert time.monotonic() < deadline, f"no {what} within {timeout} s:\n{self.text[-3000:]}"
            time.sleep(0.02)

    @property
    def run_folder(self) -> Path:
        return max(self.folder.glob("runs/*/*"), key=lambda path: path.stat().st_ctime)

    def events(self, peer: int | str, kind: str) -> list[Event]:
        """Events of one peer that are on disk by now."""
        try:
            lines = (self.run_folder / f"peer-{peer}" / "events.jsonl").read_text().splitlines()
        except (FileNotFoundError, ValueError):
            return []
        events = []
        for line in lines:
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
        return [event for event in events if event["kind"] == kind]

    def wait_for_round(self, peer: int, number: int) -> None:
        """Wait until a peer has been in more than `number` rounds; a joiner's first is the one that it only watches."""
        self.wait_for(f"{number + 1} rounds of peer {peer}", lambda: len(self.events(peer, "round")) > number)

    def pid(self, peer: int) -> int:
        return int(self.wait_for(f"start of peer {peer}", lambda: self.events(peer, "run_start"))[-1]["pid"])

    def address(self) -> str:
        found: re.Match[str] = self.wait_for("address", lambda: re.search(r"swarmkit join (/\S+)", self.text))
        return found[1]

    # -- what it leaves behind -----------------------------------------------------------------------------------------

    def alive(self) -> dict[int, str]:
        """Processes of this command, whoever their parent is now."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:150]
            except (OSError, ValueError):
                continue
        self.pids |= found.keys()
        return found

    def remains(self) -> list[str]:
        """Processes, sockets, shared memory and temporary files that are still there."""
        found = [f"process {pid}: {line}" for pid, line in self.alive().items()]
        # torch makes an empty folder for its compiler's cache on import, for good.
        found += [f"file {path}" for path in self.temporary.rglob("*") if not path.name.startswith("torchinductor_")]
        found += [
            f"shared memory {path}"
            for path in Path("/dev/shm").iterdir()
            if any(f"_{pid}_" in path.name for pid in self.pids) and path.stat().st_mtime > self.started
        ]
        return found

    def assert_all_gone(self, timeout: float = 15.0) -> float:
        """Wait until nothing remains; returns how long that took."""
        started = time.monotonic()
        while remains := self.remains():
            assert time.monotonic() - started < timeout, "left behind:\n" + "\n".join(remains)
            time.sleep(0.05)
        return time.monotonic() - started

    def clean(self) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        shutil.rmtree(self.temporary, ignore_errors=True)


@contextlib.contextmanager
def command(*arguments: str, folder: Path) -> Iterator[Command]:
    """Run a command and end whatever is left of it afterwards."""
    running = Command(arguments, folder)
    try:
        yield running
    finally:
        running.clean()
