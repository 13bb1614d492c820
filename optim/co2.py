"""CO2: an outer step on a mean that is one round late, with a penalty for staleness and a clip (arXiv 2401.16265)."""

from collections.abc import Mapping
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from swarmkit.optim.fragments import Fragment
from swarmkit.optim.norms import total_norm
from swarmkit.optim.offer import Offer
from swarmkit.optim.options import Overlapping
from swarmkit.optim.overlapped import OverlappedOptimizer
from swarmkit.optim.snapshot import check_form

Penalty = Literal["gap"] | float | None


class CO2(OverlappedOptimizer):
    """Train alone for tau inner steps, send how far that went, and train on from what the last round has brought.

    With g the mean pseudo-gradient of the round that has just ended, one window late:

        m = outer_momentum * m + g / penalty;  m = clamp(m, -clip, clip);  anchor -= outer_lr * m

    The penalty "gap" is 1 + |x_t - x_(t-1)| / |x_1 - x_0|, where the first norm is how far the anchor has moved since
    the window behind g started, and the second how far it moved the first time: 1 where nothing moved, 2 at the pace of
    the beginning. The paper's normaliser could not be read; this one follows its description and the gap-aware family.
    A number is a constant penalty, as in the public code, and None is none. Every member offers the distance that it
    measured and all use the mean, so that no difference in rounding between machines reaches the anchor.

    Both the penalty and the share of values that were clipped are in each round's report. `overlap=False` waits for
    each round, which without penalty and clip is SlowMo. `keep_local`, not in the paper, starts the next window from
    the anchor plus all of this peer's newest progress rather than from the anchor alone: delayed averaging. It is on
    where rounds overlap unless False says otherwise, because it loses far less (docs/log.md).
    """

    round_name = "co2"
    _not_here = {"fragments": "CO2 sends the whole model"}

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        penalty: Penalty = None,
        clip: float | None = 1.0,
        overlap: bool = True,
        keep_local: bool | None = None,
        **options: Unpack[Overlapping],
    ) -> None:
        """Wrap `inner`; what is not said above, see SyncedOptimizer."""
        if not (penalty is None or penalty == "gap" or (isinstance(penalty, int | float) and penalty >= 1)):
            raise ValueError(f"penalty={penalty!r}: must be 'gap', a number of at least 1, or None")
        if clip is not None and not clip >= 0:
            raise ValueError(f"clip={clip}: must not be negative, or None")
        keep_local = overlap if keep_local is None else keep_local
        if keep_local and not overlap:
            raise ValueError("keep_local: without overlap no local progress is put off")
        self.penalty: Penalty = penalty
        self.clip = clip
        self._moved = 0.0  # L2 distance that the anchor has gone since the running window started
        self._last = (1.0, 0.0)  # penalty and clipped share of the last outer step
        super().__init__(
            inner,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            nesterov=False,
            delay=None if overlap else 0,
            lead="everything" if keep_local else "nothing",
            **options,
        )

    def _form(self) -> str:
        return f"{super()._form()}|{self.penalty}|{self.clip}"

    def _adopt_parameters(self) -> None:
        super()._adopt_parameters()
        self.momentum = [torch.zeros_like(held) for held in self._anchor.tensors]
        self._reference = torch.zeros((), dtype=torch.float64)  # the first distance that was not 0

    def _exact_contribution(self, observe: bool) -> list[Tensor]:
        if self.penalty != "gap" or self._delay == 0:
            return []
        moved, self._moved = self._moved, 0.0
        device = self._anchor.tensors[0].device
        return [torch.tensor([0.0 if observe else moved], dtype=torch.float64, device=device)]

    def _outer_step(self, fragment: Fragment, mean: list[Tensor], exact: list[Tensor]) -> float:
        found = self._anchor.like(mean)
        norm = total_norm(found)
        penalty = self._next_penalty(exact)
        torch._foreach_mul_(self.momentum, self.outer_momentum)
        torch._foreach_add_(self.momentum, found, alpha=1 / penalty)
        clipped = self._clip_momentum()
        torch._foreach_add_(self._anchor.tensors, self.momentum, alpha=-self.outer_lr)
        self._moved = self.outer_lr * total_norm(self.momentum)
        self._last = (penalty, clipped)
        return norm

    def _on_failure(self, offer: Offer) -> None:
        if self.penalty == "gap" and self._delay != 0 and offer.weight > 0:
            self._moved += float(offer.exact[0])  # what is offered again has begun where the lost offer began

    def _next_penalty(self, exact: list[Tensor]) -> float:
        if self.penalty != "gap":
            return 1.0 if self.penalty is None else float(self.penalty)
        gap = float(exact[0]) if exact else 0.0
        if gap > 0 and not self._reference > 0:
            self._reference.fill_(gap)
        return 1 + gap / float(self._reference) if gap > 0 else 1.0

    def _clip_momentum(self) -> float:
        """Clamp every value to [-clip, clip] in place; the share of values that were beyond."""
        if self.clip is None:
            return 0.0
        beyond = [(size > self.clip).sum() for size in torch._foreach_abs(self.momentum)]
        torch._foreach_clamp_max_(self.momentum, self.clip)
        torch._foreach_clamp_min_(self.momentum, -self.clip)
        return float(torch.stack(beyond).sum()) / max(1, sum(tensor.numel() for tensor in self.momentum))

    def _report_fields(self) -> dict[str, Any]:
        penalty, clipped = self._last
        return {"staleness_penalty": penalty, "clipped": clipped}

    # -- state -------------------------------------------------------------------------------------------------------

    def _outer_tensors(self) -> dict[str, Tensor]:
        momenta = zip(self._anchor.names, self.momentum, strict=True)
        return {f"{name}/momentum": tensor for name, tensor in momenta} | {"reference": self._reference}

    def _check_outer(self, tensors: Mapping[str, Tensor]) -> None:
        check_form("outer", tensors, self._outer_tensors())

    def _load_outer(self, tensors: Mapping[str, Tensor]) -> None:
        torch._foreach_copy_(self.momentum, [tensors[f"{name}/momentum"] for name in self._anchor.names])
        self._reference.copy_(tensors["reference"])

    def _start_over(self, meta: Mapping[str, Any]) -> None:
        super()._start_over(meta)
        self._moved = 0.0

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "moved": self._moved}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        super()._load_own_state(state)
        self._moved = state["moved"]
