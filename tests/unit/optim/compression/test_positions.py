"""Positions: what comes back, how many bits they take, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkit.optim.compression.positions import position_bits, position_bytes, read_positions, write_positions


def draw(rows: int, area: int, k: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, area, generator=generator).argsort(1)[:, :k].sort(1).values


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 9), st.integers(1, 5000), st.integers(0, 10**6))
def test_positions_come_back(rows: int, area: int, seed: int) -> None:
    k = 1 + seed % area
    index = draw(rows, area, k, seed)
    packed = write_positions(index, area)
    assert packed.dtype == torch.uint8
    assert packed.numel() == position_bytes(rows, area, k)
    assert torch.equal(read_positions(packed, rows, area, k), index)


@pytest.mark.parametrize("area", [1, 2, 64, 65, 2304, 4096, 65536])
@pytest.mark.parametrize("side", ["first", "last"])
def test_positions_at_either_end_come_back(area: int, side: str) -> None:
    for k in {1, (area + 1) // 2, area}:
        index = torch.arange(k).expand(3, k) + (area - k if side == "last" else 0)
        assert torch.equal(read_positions(write_positions(index, area), 3, area, k), index)


@pytest.mark.parametrize(("k", "bits"), [(1, 12), (16, 10.0), (32, 9.0), (36, 8.9), (64, 8.0), (80, 7.6), (2048, 2.0)])
def test_positions_in_a_full_chunk_take_few_bits(k: int, bits: float) -> None:
    """The bound is the logarithm of the number of sets; plain positions take 12."""
    bound = math.log2(math.comb(4096, k)) / k
    found = 8 * position_bytes(1000, 4096, k) / (1000 * k)
    assert bound <= found <= min(bits, bound + 1.1)


def test_everything_and_nothing_but_one_take_what_they_must() -> None:
    assert position_bytes(8, 4096, 4096) == 8 * 4096 // 8  # a mark for each
    assert position_bits(4096, 1) == (12, 0)  # no marks


def test_marks_of_another_count_are_refused() -> None:
    packed = write_positions(draw(4, 4096, 32), 4096)
    packed[0] ^= 1
    with pytest.raises(ValueError, match="positions must be 32 in each chunk"):
        read_positions(packed, 4, 4096, 32)


def test_low_bits_that_break_the_order_are_refused() -> None:
    packed = write_positions(torch.tensor([[0, 1, 700, 701]]).expand(2, 4), 4096)
    assert position_bits(4096, 4)[1] > 0
    packed[-1] = 0x00
    packed[-3:] = torch.tensor([0xFF, 0x0F, 0x00], dtype=torch.uint8)
    with pytest.raises(ValueError, match="positions must ascend"):
        read_positions(packed, 2, 4096, 4)


def test_positions_beyond_the_chunk_are_refused() -> None:
    """Marks reach beyond an area that is no multiple of a mark's span."""
    area, k = 4000, 40
    packed = write_positions(torch.arange(area - k, area).expand(1, k), area)
    low, length = position_bits(area, k)
    packed[-(k * low // 8) :] = 0xFF
    with pytest.raises(ValueError, match="positions must ascend and be below 4000"):
        read_positions(packed, 1, area, k)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 300), st.integers(0, 10**6))
def test_random_bytes_are_refused_or_read_as_ascending_positions(area: int, seed: int) -> None:
    k = 1 + seed % area
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (position_bytes(2, area, k),), dtype=torch.uint8, generator=generator)
    try:
        index = read_positions(packed, 2, area, k)
    except ValueError:
        return
    assert index.shape == (2, k)
    assert bool((index[:, 1:] > index[:, :-1]).all())
    assert bool(((index >= 0) & (index < area)).all())
