"""Lead: how far a peer runs ahead of the shared state with its own newest contributions (arXiv 2502.12996)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LeadOf = Literal["nothing", "share", "everything"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """What the outer steps to come will make of a peer's own contributions, taken in advance.

    With c = share * pseudo-gradient for the round that is under way and b = momentum * b + c over all rounds, a window
    starts from anchor - lr (c + momentum * b) with Nesterov and anchor - lr * b without. For an outer SGD this is eager
    DiLoCo (Alg. 3) exactly, where each peer's own part is never stale. The share in a closed round is the true one, in
    the round under way what the last one lets expect, so neither members nor weights have to stay the same.
    """

    of: LeadOf
    lr: float
    momentum: float
    nesterov: bool

    def share(self, weight: float, others: float | None) -> float:
        """The part of a mean that this peer's contribution makes up when all others together weigh `others`."""
        if weight <= 0 or self.of == "nothing":
            return 0.0
        if self.of == "everything":
            return 1.0
        return weight / (weight + others) if others is not None else 0.0

    def ahead(self, start: list[Tensor], own: list[Tensor], carry: list[Tensor], share: float) -> list[Tensor]:
        """Where to start from: the anchor, the contribution under way, b over the closed rounds, the share."""
        if self.of == "nothing":
            return start
        # Nesterov: c + momentum (momentum b + c).
        found = torch._foreach_mul(own, self.lr * share * (1 + self.momentum if self.nesterov else 1))
        if carry:
            factor = self.lr * self.momentum * (self.momentum if self.nesterov else 1)
            torch._foreach_add_(found, carry, alpha=factor)
        return list(torch._foreach_sub(start, found))

    def carried(self, own: list[Tensor], carry: list[Tensor], share: float) -> list[Tensor]:
        """The next b, once the round of a contribution has closed; nothing where it would not be used."""
        if self.of == "nothing" or self.momentum == 0:
            return []
        found = list(torch._foreach_mul(own, share))
        if carry:
            torch._foreach_add_(found, carry, alpha=self.momentum)
        return found
