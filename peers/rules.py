"""How a reduction averages and what it accepts: the same for all members of a round, or they are not averaged."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swarmkit.optim.mean import trimmed_mean
from swarmkit.optim.norms import total_norm
from swarmkit.peers.settings import NetworkSettings

MIN_MEMBERS = 3  # who contribute: of two norms none is the odd one out
LARGEST_NORM = 1e300  # what is said of a norm that overflows


@dataclass(frozen=True, slots=True)
class Rules:
    """See NetworkSettings.trim and NetworkSettings.max_norm_ratio."""

    trim: float = 0.0
    max_norm_ratio: float = 0.0

    @classmethod
    def of(cls, settings: NetworkSettings) -> "Rules":
        """Those of a node."""
        return cls(settings.trim, settings.max_norm_ratio)

    def __str__(self) -> str:
        return f"trim={self.trim:g} max_norm_ratio={self.max_norm_ratio:g}"

    def norm_of(self, tensors: Sequence[Tensor]) -> float:
        """What a member says of its contribution when it comes to a round; 0 where nobody looks."""
        return min(total_norm(tensors), LARGEST_NORM) if self.max_norm_ratio else 0.0

    def limit(self, norm: float) -> float:
        """The largest norm of a member's part in one slice, given the median of what the members said."""
        return self.max_norm_ratio * norm if self.max_norm_ratio and norm > 0 else math.inf

    def mean(self, parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Average the members' parts of a chunk."""
        return trimmed_mean(parts, weights, self.trim)


def median_norm(norms: Sequence[float]) -> float:
    """The median of what contributing members said; 0, which bounds nothing, of fewer than three."""
    return statistics.median(norms) if len(norms) >= MIN_MEMBERS else 0.0
