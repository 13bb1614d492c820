"""Offer: what a peer brings to a round."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Offer:
    """A contribution; zeros of weight 0 from a peer that only observes or has nothing to give."""

    tensors: list[Tensor]  # a codec may compress these
    exact: list[Tensor] = field(default_factory=list)  # but not these; buffers come last
    weight: float = 0.0
    trouble: str | None = None  # why nothing but zeros of weight 0 is offered
