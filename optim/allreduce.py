"""AllReduce: average the gradients in every step, the baseline that all else is measured against."""

import math
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from swarmkit.optim.anchor import LiveAnchor
from swarmkit.optim.norms import total_norm
from swarmkit.optim.offer import Offer
from swarmkit.optim.options import Coded
from swarmkit.optim.synced import Closure, SyncedOptimizer


class AllReduce(SyncedOptimizer):
    """Average the gradients over the replicas before every inner step, as data parallelism does.

    Each contribution is weighted by the samples it was computed from (`samples`). Gradients of a failed round are kept
    and averaged into the next one by weight. A parameter without a gradient on one peer counts as zero there; one
    without a gradient anywhere is left alone, as its optimizer would. Clip with `clip` rather than before the step:
    clipping each replica's gradient is not what one process does on the whole batch.
    """

    round_name = "gradients"
    _not_here = {
        "sync": "AllReduce synchronises in every step; LocalSGD and DiLoCo have windows",
        "pace": "AllReduce synchronises in every step, so there is no window to fill together",
    }

    def __init__(self, inner: torch.optim.Optimizer, *, clip: float | None = None, **options: Unpack[Coded]) -> None:
        """Wrap `inner`; `clip` is the largest global L2 norm of the mean gradient, the rest see SyncedOptimizer."""
        if clip is not None and not clip > 0:
            raise ValueError(f"clip={clip}: must be positive, or None")
        self._clip = clip
        self._kept: list[Tensor] = []
        self._kept_weight = 0.0
        super().__init__(inner, **options)

    def _adopt_parameters(self) -> None:
        self._anchor = LiveAnchor(list(self.parameters()), names=self._names, offload=None)

    def step(self, closure: Closure | None = None) -> Any:  # noqa: ANN401
        """Average the gradients and take one inner step with the mean."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._unscale():
            # Overflowed: what is not finite is not sent, and the others' mean is applied here as well.
            for parameter in self._anchor.parameters:
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan)
        self._window = 1
        self.step_count += 1
        self._unsent_steps += 1
        self._synchronise()
        return loss

    def _contribution(self, observe: bool) -> list[Tensor]:
        parameters = self._anchor.parameters
        if observe:
            return [torch.zeros_like(p) for p in parameters]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        if self._kept:
            total = self._weight()
            gradients = list(torch._foreach_mul(gradients, 1 - self._kept_weight / total))
            torch._foreach_add_(gradients, self._kept[:-1], alpha=self._kept_weight / total)
        return gradients

    def _exact_contribution(self, observe: bool) -> list[Tensor]:
        """One number a parameter: whether it has a gradient here."""
        parameters = self._anchor.parameters
        present = [float(p.grad is not None and not observe) for p in parameters]
        shares = torch.tensor(present, device=parameters[0].device)
        return [torch.maximum(shares, self._kept[-1]) if self._kept and not observe else shares]

    def _weight(self) -> float:
        return self._kept_weight + (self.samples if self.samples > 0 else 1.0)

    def _local_work(self) -> list[Tensor] | None:
        return None  # gradients at parameters that are replaced

    def _on_failure(self, offer: Offer) -> None:
        if offer.weight > 0:
            self._kept = [tensor.clone() for tensor in [*offer.tensors, offer.exact[0]]]
            self._kept_weight = offer.weight
        self.samples, self._unsent_steps = 0.0, 0

    def _apply(self, mean: list[Tensor], exact: list[Tensor]) -> float:
        self._kept, self._kept_weight = [], 0.0
        norm = total_norm(mean)
        if self._clip is not None and norm > self._clip:
            torch._foreach_mul_(mean, self._clip / norm)
        for parameter, gradient, share in zip(self._anchor.parameters, mean, exact[0].tolist(), strict=True):
            parameter.grad = gradient if share > 0 else None
        self.inner.step()
        return norm

    def _start_over(self, meta: Mapping[str, Any]) -> None:
        self._kept, self._kept_weight = [], 0.0

    def _own_state(self) -> dict[str, Any]:
        return {"kept": [tensor.clone() for tensor in self._kept], "kept_weight": self._kept_weight}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        devices = [p.device for p in self._anchor.parameters]
        self._kept = [t.to(d, copy=True) for t, d in zip(state["kept"], [*devices, devices[0]], strict=False)]
        self._kept_weight = state["kept_weight"]
