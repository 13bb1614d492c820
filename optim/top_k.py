"""Exact positions of the k largest of every row: of rows that lie in a cache, or by levels on an accelerator."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_STRIDE = 16  # elements of which only the maximum is looked at first


def top_k(magnitude: Tensor, k: int) -> Tensor:
    """Positions, int64 [rows, k], ascending in each row, of the k largest of [rows, columns], which are not negative.

    Of equal elements any may be taken.
    """
    rows, columns = magnitude.shape
    if k == columns:
        return torch.arange(k, device=magnitude.device).expand(rows, k)
    if magnitude.device.type == "cpu":
        found = _by_threshold(magnitude, k)
        if found is not None:
            return torch.from_numpy(found)
    return by_levels(magnitude, k).sort(1).values


def by_levels(magnitude: Tensor, k: int) -> Tensor:
    """The same, in no order.

    The k groups of 16 elements with the largest maxima hold the k largest elements, as each of these makes its group's
    maximum at least as large.
    """
    rows, columns = magnitude.shape
    if columns % _STRIDE or 2 * k * _STRIDE > columns:
        return magnitude.topk(k, dim=1, sorted=False).indices
    strided = magnitude.view(rows, _STRIDE, columns // _STRIDE)
    best = strided.amax(1).topk(k, dim=1, sorted=False).indices
    candidates = strided.gather(2, best.unsqueeze(1).expand(-1, _STRIDE, -1)).view(rows, _STRIDE * k)
    found = candidates.topk(k, dim=1, sorted=False).indices
    level = torch.div(found, k, rounding_mode="floor")
    return level * (columns // _STRIDE) + best.gather(1, found - level * k)


def _by_threshold(magnitude: Tensor, k: int) -> npt.NDArray[np.int64] | None:
    """None when equal elements leave a choice.

    numpy selects values many times faster than torch, or either, selects positions: so find the k-th largest value,
    then what is not below it. The k-th largest of the groups' maxima is a lower bound of it that few elements reach.
    """
    rows, columns = magnitude.shape
    grouped = columns % _STRIDE == 0 and k * _STRIDE < columns
    searched = magnitude.view(rows, _STRIDE, -1).amax(1) if grouped else magnitude
    elements = magnitude.numpy()
    flat = np.flatnonzero(elements >= _kth(searched.numpy(), k))
    if len(flat) > rows * k and grouped:
        row, values = flat // columns, elements.reshape(-1)[flat]
        counts = np.bincount(row, minlength=rows)
        reached = np.full((rows, counts.max()), -1, dtype=elements.dtype)
        reached[row, np.arange(len(flat)) - (np.cumsum(counts) - counts)[row]] = values
        flat = flat[values >= _kth(reached, k)[row, 0]]
    if len(flat) != rows * k:
        return None
    found: npt.NDArray[np.int64] = flat.reshape(rows, k) - columns * np.arange(rows)[:, None]
    return found


def _kth(values: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.float32]:
    """The k-th largest value of each row, [rows, 1]."""
    place = values.shape[1] - k
    found: npt.NDArray[np.float32] = np.partition(values, place, axis=1)[:, place : place + 1]
    return found
