"""The events of a run, read back: who did what, and what it cost."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarmkit.metrics import Event, read_events

BYTES_PER_PARAMETER = 4


@dataclass(slots=True)
class PeerEvents:
    """The events of one peer, by kind."""

    name: str
    by_kind: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))

    def of(self, kind: str) -> list[Event]:
        """All events of a kind, in order."""
        return self.by_kind.get(kind, [])

    def last(self, kind: str) -> Event:
        """The last event of a kind; empty when there was none."""
        events = self.of(kind)
        return events[-1] if events else {}

    def total(self, kind: str, key: str) -> float:
        """Sum of a field over all events of a kind."""
        return sum(event.get(key) or 0 for event in self.of(kind))

    @property
    def good_rounds(self) -> list[Event]:
        """Rounds that gave a result."""
        return [event for event in self.of("round") if event.get("failed") is None]


def read_run(folder: Path) -> list[PeerEvents]:
    """Read every peer-*/events.jsonl below a run's folder, in the order of the peers' numbers."""
    peers = []
    for path in sorted(folder.glob("*/events.jsonl"), key=lambda path: (len(path.parent.name), path.parent.name)):
        peer = PeerEvents(path.parent.name)
        for event in read_events(path):
            peer.by_kind[event["kind"]].append(event)
        peers.append(peer)
    return peers


def final_digests(peers: Sequence[PeerEvents]) -> dict[str, str]:
    """Each finished peer's anchor digest at the end."""
    return {peer.name: str(peer.last("done")["digest"]) for peer in peers if peer.last("done").get("finished")}


def every_step_bytes(steps: float, members: int, parameters: int) -> float:
    """What averaging float32 gradients in every step sends: 2 (n - 1) / n of their bytes from each of n peers."""
    return steps * 2 * (members - 1) / members * parameters * BYTES_PER_PARAMETER


def bytes_per_token(peers: Sequence[PeerEvents]) -> tuple[float, float]:
    """Payload bytes that a peer sent per token it learnt from, and what averaging in every step would have sent.

    What was learnt before a run was resumed does not count: its bytes are in another run's events.
    """
    sent = sum(peer.total("round", "bytes_sent") for peer in peers)
    members = max((len(event["members"]) for peer in peers for event in peer.good_rounds), default=1)
    tokens = every_step = 0.0
    for peer in peers:
        start = peer.last("run_start")
        learnt = float(peer.last("train").get("tokens") or 0) - float(start.get("tokens") or 0)
        tokens += learnt
        if start.get("tokens_per_step"):
            every_step += every_step_bytes(learnt / start["tokens_per_step"], members, int(start["parameters"]))
    if not tokens:
        return math.nan, math.nan
    return sent / tokens, every_step / tokens


def bytes_per_token_so_far(peers: Sequence[PeerEvents]) -> Iterator[tuple[float, float]]:
    """After each round: the tokens that all peers had learnt from, and the bytes that they had sent for each."""
    rounds: dict[int, list[tuple[float, float]]] = {}
    for peer in peers:
        last = peer.last("train")
        per_step = float(last.get("tokens") or 0) / max(1, last.get("step") or 0)
        for event in peer.of("round"):
            rounds.setdefault(event["round"], []).append((per_step * (event.get("step") or 0), event["bytes_sent"]))
    sent = 0.0
    for _, members in sorted(rounds.items()):
        sent += sum(size for _, size in members)
        tokens = sum(count for count, _ in members)
        if tokens > 0:
            yield tokens, sent / tokens
