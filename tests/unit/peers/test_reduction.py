"""The weighted mean that all collectives share."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmkit.optim.mean import weighted_mean
from swarmkit.optim.norms import is_finite
from swarmkit.peers.reduction import check_reducible


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0.01, 100)), min_size=1, max_size=6))
def test_the_mean_is_sum_w_x_over_sum_w(parts: list[tuple[float, float]]) -> None:
    tensors = [torch.full((3,), value, dtype=torch.float64) for value, _ in parts]
    weights = [weight for _, weight in parts]
    expected = sum(value * weight for value, weight in parts) / sum(weights)
    assert torch.allclose(weighted_mean(tensors, weights), torch.full((3,), expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_part_comes_back_exactly(dtype: torch.dtype) -> None:
    part = torch.randn(1000).to(dtype)
    assert torch.equal(weighted_mean([part], [3.7]), part)


def test_equal_parts_of_two_come_back_exactly() -> None:
    part = torch.randn(1000)
    assert torch.equal(weighted_mean([part, part.clone()], [5.0, 5.0]), part)


def test_half_precision_is_accumulated_in_float32() -> None:
    parts = [torch.full((1,), 1.0, dtype=torch.bfloat16)] + [torch.full((1,), 2**-7, dtype=torch.bfloat16)] * 127
    # In bfloat16 the small terms would vanish one by one beside 1.0.
    assert weighted_mean(parts, [1.0] * 128).item() == pytest.approx((1 + 127 * 2**-7) / 128, rel=2**-8)


def test_a_part_of_weight_zero_changes_nothing_even_when_it_is_nan() -> None:
    mean = weighted_mean([torch.full((2,), float("nan")), torch.ones(2)], [0.0, 1.0])
    assert torch.equal(mean, torch.ones(2))


def test_all_weights_zero_is_an_error_not_a_nan() -> None:
    with pytest.raises(ValueError, match="every weight is 0"):
        weighted_mean([torch.ones(1)], [0.0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_is_found_and_its_position_named(bad: float) -> None:
    tensor = torch.randn(10_000)
    tensor[1234] = bad
    with pytest.raises(ValueError, match="tensor 1"):
        check_reducible([torch.ones(3), tensor], 1.0)


def test_large_finite_values_are_not_taken_for_infinity() -> None:
    assert is_finite(torch.full((1000,), 3e38))
    assert is_finite(torch.full((1000,), 6e4, dtype=torch.float16))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_bad_weight_is_named(weight: float) -> None:
    with pytest.raises(ValueError, match="weight="):
        check_reducible([torch.ones(1)], weight)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integers_have_no_mean(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="tensor 0"):
        check_reducible([torch.ones(2, dtype=dtype)], 1.0)
