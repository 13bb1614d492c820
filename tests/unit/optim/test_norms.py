"""Norms over many tensors: of any dtypes, with broken values and with finite ones whose norm overflows."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmkit.optim.norms import all_finite, total_norm


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=5), max_size=5))
def test_the_norm_of_tensors_is_that_of_their_values_in_one_vector(rows: list[list[float]]) -> None:
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    expected = math.hypot(*(value for row in rows for value in row))
    assert total_norm(tensors) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_dtypes_may_be_mixed() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    assert total_norm([torch.full((1,), 2.0, dtype=dtype) for dtype in dtypes]) == 4.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_broken_value_is_seen(value: float, dtype: torch.dtype) -> None:
    broken = torch.zeros(1000, dtype=dtype)
    broken[617] = value
    assert not all_finite([torch.ones(3), broken, torch.ones(2)])


@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 3e38), (torch.float64, 1e308), (torch.float16, 6e4)])
def test_finite_values_whose_norm_overflows_are_finite(dtype: torch.dtype, large: float) -> None:
    assert all_finite([torch.full((1000,), large, dtype=dtype)])


def test_nothing_is_finite() -> None:
    assert all_finite([])
    assert all_finite([torch.empty(0)])
    assert total_norm([torch.empty(0)]) == 0.0
