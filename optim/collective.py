"""The Collective protocol and its result types: the seam between algorithms and networks."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from swarmkit.optim.shards import Wire, Wired


@dataclass(frozen=True, slots=True, order=True)
class RoundKey:
    """Names one round: all members of a round use the same key, and a key is used once."""

    name: str  # what is synchronised, for example "gradients" or "parameters"
    index: int  # number of the round, from 0
    # What the member's contribution starts from, such as a hash over the rounds it has applied. Members with different
    # ones are not averaged: those in the minority miss the round. Empty: fits all.
    lineage: str = field(default="", compare=False)
    # Of the tensors it starts from. Among members of one lineage those in the minority miss the round. Empty: unknown.
    digest: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.name}/{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStats:
    """Who was in a closed round and what it cost this peer."""

    members: tuple[str, ...]  # peer ids whose contribution is in the result, the same order on all members
    weights: tuple[float, ...]  # the weight of each member as it offered it, aligned with members
    bytes_sent: int  # payload bytes that left this process, failed attempts and framing included
    bytes_received: int
    seconds: float  # from the call to the close of the round
    id: str = ""  # of the closed round, equal on all members and different for every round
    waited: float = 0.0  # seconds of these spent until the slowest member had arrived
    route: str = ""  # how a codec's payloads travelled: "gather", "sharded" or, cheaper than both, "fp16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced(RoundStats):
    """The weighted mean over the members of a closed round."""

    tensors: list[Tensor]  # shapes and dtypes of the input, owned by the caller, bitwise equal on all members
    wired: Wired | None = None  # of a reduction through a wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered(RoundStats):
    """Every member's payload in a closed round; the same set in the same order on all members."""

    payloads: list[list[Tensor]]  # one list per member, aligned with members


def stats_of(closed: RoundStats, kept: Sequence[int]) -> dict[str, Any]:
    """The stats of a closed round of which only the contributions of the members at `kept` counted."""
    stats = {entry.name: getattr(closed, entry.name) for entry in fields(RoundStats)}
    return stats | {name: tuple(stats[name][i] for i in kept) for name in ("members", "weights")}


@runtime_checkable
class Collective(Protocol):
    """What a strategy needs from a network. Both calls return at once and work in the background.

    The input tensors belong to the round until its future is done: do not write to them meanwhile. A future ends,
    always and within the round's timeout, in a result, in `RoundFailed`, or in `CancelledError` after `cancel()`.
    A round closes once for all members alike: whoever gets a result gets the same one, bit for bit.
    """

    peer_id: str

    def all_reduce(
        self, tensors: Sequence[Tensor], *, round: RoundKey, weight: float, wire: Wire | None = None
    ) -> Future[Reduced]:
        """Average floating-point tensors over the members: sum(weight * tensor) / sum(weight).

        The mean is accumulated in float32 (float64 for float64) in member order and returned in the input's dtype.
        A weight of 0 takes part without influence (a joiner, an observer). All weights 0 fails the round.

        With a `wire` the first tensor, flat and float32, travels encoded, in both directions (see Shards): members
        get the same bits, but not those of the exact mean. What cannot be decoded speaks against who sent it.

        Raises ValueError at once for tensors that are not floating point, are not finite, or for a weight that is
        negative or not finite, naming the culprit's position.
        """
        ...

    def all_gather(self, payload: Sequence[Tensor], *, round: RoundKey, weight: float) -> Future[Gathered]:
        """Give every member's payload to every member; sizes, shapes and dtypes may differ between members."""
        ...

    def close(self) -> None:
        """Leave; rounds in flight end in RoundFailed."""
        ...
