"""The peer table for people: who is in a run, whether heartbeats or a peer's control plane told it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from swarmkit.peers.votes import outvoted

if TYPE_CHECKING:
    from swarmkit.peers.roster import PeerRecord  # whose import takes seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a control plane tells of a peer: fields of a PeerRecord."""

    peer_id: str
    role: str
    state: str
    updated_at: float
    round: int
    step: int
    tokens_per_s: float
    loss: float
    bytes_sent: int
    bytes_received: int
    device: str
    version: str
    digest: str
    lineage: str
    address: str


def table(run: str, records: Sequence["PeerRecord | Row"], *, now: float) -> Table:
    """The peers as a table; `now` is wall-clock time, which heartbeats carry as well."""
    wrong = outvoted(records)
    shown = Table(
        title=f"run {escape(run)}: {len(records)} peers, {_agreement(records)}", box=None, padding=(0, 1, 0, 0)
    )
    columns = (
        "peer",
        "role",
        "state",
        "step",
        "round",
        "loss",
        "tok/s",
        "MB out",
        "MB in",
        "device",
        "seen",
        "anchor",
    )
    for column in columns:
        numeric = column in ("step", "round", "loss", "tok/s", "MB out", "MB in", "seen")
        shown.add_column(column, justify="right" if numeric else "left")
    for record in records:
        shown.add_row(
            escape(record.peer_id[-6:]),
            escape(record.role),
            escape(record.state),
            str(record.step),
            str(record.round),
            f"{record.loss:.3f}",
            f"{record.tokens_per_s:,.0f}",
            f"{record.bytes_sent / 1e6:.1f}",
            f"{record.bytes_received / 1e6:.1f}",
            escape(record.device),
            f"{max(0.0, now - record.updated_at):.0f} s",
            escape(_anchor(record, record.peer_id in wrong)),
        )
    return shown


def _anchor(record: "PeerRecord | Row", is_wrong: bool) -> str:
    """Beginnings of lineage and digest: where lineages are equal, digests must be; a ! stands before the minority's."""
    if not (record.lineage and record.digest):
        return record.digest[:6]
    return f"{record.lineage[:2]}{'!' if is_wrong else '/'}{record.digest[:4]}"


def _agreement(records: Sequence["PeerRecord | Row"]) -> str:
    held: dict[str, set[str]] = {}
    for record in records:
        if record.digest:
            held.setdefault(record.lineage or str(record.round), set()).add(record.digest)
    if any(len(digests) > 1 for digests in held.values()):
        return "anchors DIFFER"
    if len(set().union(*held.values())) <= 1:
        return "anchors equal" if held else "no anchor yet"
    # Heartbeats of different rounds are expected to differ: peers beat at different moments.
    return "heartbeats of different rounds"
