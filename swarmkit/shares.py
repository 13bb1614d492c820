"""From the events of a run to what became of the data: which samples were learnt, lost, doubled, drawn in vain."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmkit.events import PeerEvents
from swarmkit.metrics import Event
from swarmkit.peers.shares import Coverage, Range, cover


@dataclass(slots=True)
class _Holder:
    """One process that held a share, from its first event to its last."""

    slot: int
    start: int
    stop: int
    last_round: int = -1
    ended: bool = False


@dataclass(slots=True, kw_only=True)
class DataRecord:
    """What the events say of a run's data."""

    slots: dict[int, Coverage] = field(default_factory=dict)  # of the planned slots
    extra: int = 0  # samples that peers beyond the plan learnt, each of which a planned slot has too
    redrawn: int = 0  # drawn in vain and drawn again, by peers that lived to tell
    claims: dict[int, list[str]] = field(default_factory=dict)  # slot -> the peers that had it, in turn

    @property
    def total(self) -> Coverage:
        """All planned slots together."""
        found = self.slots.values()
        return Coverage(*(sum(getattr(one, name) for one in found) for name in ("learnt", "lost", "doubled")))


def read_data(peers: Sequence[PeerEvents]) -> DataRecord:
    """Add the peers' records up; empty when there are none, as of runs of older versions.

    A peer that was killed between the close of a round and its record of it is no gap: the others' records say with
    how many samples it was in.
    """
    events = sorted((event for peer in peers for kind in peer.by_kind.values() for event in kind), key=_time)
    holders: dict[str, _Holder] = {}
    record = DataRecord()
    planned = 0
    for event in events:
        peer_id, kind = str(event.get("peer")), event["kind"]
        if kind == "run_start" and "data_from" in event:
            planned = max(planned, int(event["slots"]))
            start = int(event["data_from"])
            holders[peer_id] = _Holder(int(event["slot"]), start, start)
            record.claims.setdefault(int(event["slot"]), []).append(peer_id)
        elif kind == "round" and peer_id in holders and "data_to" in event:
            holders[peer_id].stop = int(event["data_to"])
            holders[peer_id].start = int(event["data_from"])
            holders[peer_id].last_round = int(event["round"])
        elif kind == "done" and peer_id in holders:
            holders[peer_id].ended = True
            record.redrawn += int(event.get("redrawn") or 0)
    for peer_id, holder in holders.items():
        if not holder.ended:
            holder.stop += _unrecorded(peer_id, holder.last_round, events)
    ranges = [Range(holder.slot, holder.start, holder.stop) for holder in holders.values()]
    record.slots = cover(one for one in ranges if one.slot < planned)
    record.extra = sum(one.stop - one.start for one in ranges if one.slot >= planned)
    return record


def _time(event: Event) -> float:
    return float(event.get("time") or 0.0)


def _unrecorded(peer_id: str, last_round: int, events: Sequence[Event]) -> int:
    """Samples with which a peer was in rounds after the last one that it recorded."""
    taken: dict[int, int] = {}
    for event in events:
        if event["kind"] != "round" or event.get("failed") is not None or int(event["round"]) <= last_round:
            continue
        if event.get("samples_per_weight") and peer_id in event["members"]:
            taken[int(event["round"])] = _samples(peer_id, event)
    return sum(taken.values())


def _samples(peer_id: str, event: Event) -> int:
    weights: dict[str, Any] = dict(zip(event["members"], event["weights"], strict=True))
    return round(float(weights[peer_id]) * int(event["samples_per_weight"]))
