"""AllReduce: average the gradients in every step, the baseline that all else is measured against."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim.norms import total_norm
from swarmkit.optim.synced import Closure, SyncedOptimizer


class AllReduce(SyncedOptimizer):
    """Average the gradients over the replicas before every inner step, as data parallelism does.

    Each contribution is weighted by the samples it was computed from (`samples`). Gradients of a failed round are kept
    and averaged into the next one by weight. A parameter without a gradient on one peer counts as zero there; one
    without a gradient anywhere is left alone, as its optimizer would.
    """

    round_name = "gradients"

    def __init__(self, inner: torch.optim.Optimizer, **options: Any) -> None:  # noqa: ANN401 - see SyncedOptimizer
        if options.get("sync") is not None:
            raise ValueError("sync: AllReduce synchronises in every step; LocalSGD and DiLoCo have windows")
        super().__init__(inner, **options)
        self._kept: list[Tensor] = []
        self._kept_weight = 0.0

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
        present = [float(p.grad is not None and not observe) for p in parameters]
        shares = torch.tensor(present, device=parameters[0].device)
        if observe:
            return [*(torch.zeros_like(p) for p in parameters), shares]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        if self._kept:
            total = self._weight()
            gradients = list(torch._foreach_mul(gradients, 1 - self._kept_weight / total))
            torch._foreach_add_(gradients, self._kept[:-1], alpha=self._kept_weight / total)
            shares = torch.maximum(shares, self._kept[-1])
        return [*gradients, shares]

    def _weight(self) -> float:
        return self._kept_weight + (self.samples if self.samples > 0 else 1.0)

    def _on_failure(self, contribution: list[Tensor], weight: float) -> None:
        if weight > 0:
            self._kept = [tensor.clone() for tensor in contribution[: len(self._anchor.parameters) + 1]]
            self._kept_weight = weight
        self.samples, self._unsent_steps = 0.0, 0

    def _apply(self, mean: list[Tensor]) -> float:
        *gradients, shares = mean
        self._kept, self._kept_weight = [], 0.0
        norm = total_norm(gradients)
        for parameter, gradient, share in zip(self._anchor.parameters, gradients, shares.tolist(), strict=True):
            parameter.grad = gradient if share > 0 else None
        self.inner.step()
        self._anchor.assign(self._anchor.parameters)
        return norm

    def load_snapshot(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """See SyncedOptimizer; kept gradients belong to the parameters that the snapshot replaces, and go."""
        super().load_snapshot(tensors, meta)
        self._kept, self._kept_weight = [], 0.0

    def state_dict(self) -> dict[str, Any]:
        """See SyncedOptimizer; gradients kept from a failed round are part of it."""
        found = super().state_dict()
        found["synced"] |= {"kept": [tensor.clone() for tensor in self._kept], "kept_weight": self._kept_weight}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See SyncedOptimizer."""
        super().load_state_dict(state_dict)
        devices = [p.device for p in self._anchor.parameters]
        kept = state_dict["synced"]["kept"]
        self._kept = [t.to(device, copy=True) for t, device in zip(kept, [*devices, devices[0]], strict=False)]
        self._kept_weight = state_dict["synced"]["kept_weight"]
