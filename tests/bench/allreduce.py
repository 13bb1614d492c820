"""All-reduce on shaped links: seconds, share of the line rate and CPU seconds, beside hivemind's in the same run.

python -m tests.bench.allreduce --sizes 16,64 --peers 2,4 --rate 100
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.bench import aims
from tests.network.namespaces import Counters, Namespaces, namespaces, usual_congestion_control, why_not

LABELS = {
    "swarm": "SwarmCollective",
    "libp2p": "SwarmCollective (libp2p)",
    "hivemind": "hivemind.DecentralizedAverager",
    "torch": "TorchCollective (gloo)",
    "tcp": "plain TCP sockets",
}


@dataclass(frozen=True)
class Row:
    """One engine, size and number of peers."""

    engine: str
    peers: int
    megabytes: float
    seconds: float  # median over the rounds, from the first peer's call to the last one's result
    best: float
    worst: float
    bound: float  # 2 (n-1)/n * bytes / rate
    share: float  # bound / seconds
    cpu_seconds: float  # of a round, all processes of all peers
    wire_ratio: float  # bytes that crossed the busiest peer's link, one way, over 2 (n-1)/n * bytes


class Peers:
    """An engine's processes, one for each namespace."""

    def __init__(self, made: Namespaces, engine: str, timeout: float, log: Path) -> None:
        self.made = made
        self.timeout = timeout
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._log = log.open("a")
        self._processes = []
        for rank, host in enumerate(made.addresses):
            command = [sys.executable, "-m", "tests.bench.allreduce_peers", "--engine", engine, "--rank", str(rank)]
            command += ["--size", str(made.count), "--host", host, "--timeout", str(timeout)]
            self._processes.append(
                made.popen(
                    rank,
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    env=environment,
                    cwd=Path(__file__).parents[2],
                )
            )
        [address] = self.tell("begin", ranks=[0])
        self.tell("connect", address)

    def tell(self, *message: Any, ranks: list[int] | None = None) -> list[Any]:
        """Have peers do something at the same time; returns their answers."""
        chosen = [self._processes[rank] for rank in ranks or range(len(self._processes))]
        for process in chosen:
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        answers = []
        for process in chosen:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a peer ended in {message[0]}: see {self._log.name}")
            answers.append(json.loads(line))
        return answers

    def cpu_seconds(self) -> float:
        """User and system time of all peers' processes, their daemons and children included."""
        total = 0.0
        for process in self._processes:
            root = psutil.Process(process.pid)
            for each in [root, *root.children(recursive=True)]:
                times = each.cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        """Kill everything."""
        self.made.kill()
        self._log.close()


def measure(peers: Peers, engine: str, megabytes: float, rounds: int, rate: float, first_index: int) -> Row:
    """Run one warm-up and `rounds` rounds."""
    n = peers.made.count
    size = megabytes * (1 << 20)
    bound = 2 * (n - 1) / n * size * 8 / (rate * 1e6)
    seconds, cpu, wire = [], [], []
    for index in range(first_index, first_index + rounds + 1):
        peers.tell("load", megabytes, index)
        crossed = [peers.made.counters(rank) for rank in range(n)]
        used = peers.cpu_seconds()
        times = peers.tell("round", index)
        used = peers.cpu_seconds() - used
        moved = max(_busiest(peers.made.counters(rank), before) for rank, before in enumerate(crossed))
        worst = max(peers.tell("check", megabytes, index))
        if worst > 1e-3:
            raise RuntimeError(f"{engine} was off by {worst}")
        if index > first_index:
            cpu.append(used)
            wire.append(moved)
            seconds.append(max(ended for _, ended in times) - min(started for started, _ in times))
    return Row(
        engine=engine,
        peers=n,
        megabytes=megabytes,
        seconds=round(statistics.median(seconds), 3),
        best=round(min(seconds), 3),
        worst=round(max(seconds), 3),
        bound=round(bound, 3),
        share=round(bound / statistics.median(seconds), 3),
        cpu_seconds=round(statistics.median(cpu), 2),
        wire_ratio=round(statistics.median(wire) / (2 * (n - 1) / n * size), 3),
    )


def _busiest(now: Counters, before: Counters) -> int:
    return max(now.sent - before.sent, now.received - before.received)


def run(options: argparse.Namespace) -> list[Row]:
    """Measure every combination; engines take turns so that all see the same machine."""
    rows = []
    log = Path(tempfile.gettempdir()) / f"allreduce-{os.getpid()}.log"
    for n in options.peers:
        with namespaces(n, options.rate, options.delay, options.congestion) as made:
            for engine in options.engines:
                bound = 2 * max(options.sizes) * (1 << 20) * 8 / (options.rate * 1e6)
                peers = Peers(made, engine, timeout=30 + 6 * bound, log=log)
                try:
                    for number, megabytes in enumerate(options.sizes):
                        row = measure(peers, engine, megabytes, options.rounds, options.rate, 100 * number)
                        rows.append(row)
                        print(line(row), flush=True)
                finally:
                    peers.close()
    log.unlink()
    return rows


SHARE = 0.85  # of the bound, at least
CPU_SHARE = 0.5  # of hivemind's CPU seconds, at most
HEAD = (
    f"{'engine':32}{'peers':>6}{'MB':>5}{'seconds':>9}{'(best-worst)':>16}{'bound':>7}{'share':>7}{'CPU s':>7}"
    f"{'wire':>6}"
)


def line(row: Row) -> str:
    """Format a row for the table."""
    spread = f"({row.best:.2f}-{row.worst:.2f})"
    return (
        f"{LABELS[row.engine]:32}{row.peers:6}{row.megabytes:5g}{row.seconds:9.2f}{spread:>16}{row.bound:7.2f}"
        f"{row.share:7.0%}{row.cpu_seconds:7.2f}{row.wire_ratio:6.2f}"
    )


def verdict(rows: list[Row]) -> list[str]:
    """What falls short of the aims: 85 % of the line's bound, and half of hivemind's CPU seconds in the same run."""
    short = []
    theirs = {(row.peers, row.megabytes): row.cpu_seconds for row in rows if row.engine == "hivemind"}
    for row in rows:
        if row.engine != "swarm":
            continue
        what = f"{row.peers} peers, {row.megabytes:g} MB"
        short += aims.at_least(f"{what}, share of the bound", row.share, SHARE)
        share = row.cpu_seconds / theirs.get((row.peers, row.megabytes), math.inf)
        short += aims.at_most(f"{what}, share of hivemind's CPU seconds", share, CPU_SHARE)
    return short


def main() -> None:
    """Parse, measure, print a table, and fail when an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = lambda kind: lambda text: [kind(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--sizes", type=numbers(float), default=[16.0, 64.0], help="MB of float32")
    parser.add_argument("--peers", type=numbers(int), default=[2, 4])
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s each way")
    parser.add_argument("--delay", type=float, default=0.0, help="ms one way")
    parser.add_argument("--congestion", help="TCP's congestion control; default: cubic, or reno where that is refused")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds after one warm-up")
    parser.add_argument("--engines", type=numbers(str), default=list(LABELS))
    aims.add_options(parser)
    options = parser.parse_args()
    missing = why_not()
    if missing:
        raise SystemExit(f"no network namespaces here: {missing}")
    started = time.monotonic()
    print(f"{options.rate:g} Mbit/s, {options.delay:g} ms one way, median of {options.rounds} rounds after one warm-up")
    print(HEAD, flush=True)
    rows = run(options)
    result = {
        "rate_mbit": options.rate,
        "delay_ms": options.delay,
        "congestion": options.congestion or usual_congestion_control(),
        "rounds": options.rounds,
        "cores": os.cpu_count(),
        "seconds": round(time.monotonic() - started, 1),
        "rows": [asdict(row) for row in rows],
    }
    aims.conclude(verdict(rows), result, options)


if __name__ == "__main__":
    main()
