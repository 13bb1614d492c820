"""Means in member order, plain or trimmed: fixed arithmetic, so that whoever has the same parts gets the same bits."""

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


def trimmed_mean(parts: Sequence[Tensor], weights: Sequence[float], trim: float) -> Tensor:
    """Average without the lowest and the highest values of each coordinate (Yin et al., arXiv 1803.01498), weighted.

    Of n parts max(1, floor(trim * n)) are cut at either end, at most so many that one or two are left, which is the
    coordinate-wise median for an odd n. What is left is averaged by its weights; parts of weight 0 do not count. With
    trim=0 or fewer than three parts it is `weighted_mean`, to the bit.
    """
    counted = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight > 0]
    count = len(counted)
    cut = min(max(1, math.floor(trim * count)), (count - 1) // 2) if trim > 0 else 0
    if cut == 0:
        return weighted_mean(parts, weights)
    dtype = parts[0].dtype
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    values, order = torch.stack([part.to(wide) for part, _ in counted]).sort(dim=0, stable=True)
    kept = values[cut : count - cut]
    total = math.fsum(weights)
    shares = torch.tensor([weight / total for _, weight in counted], dtype=wide, device=kept.device)
    shares = shares[order[cut : count - cut]]
    # Around the lowest that is left: equal values come back exactly, whatever the shares.
    mean = kept[0] + (shares * (kept - kept[0])).sum(dim=0) / shares.sum(dim=0)
    return mean.to(dtype)
