"""State transfer on shaped links: share of the line rate, and seconds and bytes that a donor killed half-way costs.

python -m tests.bench.state_transfer --megabytes 24,64 --rate 100
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.bench import aims
from tests.network.namespaces import Namespaces, namespaces, why_not

SHARE = 0.85  # of the line's rate, at least
KILL_S = 2.0  # what the death of a donor may cost
CHUNK = 1 << 19


@dataclass(frozen=True)
class Row:
    """One transfer."""

    megabytes: float
    donors: int  # that send at the same time
    killed: bool  # the one that sends was killed when half was there
    seconds: float  # from the call to the checked state
    first: float  # of these, until the first piece
    gap: float  # longest pause between two pieces
    share: float  # payload bits / (rate * seconds)
    twice: int  # bytes received beyond the payload


class _Peer:
    """A process in a namespace that is told what to do line by line."""

    def __init__(self, made: Namespaces, index: int, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.network.state_peer", made.addresses[index], *arguments]
        self.process = made.popen(
            index,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a peer ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """kill -9 of the peer's process; its daemon dies with it."""
        for child in [*psutil.Process(self.process.pid).children(), psutil.Process(self.process.pid)]:
            if "python" in child.name():
                child.send_signal(signal.SIGKILL)
                return


def measure(*, megabytes: float, rate: float, delay: float, donors: int, kills: bool) -> Row:
    """One transfer from two donors, of which `donors` send at a time; with `kills`, one dies when half is there."""
    with namespaces(3, rate, delay) as made:
        arguments = (str(megabytes), str(donors))
        first = _Peer(made, 0, "donor", *arguments)
        hello = first.hear()
        second = _Peer(made, 1, "donor", *arguments, hello["address"])
        by_id = {hello["id"]: first, second.hear()["id"]: second}
        joiner = _Peer(made, 2, "joiner", *arguments, hello["address"])
        joiner.hear()
        joiner.go()
        half = joiner.hear()
        if kills:
            by_id[half["donors"][0]].kill()
        found = joiner.hear()
    if not found["right"]:
        raise RuntimeError("the state arrived damaged")
    size = int(megabytes * (1 << 20))
    return Row(
        megabytes=megabytes,
        donors=donors,
        killed=kills,
        seconds=round(found["seconds"], 3),
        first=round(found["first"], 3),
        gap=round(found["gap"], 3),
        share=round(size * 8 / (rate * 1e6) / found["seconds"], 3),
        twice=found["received"] - size,
    )


HEAD = f"{'MB':>6}{'donors':>8}{'killed':>8}{'seconds':>9}{'first':>7}{'gap':>7}{'share':>7}{'twice':>9}"


def line(row: Row) -> str:
    """Format a row for the table."""
    killed = "one" if row.killed else "-"
    return (
        f"{row.megabytes:6g}{row.donors:8}{killed:>8}{row.seconds:9.2f}{row.first:7.2f}{row.gap:7.2f}"
        f"{row.share:7.0%}{row.twice:9}"
    )


def verdict(rows: list[Row]) -> list[str]:
    """What falls short of the aims."""
    short = []
    plain = {(row.megabytes, row.donors): row for row in rows if not row.killed}
    for row in rows:
        what = f"{row.megabytes:g} MB, {row.donors} donors at a time"
        if not row.killed:
            short += aims.at_least(f"{what}, share of the line", row.share, SHARE)
        if row.killed:
            cost = row.seconds - plain[row.megabytes, row.donors].seconds
            short += aims.at_most(f"{what}, a killed donor cost", cost, KILL_S, " s")
            chunk_and_manifest = CHUNK + 64 * row.megabytes * 4 + 16384
            short += aims.at_most(f"{what}, bytes that came twice", row.twice, chunk_and_manifest)
    return short


def main() -> None:
    """Parse, measure, print a table, and fail when an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = lambda kind: lambda text: [kind(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--megabytes", type=numbers(float), default=[24.0, 64.0])
    parser.add_argument("--donors", type=numbers(int), default=[1, 2], help="that send at a time")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s each way")
    parser.add_argument("--delay", type=float, default=0.0, help="ms one way")
    aims.add_options(parser)
    options = parser.parse_args()
    missing = why_not()
    if missing:
        raise SystemExit(f"no network namespaces here: {missing}")
    started = time.monotonic()
    print(f"{options.rate:g} Mbit/s, {options.delay:g} ms one way\n{HEAD}", flush=True)
    rows = []
    for megabytes in options.megabytes:
        for donors in options.donors:
            for kills in (False, True):
                rows.append(
                    measure(megabytes=megabytes, rate=options.rate, delay=options.delay, donors=donors, kills=kills)
                )
                print(line(rows[-1]), flush=True)
    result = {
        "rate_mbit": options.rate,
        "delay_ms": options.delay,
        "cores": os.cpu_count(),
        "seconds": round(time.monotonic() - started, 1),
        "rows": [asdict(row) for row in rows],
    }
    aims.conclude(verdict(rows), result, options)


if __name__ == "__main__":
    main()
