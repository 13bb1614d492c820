"""The weighted mean in member order: fixed arithmetic, so that whoever has the same parts gets the same bits."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


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
