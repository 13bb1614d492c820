"""Who has learnt from which samples: the range of its share that every peer tells, kept when the peer is gone."""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.wire import Message, field

if TYPE_CHECKING:
    # The report counts with this module, in a process that has no other use for torch and hivemind.
    from swarmkit.peers.rpc import Rpc

MAX_RANGES = 2048
ASKED = 3  # peers whose memory a newcomer asks for
MAX_SLOT, MAX_POSITION = 1 << 20, 1 << 53


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Samples [start, stop) of a slot's share of the data, counted through all epochs, that one peer learnt from."""

    slot: int
    start: int
    stop: int

    @classmethod
    def checked(cls, slot: object, start: object, stop: object) -> "Range":
        """From what a stranger says; raises ProtocolError."""
        values = [value for value in (slot, start, stop) if type(value) is int]
        if len(values) < 3 or not 0 <= values[0] <= MAX_SLOT or not 0 <= values[1] <= values[2] <= MAX_POSITION:
            raise ProtocolError(f"no range of samples: {str((slot, start, stop))[:80]}")
        return cls(*values)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What became of one share, from the first sample that anybody learnt to the last."""

    learnt: int = 0  # different samples that were learnt
    lost: int = 0  # that nobody learnt, though later ones of the share were
    doubled: int = 0  # times that a sample was learnt once more


def cover(ranges: Iterable[Range]) -> dict[int, Coverage]:
    """Count each slot's samples: its ranges may have gaps and overlap."""
    of_slot: dict[int, list[Range]] = defaultdict(list)
    for one in ranges:
        if one.stop > one.start:
            of_slot[one.slot].append(one)
    return {slot: _cover_share(sorted(found)) for slot, found in sorted(of_slot.items())}


def _cover_share(ranges: list[Range]) -> Coverage:
    learnt, end = 0, ranges[0].start
    for one in ranges:
        learnt += max(0, one.stop - max(end, one.start))
        end = max(end, one.stop)
    total = sum(one.stop - one.start for one in ranges)
    return Coverage(learnt=learnt, lost=end - ranges[0].start - learnt, doubled=total - learnt)


class Shares:
    """What peers have told of their shares, the newest word of each; bounded, the oldest peers are forgotten first."""

    def __init__(self) -> None:
        self._of_peer: dict[str, Range] = {}

    def note(self, peer_id: str, told: Range) -> None:
        """Keep a peer's range; an older word of it, which ends earlier, changes nothing."""
        known = self._of_peer.get(peer_id)
        if known is not None and (known.slot, known.start) == (told.slot, told.start) and told.stop < known.stop:
            return
        if known is None and len(self._of_peer) >= MAX_RANGES:
            self._of_peer.pop(next(iter(self._of_peer)))
        self._of_peer[peer_id] = told

    @property
    def of_peer(self) -> dict[str, Range]:
        """The newest word of each peer."""
        return dict(self._of_peer)

    def mark(self, slot: int) -> int | None:
        """Up to where a share was learnt; None when nobody is known to have had it."""
        return max((told.stop for told in self._of_peer.values() if told.slot == slot), default=None)


class SharesExchange(Shares):
    """What this peer remembers, which others may ask for: whoever comes later than a death has not heard of it."""

    def __init__(self, rpc: "Rpc") -> None:
        super().__init__()
        self._rpc = rpc
        rpc.handle("shares", self._on_shares, onlookers=True)

    def hear(self, peer_id: str, slot: int, start: int, stop: int) -> None:
        """Note what a stranger says of itself, unless it has no share or cannot be meant."""
        if slot >= 0:
            with contextlib.suppress(ProtocolError):
                self.note(peer_id, Range.checked(slot, start, stop))

    async def ask(self, peers: Sequence[str]) -> None:
        """Take over what some of the others remember."""
        for peer_id in peers[:ASKED]:
            with contextlib.suppress(PeerUnreachable, ProtocolError):
                answer = await self._rpc.call(peer_id, "shares", {}, timeout=5.0)
                for told in field(answer, "shares", list, lambda told: len(told) <= MAX_RANGES):
                    if not isinstance(told, list) or len(told) != 4 or not isinstance(told[0], str):
                        raise ProtocolError("field 'shares' must be a list of a peer and three numbers each")
                    self.hear(told[0][:100], *(value if type(value) is int else -1 for value in told[1:]))

    async def _on_shares(self, caller: str, message: Message) -> Message:
        return {"shares": [[peer, told.slot, told.start, told.stop] for peer, told in self.of_peer.items()]}
