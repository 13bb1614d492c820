"""What the majority of peers says that it holds after the same rounds, by the digests in the peer table."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol


class Voter(Protocol):
    """A row of the peer table."""

    @property
    def peer_id(self) -> str:
        """Who it is."""
        ...

    @property
    def lineage(self) -> str:
        """Hash chain over the rounds that it has had."""
        ...

    @property
    def digest(self) -> str:
        """Of the anchor that it holds after these."""
        ...


def outvoted(records: Sequence[Voter]) -> dict[str, str]:
    """Peers whose digest differs from the majority's of their lineage, with the majority's; a tie outvotes nobody."""
    groups: dict[str, list[Voter]] = {}
    for record in records:
        if record.lineage and record.digest:
            groups.setdefault(record.lineage, []).append(record)
    found: dict[str, str] = {}
    for group in groups.values():
        ranked = Counter(record.digest for record in group).most_common(2)
        if len(ranked) > 1 and ranked[0][1] > ranked[1][1]:
            found |= {record.peer_id: ranked[0][0] for record in group if record.digest != ranked[0][0]}
    return found


def major_digest(records: Sequence[Voter], lineage: str) -> str:
    """The digest that most peers have for a lineage; empty when none has it, or no majority decides."""
    counts = Counter(record.digest for record in records if record.lineage == lineage and record.digest)
    ranked = counts.most_common(2)
    if not ranked or not lineage or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return ""
    return ranked[0][0]
