"""Ascending positions near the fewest bits that k of n can take: Elias-Fano rows of a size that is known beforehand."""

from functools import lru_cache

import torch
from torch import Tensor

from swarmkit.optim.compression.bits import pack_bits, packed_bytes, unpack_bits


@lru_cache(maxsize=256)
def position_bits(area: int, k: int) -> tuple[int, int]:
    """What k different positions below `area` are sent with: low bits of each, and marks for the rest of a row.

    With 0 marks whole positions are sent, because that is less.
    """
    whole = max(1, (area - 1).bit_length())
    choices = [(k * whole, whole, 0)]
    choices += [(k * low + k + (area - k >> low), low, k + (area - k >> low)) for low in range(whole)]
    _, low, marks = min(choices)
    return low, marks


def position_bytes(rows: int, area: int, k: int) -> int:
    """Bytes that `write_positions` makes of so many rows."""
    low, marks = position_bits(area, k)
    return (packed_bytes(rows * marks, 1) if marks else 0) + (packed_bytes(rows * k, low) if low else 0)


def write_positions(index: Tensor, area: int) -> Tensor:
    """Rows [rows, k] of different positions in [0, area), each row ascending, as uint8.

    Less their ranks, a row's positions are k numbers up to area - k that never fall, and neither do their high parts:
    number r of them marks place high + r of the row's marks, each its own, and their order tells the numbers apart
    (Elias 1974, Fano 1971). Beside the low bits that is at most 2 for each position, all in all within 1.1 of the
    logarithm of how many sets of positions there are.
    """
    low, length = position_bits(area, index.shape[1])
    if not length:
        return pack_bits(index, low)
    rank = torch.arange(index.shape[1], device=index.device)
    rest = index - rank
    marks = torch.zeros(len(index), length, dtype=torch.uint8, device=index.device)
    marks.scatter_(1, (rest >> low) + rank, 1)
    parts = [pack_bits(marks, 1)] + ([pack_bits(rest & (2**low - 1), low)] if low else [])
    return torch.cat(parts)


def read_positions(packed: Tensor, rows: int, area: int, k: int) -> Tensor:
    """The int64 positions that `write_positions` was given; raises ValueError for what cannot have come from it."""
    low, length = position_bits(area, k)
    if not length:
        index = unpack_bits(packed, low, rows * k, torch.int64).view(rows, k)
    else:
        split = packed_bytes(rows * length, 1)
        marks = unpack_bits(packed[:split], 1, rows * length, torch.bool).view(rows, length)
        if not bool((marks.sum(1) == k).all()):
            raise ValueError(f"positions must be {k} in each chunk")
        rank = torch.arange(k, device=packed.device)
        rest = marks.nonzero()[:, 1].view(rows, k) - rank << low
        if low:
            rest |= unpack_bits(packed[split:], low, rows * k, torch.int64).view(rows, k)
        index = rest + rank
    if bool((index[:, -1] >= area).any()) or bool((index[:, 1:] <= index[:, :-1]).any()):
        raise ValueError(f"positions must ascend and be below {area}")
    return index
