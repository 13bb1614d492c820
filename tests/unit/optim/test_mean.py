"""The trimmed mean: its identities, and what it does to whoever lies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkit.optim.mean import trimmed_mean, weighted_mean


def parts_of(count: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(17, generator=generator).to(dtype) for _ in range(count)]


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 9), seed=st.integers(0, 99), data=st.data())
def test_without_a_cut_it_is_the_weighted_mean_to_the_bit(count: int, seed: int, data: st.DataObject) -> None:
    parts = parts_of(count, seed)
    weights = data.draw(st.lists(st.floats(0.1, 10.0), min_size=count, max_size=count))
    assert torch.equal(trimmed_mean(parts, weights, 0.0), weighted_mean(parts, weights))
    if count < 3:
        assert torch.equal(trimmed_mean(parts, weights, 0.4), weighted_mean(parts, weights))


@settings(max_examples=40, deadline=None)
@given(half=st.integers(1, 4), seed=st.integers(0, 99))
def test_with_all_but_one_cut_off_it_is_the_median_to_the_bit(half: int, seed: int) -> None:
    parts = parts_of(2 * half + 1, seed)
    assert torch.equal(trimmed_mean(parts, [1.0] * len(parts), 0.499), torch.stack(parts).median(dim=0).values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_equal_parts_come_back_exactly_and_order_does_not_matter(dtype: torch.dtype) -> None:
    part = parts_of(1, 0, dtype)[0]
    found = trimmed_mean([part] * 5, [0.3, 1.0, 2.0, 0.1, 0.7], 0.2)
    assert torch.equal(found, part)
    assert found.dtype is dtype
    parts = parts_of(6, 1, dtype)
    weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert torch.equal(trimmed_mean(parts, weights, 0.2), trimmed_mean(parts[::-1], weights[::-1], 0.2))


def test_what_is_left_is_averaged_by_its_weights() -> None:
    parts = [torch.tensor([value]) for value in (-100.0, 1.0, 3.0, 100.0)]
    assert trimmed_mean(parts, [9.0, 1.0, 3.0, 9.0], 0.25).item() == pytest.approx((1.0 * 1 + 3.0 * 3) / 4)


@pytest.mark.parametrize("lie", [1e30, -1e30, float("inf"), float("nan")])
def test_one_of_five_cannot_move_it_beyond_what_the_honest_sent(lie: float) -> None:
    honest = parts_of(4, 2)
    found = trimmed_mean([*honest, torch.full((17,), lie)], [1.0] * 4 + [1e9], 0.2)
    stacked = torch.stack(honest)
    assert bool((found >= stacked.min(dim=0).values).all())
    assert bool((found <= stacked.max(dim=0).values).all())
