"""Whether the peers of a run hold the same anchor, judged by the digests in their heartbeats."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from torch import Tensor

from swarmkit.optim.snapshot import digest_tensors
from swarmkit.peers.errors import JoinFailed
from swarmkit.peers.roster import PeerRecord
from swarmkit.peers.votes import major_digest

REMEMBERED = 256


def check_anchor(tensors: Mapping[str, Tensor], meta: Mapping[str, object], records: Sequence[PeerRecord]) -> None:
    """Raise JoinFailed for a state that is not what the majority says in its heartbeats that it holds."""
    lineage = meta.get("lineage")
    wanted = major_digest(records, lineage if isinstance(lineage, str) else "")
    anchor = {name.removeprefix("anchor/"): t for name, t in tensors.items() if name.startswith("anchor/")}
    if wanted and digest_tensors(anchor) != wanted:
        raise JoinFailed(f"the state that was served is not the one that the peers hold, whose digest is {wanted[:12]}")


class Agreement:
    """Compares what this peer held after each round with what the others say they held after the same ones.

    Heartbeats come at any moment, so those of two peers are rarely of the same round: what this one held is remembered.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[str, str] = OrderedDict()  # lineage -> digest

    def note(self, lineage: str, digest: str) -> None:
        """Remember what this peer holds."""
        if lineage and digest:
            self._held[lineage] = digest
            while len(self._held) > REMEMBERED:
                self._held.popitem(last=False)

    def forget(self) -> None:
        """This peer has taken over the others' state: what it held before does not matter any more."""
        self._held.clear()

    def verdict(self, records: Sequence[PeerRecord], me: PeerRecord) -> str:
        """Why this peer had better fetch the state: the majority held something else. Empty: it agrees.

        On a tie those count that joined first, as in a round.
        """
        same, other = [me], list[PeerRecord]()
        for record in records:
            held = self._held.get(record.lineage)
            if record.peer_id != me.peer_id and record.is_active and held is not None and record.digest:
                (same if record.digest == held else other).append(record)
        first = min([*same, *other], key=lambda record: (record.joined_at, record.peer_id))
        if len(other) < len(same) or (len(other) == len(same) and first in same):
            return ""
        names = ", ".join(record.peer_id[-8:] for record in other)
        return (
            f"the anchor of {me.peer_id[-8:]} differs from the majority's: {len(other)} peers ({names}) held another "
            f"digest after the same rounds, {len(same)} this one"
        )
