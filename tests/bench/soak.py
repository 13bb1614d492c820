"""A swarm whose peers are killed and added all the time: do rounds succeed, do peers agree, does it learn as well?

python -m tests.bench soak --minutes 10 --peers 8 --every 15 --seed 0
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swarmkit.build import build_trainer, open_corpus, open_stream
from swarmkit.compose import load_config
from swarmkit.metrics import Event, read_events
from swarmkit.peers.local import LocalSwarm
from swarmkit.trainer import Outcome
from tests.bench import aims
from tests.multiprocess.harness_commands import SMALL, Command

FEWEST, MOST = 5, 9
SUCCEEDED = 0.95  # of all rounds of all peers, at least
LOSS = 0.02  # beyond an undisturbed run's, at most
H = 2
BATCH = 8
ROUND_S = 15.0  # network.round_timeout_s
ORPHANS_S = 5.0  # in which what a dead peer has started has to end
LEAVE_S = 60.0  # from the end of the first peer until all have ended
TAIL = 1 << 15  # bytes of a peer's events that hold its newest round
SETTINGS = [
    *(setting for setting in SMALL if not setting.startswith(("strategy.sync.h=", "network.round_timeout_s="))),
    f"network.round_timeout_s={ROUND_S}",
    f"strategy.sync.h={H}",
    f"peers={MOST}",
    f"batch_size={BATCH}",
    f"network.min_peers={FEWEST - 1}",
    "eval.batches=64",
    "sample.tokens=0",
    "log.every=40",
]


class Peer:
    """A peer of the soak: its command, and how it ended."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.is_killed = False
        self.code: int | None = None

    @property
    def is_up(self) -> bool:
        return not self.is_killed and self.command.process.poll() is None

    def events(self) -> list[Event]:
        """All that it has told so far."""
        return [event for path in self._files() for event in read_events(path)]

    def newest(self) -> Event:
        """Its newest round, read from the end of its events; empty when there is none."""
        found: Event = {}
        for path in self._files():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL))
                for line in file.read().splitlines():
                    with contextlib.suppress(ValueError):
                        event = json.loads(line)
                        found = event if event["kind"] == "round" else found
        return found

    def _files(self) -> list[Path]:
        return list(self.command.folder.glob("runs/*/*/peer-0/events.jsonl"))


class Soak:
    """The peers of one run, and those that it has lost."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self.peers: list[Peer] = []
        self._add("start", "name=soak", f"steps={steps}", *SETTINGS)

    def _add(self, *arguments: str) -> None:
        folder = self._folder / f"{len(self.peers)}"
        folder.mkdir()
        self.peers.append(Peer(Command(arguments, folder)))

    @property
    def up(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.is_up]

    def add(self, dice: random.Random | None = None) -> None:
        """Have one more peer join, at any that trains; without dice at the first."""
        doors = [peer for peer in self.up if peer.newest()] or self.up
        self._add("join", (dice.choice(doors) if dice else doors[0]).command.address(), "threads=1")

    def kill(self, peer: Peer) -> None:
        """What kill -9 does to its process; p2pd has to notice by itself."""
        peer.is_killed = True
        os.kill(peer.command.process.pid, signal.SIGKILL)
        peer.command.process.wait(10)

    def fill(self, count: int) -> None:
        """Wait until so many peers train together."""
        while len(self.peers) < count:
            self.add()
        for peer in self.peers:
            all_there = lambda at=peer: len(at.newest().get("members", ())) == count  # noqa: E731
            peer.command.wait_for(f"a round of {count}", all_there, 180)

    def progress(self) -> int:
        """The newest step of a living peer."""
        return max((int(peer.newest().get("step", 0)) for peer in self.up), default=0)

    def close(self) -> None:
        for peer in self.peers:
            peer.command.clean()


@contextlib.contextmanager
def soaking(steps: int, keep: Path | None = None) -> Iterator[Soak]:
    """A swarm in a folder of its own; nothing of it stays unless in `keep`."""
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        soak = Soak(keep or Path(folder), steps)
        try:
            yield soak
        finally:
            soak.close()


def steps_of(minutes: float, count: int) -> int:
    """How many steps this machine takes in so many minutes, by what it takes in some seconds."""
    with soaking(1_000_000) as soak:
        soak.fill(count)
        before = soak.peers[0].newest()
        time.sleep(15)
        after = soak.peers[0].newest()
    rate = (after["round"] - before["round"]) / (after["time"] - before["time"])
    print(f"undisturbed: {rate:.2f} rounds a second", flush=True)
    return H * max(10, round(rate * 60 * minutes))


def disturb(soak: Soak, steps: int, every: float, seed: int) -> int:
    """Kill or add a peer again and again, until nine tenths of the run are over; returns how often."""
    dice = random.Random(seed)
    began, count = time.monotonic(), 0
    while True:
        while time.monotonic() < began + every * (count + 1):
            time.sleep(0.5)
            if soak.progress() >= 0.9 * steps or not soak.up:
                return count
        up = soak.up
        if len(up) > FEWEST and (len(up) >= MOST or dice.random() < 0.5):
            victim = dice.choice(up)
            soak.kill(victim)
            what = f"killed {soak.peers.index(victim)}"
        else:
            soak.add(dice)
            what = f"added {len(soak.peers) - 1}"
        count += 1
        at = f"{time.monotonic() - began:6.1f} s, step {soak.progress()} of {steps}"
        print(f"{at}: {what}, {len(soak.up)} are up", flush=True)


def finish(soak: Soak) -> None:
    """Wait for the end of all that were not killed."""
    left = [peer for peer in soak.peers if not peer.is_killed]
    deadline = math.inf
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        for peer in list(left):
            peer.code = peer.command.process.poll()
            if peer.code is not None:
                left.remove(peer)
                deadline = min(deadline, time.monotonic() + LEAVE_S)


@dataclass(frozen=True)
class Found:
    """What the events of all peers tell."""

    rounds: int  # of all peers together
    failed: dict[str, int]  # reasons, and how often
    torn: int  # rounds whose members do not hold the same bits
    samples: int  # that closed rounds took
    longest: float  # round, in seconds
    digests: set[str]  # of those that finished
    losses: list[float]


def read(soak: Soak) -> Found:
    """Read what all peers have told."""
    failed: dict[str, int] = defaultdict(int)
    digests: dict[int, set[str]] = defaultdict(set)
    samples: dict[int, float] = {}
    rounds, longest = 0, 0.0
    ends: list[Event] = []
    for peer in soak.peers:
        for event in peer.events():
            if event["kind"] == "done":
                ends.append(event)
            elif event["kind"] == "round":
                rounds += 1
                longest = max(longest, event["seconds"])
                if event["failed"] is not None:
                    failed[re.sub(r"round \S+ ?\S*:|\b\w{8}\b", "..", str(event["failed"]))[:150]] += 1
                else:
                    digests[event["round"]].add(event["digest"])
                    samples[event["round"]] = sum(event["weights"])
    torn = sum(len(found - {None}) > 1 for found in digests.values())
    losses = [end["loss"] for end in ends if end.get("loss") is not None]
    final = {str(end["digest"]) for end in ends if end["finished"]}
    return Found(rounds, dict(failed), torn, round(sum(samples.values())), longest, final, losses)


def undisturbed(samples: int, count: int) -> tuple[int, float]:
    """Steps and validation loss of replicas in one process that learn from the same number of samples together."""
    config = load_config(["name=soak", *SETTINGS])
    steps = H * max(1, round(samples / (count * BATCH * H)))
    config.steps = steps
    swarm = LocalSwarm(count, round_timeout=600.0)
    corpus = open_corpus(config)
    outcomes: list[Outcome] = []

    class Silent:
        def emit(self, kind: str, **fields: object) -> None:
            """Nobody reads these."""

    with tempfile.TemporaryDirectory(prefix="soak") as folder:

        def replica(rank: int) -> None:
            trainer = build_trainer(
                config,
                collective=swarm.collectives[rank],
                corpus=corpus,
                source=open_stream(config, corpus, rank),
                events=Silent(),
                checkpoints=Path(folder) / str(rank),
                slot=rank,
            )
            outcomes.append(trainer.run())

        threads = [threading.Thread(target=replica, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    [loss] = [outcome.score.loss for outcome in outcomes if outcome.score is not None]
    return steps, loss


def main() -> None:
    """Run it and print what was found; exit 1 when an aim was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two disturbances")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of the run, instead of what fits into the minutes")
    parser.add_argument("--keep", type=Path, help="an empty folder for the peers' files, which then stay")
    aims.add_options(parser)
    options = parser.parse_args()
    steps = options.steps or steps_of(options.minutes, options.peers)
    with soaking(steps, options.keep) as soak:
        soak.fill(options.peers)
        began = time.monotonic()
        count = disturb(soak, steps, options.every, options.seed)
        finish(soak)
        seconds = time.monotonic() - began
        time.sleep(ORPHANS_S)
        orphans = [line for peer in soak.peers for line in peer.command.alive().values()]
        found = read(soak)
        codes = [peer.code for peer in soak.peers if not peer.is_killed]
        for peer in soak.peers:
            if not peer.is_killed and peer.code != 0:
                print(f"-- {soak.peers.index(peer)} ended with {peer.code}:\n{peer.command.text[-2000:]}", flush=True)
    # As many replicas as there were in the mean, so that they take as many steps for the same samples.
    replicas = max(1, round(found.samples / (steps * BATCH)))
    steps_alone, loss_alone = undisturbed(found.samples, replicas)
    loss = found.losses[0] if found.losses else math.nan
    bad = sum(found.failed.values())
    good = 1 - bad / max(1, found.rounds)
    judged = [
        ("peers, of which killed", f"{len(soak.peers)}, {sum(peer.is_killed for peer in soak.peers)}", True),
        ("disturbances, seconds", f"{count}, {seconds:.0f}", True),
        ("rounds that succeeded", f"{100 * good:.2f} % of {found.rounds}", good >= SUCCEEDED),
        ("rounds whose members differ", f"{found.torn}", found.torn == 0),
        ("longest round", f"{found.longest:.1f} s", found.longest <= ROUND_S + 5),
        ("digests at the end", f"{len(found.digests)} of {len(codes)} peers", len(found.digests) == 1),
        ("peers that failed", f"{sum(code != 0 for code in codes)}", not any(codes) and None not in codes),
        ("processes left behind", f"{len(orphans)}", not orphans),
        ("validation loss", f"{loss:.4f} after {found.samples} samples", len(set(found.losses)) == 1),
        ("undisturbed", f"{loss_alone:.4f} after {steps_alone} steps of {replicas}", True),
        ("beyond it", f"{100 * (loss / loss_alone - 1):+.2f} %", loss <= (1 + LOSS) * loss_alone),
    ]
    for reason, often in sorted(found.failed.items(), key=lambda item: -item[1]):
        print(f"failed {often:4d}: {reason}")
    for name, value, is_met in judged:
        print(f"{name:28} {value}{'' if is_met else '   MISSED'}")
    missed = [f"{name}: {value}" for name, value, is_met in judged if not is_met]
    aims.conclude(missed, {name: value for name, value, _ in judged}, options)


if __name__ == "__main__":
    main()
