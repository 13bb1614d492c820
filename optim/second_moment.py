"""SecondMoment: gradients divided by the root of their running mean square, as Adam does (arXiv 1412.6980)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim.snapshot import check_form

_LEAST = 1e-8  # what is added to the root; Adam's


class SecondMoment:
    """The running mean of a peer's squared gradients, float32, one tensor for each parameter."""

    def __init__(self, parameters: Sequence[Tensor], decay: float, device: torch.device) -> None:
        self.decay = decay
        self.tensors = [torch.zeros(p.shape, device=device) for p in parameters]
        self.counts = [0] * len(self.tensors)  # gradients in each: a mean of few is biased towards 0

    def divide(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Take the gradients up and give each over the root of its mean square; where there is none, nothing changes.

        Values must be below 1e18, or their squares overflow.
        """
        places = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not places:
            return list(gradients)
        held = [self.tensors[i] for i in places]
        found = [gradient.to(self.tensors[0].device, torch.float32) for gradient in gradients if gradient is not None]
        torch._foreach_mul_(held, self.decay)
        torch._foreach_addcmul_(held, found, found, 1 - self.decay)
        for i in places:
            self.counts[i] += 1
        # In place from here on: fresh memory would cost more than the arithmetic.
        quotients = torch._foreach_sqrt(held)
        torch._foreach_div_(quotients, [(1 - self.decay ** self.counts[i]) ** 0.5 for i in places])
        torch._foreach_add_(quotients, _LEAST)
        torch._foreach_reciprocal_(quotients)
        torch._foreach_mul_(quotients, found)
        scaled: list[Tensor | None] = [None] * len(gradients)
        for i, quotient in zip(places, quotients, strict=True):
            scaled[i] = quotient
        return scaled

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes."""
        return {"tensors": [tensor.clone() for tensor in self.tensors], "counts": list(self.counts)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError naming what does not fit."""
        tensors, counts = state["tensors"], state["counts"]
        check_form("second moment", _numbered(tensors), _numbered(self.tensors))
        if len(counts) != len(self.counts) or any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"second moment: {len(self.counts)} counts are wanted, not {str(counts)[:60]}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adopt a `state_dict` that `check_state` has passed."""
        torch._foreach_copy_(self.tensors, state["tensors"])
        self.counts = list(state["counts"])


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(i): tensor for i, tensor in enumerate(tensors)}
