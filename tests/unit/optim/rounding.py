"""A coarse codec with error feedback, small enough to see through, for tests of what strategies do with any codec."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim import Collective, Pending, PlainAveraging, Reduced, RoundKey


@dataclass
class Rounding:
    """Sends multiples of `grid` and keeps what rounding took away; counts what strategies gave to it."""

    collective: Collective
    grid: float = 1 / 64
    residual: list[Tensor] = field(default_factory=list)
    begun: list[tuple[RoundKey, list[Tensor], list[Tensor]]] = field(default_factory=list)

    def begin(
        self, tensors: Sequence[Tensor], exact: Sequence[Tensor] = (), *, round: RoundKey, weight: float
    ) -> Pending:
        self.begun.append((round, list(tensors), list(exact)))
        kept = self.residual or [torch.zeros_like(t) for t in tensors]
        wanted = [t + e for t, e in zip(tensors, kept, strict=True)] if weight > 0 else list(tensors)
        sent = [(t / self.grid).round() * self.grid for t in wanted]
        left = [t - s for t, s in zip(wanted, sent, strict=True)] if weight > 0 else kept
        pending = PlainAveraging(self.collective).begin(sent, exact, round=round, weight=weight)
        return _Round(self, left, pending)

    def state_dict(self) -> dict[str, Any]:
        return {"residual": [tensor.clone() for tensor in self.residual]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "residual" not in state:
            raise ValueError("the state is not of this codec")
        self.residual = [tensor.clone() for tensor in state["residual"]]

    @property
    def is_behind(self) -> bool:
        return False

    def shared_state(self) -> dict[str, Any]:
        return {}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        assert not state


@dataclass
class _Round:
    owner: Rounding
    left: list[Tensor]
    pending: Pending

    def done(self) -> bool:
        return self.pending.done()

    def result(self) -> Reduced:
        reduced = self.pending.result()
        self.owner.residual = self.left
        return reduced

    def cancel(self) -> None:
        self.pending.cancel()
