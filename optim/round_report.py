"""What a strategy reports of each round."""

from dataclasses import dataclass, replace
from typing import Any

from swarmkit.optim.collective import RoundStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What one round did, for metrics."""

    round: int
    step: int  # inner steps completed when the round closed
    window: int  # H: inner steps since the last round
    members: tuple[str, ...] = ()
    weight: float = 0.0  # what this peer offered to contribute with, whether or not the round took it; 0: it observed
    weights: tuple[float, ...] = ()  # what the round took of each of the members; 0: left out, or observed
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0  # how long the round took
    waited: float = 0.0  # of these, until the slowest member had come
    route: str = ""  # how a codec's payloads travelled: "gather", "sharded" or "fp16"
    exposed: float = 0.0  # seconds that training stood still for it, encoding included
    overlap: float = 0.0  # share of the round hidden behind computation
    pseudo_gradient_norm: float = 0.0  # L2 norm of the averaged update
    staleness_penalty: float = 1.0  # what the update was divided by because it came late
    clipped: float = 0.0  # share of the outer momentum's values that were clipped
    failed: str | None = None  # why nothing was applied, or why nothing was contributed
    missed: bool = False  # the others closed the round without this peer
    diverged: bool = False  # because this peer's anchor is not the majority's

    def closed(self, stats: RoundStats, **more: Any) -> "RoundReport":  # noqa: ANN401 - fields of the report
        """This report once the round has closed: who was in it, what it cost, and whatever else there is to say."""
        return replace(
            self,
            members=stats.members,
            weights=stats.weights,
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
            seconds=stats.seconds,
            waited=stats.waited,
            route=stats.route,
            **more,
        )
