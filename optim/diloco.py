"""DiLoCo: outer steps on mean pseudo-gradients (arXiv 2311.08105), eager (2502.12996), in fragments (2501.18512)."""

from collections.abc import Mapping
from typing import Literal, Unpack

import torch
from torch import Tensor

from swarmkit.optim.fragments import Fragment
from swarmkit.optim.norms import total_norm
from swarmkit.optim.options import Fragments
from swarmkit.optim.overlapped import OverlappedOptimizer
from swarmkit.optim.snapshot import check_form

Eager = bool | Literal["delayed"]


class DiLoCo(OverlappedOptimizer):
    """Train alone for H inner steps, then move the anchor along the averaged pseudo-gradient (Alg. 1).

    The pseudo-gradient is how far the parameters have come since the window started; the outer optimizer is torch's SGD
    with Nesterov momentum, so v = mu v + g and anchor -= lr (g + mu v): the first outer step moves 1 + mu times
    outer_lr times the mean, and a constant pseudo-gradient in the end 1 / (1 - mu) times. The anchor and the momentum
    are float32 whatever the parameters are; a pseudo-gradient counts from the rounded anchor that training started
    from, so that rounding is never taken for progress. With `outer_lr=1, outer_momentum=0` the outer step is the mean
    of the parameters: then these are sent instead, unless a codec compresses or rounds overlap, and one peer equals its
    inner optimizer bit for bit.

    `eager=True` sends in the background while the next window runs and goes on at once from the shared state, which is
    one round late, and this peer's own newest part of it; `eager="delayed"` from the shared state alone. Unless given,
    the outer momentum is 0.9, and 0 with either: late steps with momentum never settle among four peers or more.

    `fragments=k` cuts the model into k parts that meet one after the other, a k-th of a window apart: the same bytes,
    and of the peak a k-th, or as much of it as the largest layer is of the model (`fragment_shares`): layers, as an
    embedding, are never cut. `fragment_by` says how (see `partition`). A fragment's result is adopted `overlap_steps`
    inner steps after its round began, as `mixing` times the local parameters plus 1 - mixing times the anchor; with
    `eager` when the fragment's next round begins.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float | None = None,
        nesterov: bool = True,
        eager: Eager = False,
        overlap_steps: int = 0,
        mixing: float = 0.0,
        **options: Unpack[Fragments],
    ) -> None:
        """Wrap `inner`; what is not said above, see SyncedOptimizer."""
        if eager not in (False, True, "delayed"):
            raise ValueError(f"eager={eager!r}: must be True, False or 'delayed'")
        if eager and (overlap_steps or mixing):
            raise ValueError(f"overlap_steps={overlap_steps}, mixing={mixing}: with eager a round has a whole window")
        if outer_momentum is None:
            outer_momentum = 0.0 if eager else 0.9
        super().__init__(
            inner,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            nesterov=nesterov,
            delay=None if eager else overlap_steps,
            mixing=mixing,
            lead="share" if eager is True else "nothing",
            **options,
        )

    @property
    def _is_mean(self) -> bool:
        return self.outer_lr == 1 and self.outer_momentum == 0 and self.is_plain and self._delay == 0

    @property
    def round_name(self) -> str:  # type: ignore[override]
        """Peers whose outer steps need different payloads must not meet."""
        return "parameters" if self._is_mean else "pseudo-gradients"

    def _adopt_parameters(self) -> None:
        super()._adopt_parameters()
        self.outer = torch.optim.SGD(
            self._anchor.tensors,
            lr=self.outer_lr,
            momentum=self.outer_momentum,
            nesterov=self.nesterov,
            foreach=True,
        )

    def _offered(self, fragment: Fragment) -> list[Tensor]:
        return [p.detach() for p in fragment.part.parameters] if self._is_mean else fragment.progress()

    def _outer_step(self, fragment: Fragment, mean: list[Tensor], exact: list[Tensor]) -> float:
        part = fragment.part
        found = part.like(mean)
        if self._is_mean:
            norm = total_norm(torch._foreach_sub(part.tensors, found))
            part.assign(found)
            return norm
        norm = total_norm(found)  # before the step, which adds the momentum to the gradients in place
        # The optimizer leaves the tensors of other fragments alone: they have no gradient.
        for held, gradient in zip(part.tensors, found, strict=True):
            held.grad = gradient
        self.outer.step()
        self.outer.zero_grad()
        return norm

    def _outer_tensors(self) -> dict[str, Tensor]:
        found = {}
        for name, held in self._anchor.named().items():
            buffer = self.outer.state.get(held, {}).get("momentum_buffer")
            if buffer is not None:
                found[f"{name}/momentum_buffer"] = buffer
        return found

    def _check_outer(self, tensors: Mapping[str, Tensor]) -> None:
        wanted: dict[str, Tensor] = {}
        for fragment in self._fragments:
            named = {f"{name}/momentum_buffer": held for name, held in fragment.part.named().items()}
            # Before a fragment's first outer step there is no momentum yet, and without momentum there never is.
            if self.outer_momentum and (tensors.keys() & named.keys() or (tensors and self._count == 1)):
                wanted |= named
        check_form("outer", tensors, wanted)

    def _load_outer(self, tensors: Mapping[str, Tensor]) -> None:
        self.outer.state.clear()
        for name, held in self._anchor.named().items():
            buffer = tensors.get(f"{name}/momentum_buffer")
            if buffer is not None:
                self.outer.state[held] = {"momentum_buffer": buffer.to(held.device, copy=True)}
