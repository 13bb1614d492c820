"""DiLoCo: an outer Nesterov step on the averaged pseudo-gradient every H inner steps (arXiv 2311.08105)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim.norms import total_norm
from swarmkit.optim.snapshot import check_form
from swarmkit.optim.synced import SyncedOptimizer


class DiLoCo(SyncedOptimizer):
    """Train alone for H inner steps, then move the anchor along the averaged pseudo-gradient (Alg. 1).

    The pseudo-gradient is the anchor minus the local parameters; the outer optimizer is torch's SGD with Nesterov
    momentum, so v = mu v + g and anchor -= lr (g + mu v): the first outer step moves 1 + mu times outer_lr times the
    mean, and a constant pseudo-gradient in the end 1 / (1 - mu) times. The anchor and the momentum are float32 whatever
    the parameters are; a pseudo-gradient counts from the rounded anchor that training started from, so that rounding is
    never taken for progress. With `outer_lr=1, outer_momentum=0` the outer step is the mean of the parameters: then
    these are sent instead, unless a codec compresses, and one peer equals its inner optimizer bit for bit.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        **options: Any,  # noqa: ANN401 - see SyncedOptimizer
    ) -> None:
        if not outer_lr >= 0:
            raise ValueError(f"outer_lr={outer_lr}: must not be negative")
        if not 0 <= outer_momentum < 1:
            raise ValueError(f"outer_momentum={outer_momentum}: must be at least 0 and below 1")
        self._outer_lr = outer_lr
        self._outer_momentum = outer_momentum
        self._nesterov = nesterov and outer_momentum > 0
        super().__init__(inner, **options)

    @property
    def _is_mean(self) -> bool:
        return self._outer_lr == 1 and self._outer_momentum == 0 and self.is_plain

    @property
    def round_name(self) -> str:  # type: ignore[override]
        """Peers whose outer steps need different payloads must not meet."""
        return "parameters" if self._is_mean else "pseudo-gradients"

    def _adopt_parameters(self) -> None:
        super()._adopt_parameters()
        self.outer = torch.optim.SGD(
            self._anchor.tensors,
            lr=self._outer_lr,
            momentum=self._outer_momentum,
            nesterov=self._nesterov,
            foreach=True,
        )

    def _contribution(self, observe: bool) -> list[Tensor]:
        if self._is_mean:
            return [torch.zeros_like(p) if observe else p.detach() for p in self._anchor.parameters]
        if observe:
            return [torch.zeros_like(held) for held in self._anchor.tensors]
        return list(torch._foreach_sub(self._anchor.rounded(), self._anchor.local()))

    def _apply(self, mean: list[Tensor], exact: list[Tensor]) -> float:
        if self._is_mean:
            new = self._anchor.like(mean)
            norm = total_norm(torch._foreach_sub(self._anchor.tensors, new))
            self._anchor.assign(new)
        else:
            norm = total_norm(mean)
            for held, gradient in zip(self._anchor.tensors, self._anchor.like(mean), strict=True):
                held.grad = gradient
            self.outer.step()
            self.outer.zero_grad()
        self._anchor.restore()
        return norm

    def _outer_tensors(self) -> dict[str, Tensor]:
        found = {}
        for name, held in self._anchor.named().items():
            buffer = self.outer.state.get(held, {}).get("momentum_buffer")
            if buffer is not None:
                found[f"{name}/momentum_buffer"] = buffer
        return found

    def _check_outer(self, tensors: Mapping[str, Tensor]) -> None:
        # Before the first outer step there is no momentum yet, and without momentum there never is.
        wanted = self._anchor.named() if tensors and self._outer_momentum else {}
        check_form("outer", tensors, {f"{name}/momentum_buffer": held for name, held in wanted.items()})

    def _load_outer(self, tensors: Mapping[str, Tensor]) -> None:
        self.outer.state.clear()
        for name, held in self._anchor.named().items():
            buffer = tensors.get(f"{name}/momentum_buffer")
            if buffer is not None:
                self.outer.state[held] = {"momentum_buffer": buffer.to(held.device, copy=True)}
