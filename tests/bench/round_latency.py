"""What a round of unchanged members costs: 4 peers, 1 MB, links without a limit, beside hivemind's in the same run.

hivemind agrees on a group anew for every round; here members are known and a round begins when the last has come.

python -m tests.bench.round_latency --rounds 20
"""

import argparse
import os
from dataclasses import asdict

from tests.bench import aims
from tests.bench.allreduce import HEAD, Row, run
from tests.network.namespaces import why_not

MOST_S = 0.1
UNLIMITED_MBIT = 10_000.0


def verdict(rows: list[Row]) -> list[str]:
    """What falls short of the aim."""
    (ours,) = [row for row in rows if row.engine == "swarm"]
    (theirs,) = [row for row in rows if row.engine == "hivemind"]
    print(f"hivemind takes {theirs.seconds / ours.seconds:.0f} times as long")
    return aims.at_most("a round", ours.seconds, MOST_S, " s")


def main() -> None:
    """Measure, print, and fail when the aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds after one warm-up")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=1.0)
    aims.add_options(parser)
    options = parser.parse_args()
    if missing := why_not():
        raise SystemExit(f"no network namespaces here: {missing}")
    print(f"{os.cpu_count()} cores, median of {options.rounds} rounds after one warm-up")
    print(HEAD, flush=True)
    settings = argparse.Namespace(
        peers=[options.peers],
        sizes=[options.megabytes],
        engines=["swarm", "hivemind"],
        rounds=options.rounds,
        rate=UNLIMITED_MBIT,
        delay=0.0,
        congestion=None,
    )
    rows = run(settings)
    aims.conclude(verdict(rows), [asdict(row) for row in rows], options)


if __name__ == "__main__":
    main()
