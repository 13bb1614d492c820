"""The arithmetic that every Collective shares: checks of what is offered, and the weighted mean in member order."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmkit.peers.wire import MAX_WEIGHT, is_weight

REDUCIBLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def check_weight(weight: float) -> None:
    """Raise ValueError for a weight that is negative, not finite or huge."""
    if not is_weight(weight):
        raise ValueError(f"weight={weight}: must be finite and not negative, {MAX_WEIGHT:.0e} at most")


def check_payload(payload: Sequence[Tensor], weight: float) -> None:
    """Raise ValueError for what an all-gather cannot carry, naming its position."""
    check_weight(weight)
    for position, tensor in enumerate(payload):
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_complex():
            raise ValueError(f"tensor {position}: must be a dense real tensor, got {type(tensor).__name__}")


def check_reducible(tensors: Sequence[Tensor], weight: float) -> None:
    """Raise ValueError for what an all-reduce cannot average, naming its position."""
    check_payload(tensors, weight)
    for position, tensor in enumerate(tensors):
        if tensor.dtype not in REDUCIBLE:
            raise ValueError(f"tensor {position} has dtype {tensor.dtype}: only floating-point tensors have a mean")
    for position, tensor in enumerate(tensors):
        if not is_finite(tensor):
            raise ValueError(f"tensor {position} holds values that are not finite")


def is_finite(tensor: Tensor) -> bool:
    """True when a tensor holds neither NaN nor infinity.

    A sum is 40 times as fast as torch.isfinite and not finite if any term is; finite terms may overflow, so look again.
    """
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    return math.isfinite(tensor.detach().sum(dtype=wide).item()) or bool(torch.isfinite(tensor).all())


def weighted_mean(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Average tensors of one shape and dtype: sum(w_i / W * x_i), added in order, in float32 (float64 for float64).

    The order and the arithmetic are fixed, so whoever has the same parts gets the same bits; one part, and parts that
    are equal under power-of-two shares, come back exactly. Raises ValueError when all weights are 0.
    """
    total = math.fsum(weights)
    if total <= 0:
        raise ValueError("every weight is 0: nobody contributed")
    dtype = parts[0].dtype
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    mean: Tensor | None = None
    for part, weight in zip(parts, weights, strict=True):
        if weight == 0:
            continue
        if mean is None:
            mean = torch.mul(part.to(wide), weight / total)
        else:
            mean.add_(part.to(wide), alpha=weight / total)
    assert mean is not None
    return mean.to(dtype)
