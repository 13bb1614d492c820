"""Offer: what a peer brings to a round."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarmkit.optim.norms import all_finite


@dataclass(slots=True)
class Offer:
    """A contribution; zeros of weight 0 from a peer that only observes or has nothing to give."""

    tensors: list[Tensor]  # a codec may compress these
    exact: list[Tensor] = field(default_factory=list)  # but not these; buffers come last
    weight: float = 0.0
    trouble: str | None = None  # why nothing but zeros of weight 0 is offered

    @classmethod
    def of_zeros(cls, like: Sequence[Tensor], exact_like: Sequence[Tensor], trouble: str | None = None) -> "Offer":
        """Nothing, in the form that the others offer."""
        return cls([torch.zeros_like(t) for t in like], [torch.zeros_like(t) for t in exact_like], trouble=trouble)


def not_finite(what: str, peer_id: str) -> str:
    """The trouble of a peer that had better not contribute."""
    return f"{what} on peer {peer_id} are not finite: it contributed nothing"


def can_be_sent(tensors: Sequence[Tensor], exact: Sequence[Tensor], *, coded: bool) -> bool:
    """True when all is finite; what a codec gets also in float32, in which codecs compute."""
    narrow = [tensor.float() for tensor in tensors if coded and tensor.dtype == torch.float64]
    return all_finite([*tensors, *exact]) and all_finite(narrow)
