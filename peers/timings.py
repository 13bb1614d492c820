"""Whose time a round took: when members came, and how long each one's uplink and downlink needed."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.wire import Message, field, finite

MAX_S = 1e6
Seconds = float | None  # None: nothing was measured


@dataclass(frozen=True, slots=True)
class Measured:
    """What one member saw of the others in an attempt, in seconds since the attempt began for it."""

    parts: tuple[Seconds, ...]  # until all that each member had to send it had arrived
    ready: Seconds  # until the slice that it owns was averaged
    means: tuple[Seconds, ...]  # until the averaged slice of each owner had arrived

    def to_message(self) -> Message:
        """As a field of a control message."""
        return {"parts": list(self.parts), "ready": self.ready, "means": list(self.means)}

    @classmethod
    def from_message(cls, message: object) -> "Measured | None":
        """Read what a member claims; None when it claims nothing. Raises ProtocolError."""
        if message is None:
            return None
        if not isinstance(message, dict):
            raise ProtocolError("timings must be a map")
        ready = message.get("ready")
        return cls(_seconds(message, "parts"), None if ready is None else _second(ready), _seconds(message, "means"))


@dataclass(frozen=True, slots=True)
class RoundTimings:
    """Seconds of a closed round, one entry for each member, the same on all members."""

    arrived: tuple[Seconds, ...]  # after the first contributor; None: it did not contribute
    upload: tuple[Seconds, ...]
    download: tuple[Seconds, ...]

    def to_message(self) -> Message:
        """As a field of a control message."""
        return {"arrived": list(self.arrived), "upload": list(self.upload), "download": list(self.download)}

    @classmethod
    def from_message(cls, message: object, members: int) -> "RoundTimings | None":
        """Read what the coordinator tells; None when it tells nothing. Raises ProtocolError."""
        if message is None:
            return None
        if not isinstance(message, dict):
            raise ProtocolError("timings must be a map")
        lists = [_seconds(message, name) for name in ("arrived", "upload", "download")]
        if any(len(values) != members for values in lists):
            raise ProtocolError(f"timings of other than {members} members")
        return cls(*lists)


class Stopwatch:
    """Takes the times of one attempt at one member."""

    def __init__(self, members: int) -> None:
        """Start now."""
        self._began = time.monotonic()
        self._parts: list[Seconds] = [None] * members
        self._means: list[Seconds] = [None] * members
        self._ready: Seconds = None

    def note_part(self, member: int) -> None:
        """All that a member had to send has arrived."""
        self._parts[member] = time.monotonic() - self._began

    def note_mean(self, owner: int) -> None:
        """An owner's averaged slice has arrived."""
        self._means[owner] = time.monotonic() - self._began

    def note_ready(self) -> None:
        """Some of the slice that this member owns is averaged; the last call counts."""
        self._ready = time.monotonic() - self._began

    def measured(self) -> Measured:
        """What was taken so far."""
        return Measured(tuple(self._parts), self._ready, tuple(self._means))


def _seconds(message: Message, name: str) -> tuple[Seconds, ...]:
    return tuple(None if value is None else _second(value) for value in field(message, name, list))


def _second(value: object) -> float:
    return field({"seconds": value}, "seconds", float, lambda s: finite(s) and s <= MAX_S)


def combine(
    members: Sequence[str],
    weights: Sequence[float],
    arrived: Mapping[str, float],
    measured: Mapping[str, Measured | None],
) -> RoundTimings:
    """Put what all members saw together; `arrived` is monotonic time.

    A transfer between two members has two ends, and either may be what is slow. A member whose uplink is slow is late
    at all others, one whose downlink is slow gets everything late: so a member's figure is the lower median over the
    others. What a mean waited for at its owner is not the link's time, and is subtracted.
    """
    first = min((arrived[m] for m, weight in zip(members, weights, strict=True) if weight > 0), default=0.0)
    came = [
        max(0.0, arrived[member] - first) if weight > 0 else None
        for member, weight in zip(members, weights, strict=True)
    ]
    count = len(members)
    table = [[_transfer(measured, members, i, j) if i != j else None for j in range(count)] for i in range(count)]
    upload = [lower_median(row) for row in table]
    download = [lower_median([row[j] for row in table]) for j in range(count)]
    return RoundTimings(tuple(came), tuple(upload), tuple(download))


def _transfer(measured: Mapping[str, Measured | None], members: Sequence[str], source: int, target: int) -> Seconds:
    """Seconds that bytes from `source` to `target` took, both the parts and the mean."""
    seen, owner = measured.get(members[target]), measured.get(members[source])
    if seen is None or len(seen.parts) != len(members) or len(seen.means) != len(members):
        return None
    parts, mean = seen.parts[source], seen.means[source]
    if owner is not None and owner.ready is not None and mean is not None:
        return (parts or 0.0) + max(0.0, mean - owner.ready)
    return parts


def lower_median(values: Sequence[Seconds]) -> Seconds:
    """The median of what is known, the lower of two; None when nothing is."""
    known = sorted(value for value in values if value is not None and math.isfinite(value))
    return known[(len(known) - 1) // 2] if known else None
