"""The computed permutation: it permutes, its key decides, and it looks random."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmkit.data.permutation import Permutation

GOLDEN = [6, 1, 9, 3, 0, 10, 8, 7, 5, 11, 4, 2]
GOLDEN_LARGE = [633312485428, 305575372214, 681281165042]


def whole(size: int, *key: int) -> list[int]:
    return Permutation(size, *key)(np.arange(size)).tolist()


@given(st.integers(1, 5000), st.lists(st.integers(-(2**70), 2**70), max_size=3))
def test_every_number_comes_exactly_once(size: int, key: list[int]) -> None:
    assert sorted(whole(size, *key)) == list(range(size))


@given(st.integers(2**33, 2**50), st.integers(0, 99))
def test_it_serves_sizes_that_no_memory_holds(size: int, key: int) -> None:
    positions = np.array([0, 1, size // 2, size - 1])
    found = Permutation(size, key)(positions)
    assert len(set(found.tolist())) == 4
    assert ((found >= 0) & (found < size)).all()


def test_a_position_does_not_depend_on_what_it_is_asked_with() -> None:
    order = Permutation(1000, 7)
    assert [int(order(np.array([k]))[0]) for k in range(1000)] == whole(1000, 7)


def test_the_order_of_a_key_never_changes() -> None:
    """Peers of different versions must agree, and checkpoints must fit: a failure here needs a new format."""
    assert whole(12, 0, 0) == GOLDEN
    assert Permutation(10**12, 3, 1)(np.array([0, 1, 2])).tolist() == GOLDEN_LARGE


def test_orders_of_other_keys_have_nothing_in_common() -> None:
    """Two random orders agree in one place on average."""
    orders = [np.array(whole(1000, seed, epoch)) for seed in range(4) for epoch in range(4)]
    agreements = [int((a == b).sum()) for n, a in enumerate(orders) for b in orders[:n]]
    assert max(agreements) <= 8
    assert 0.6 < np.mean(agreements) < 1.4


def test_neighbours_are_not_related() -> None:
    order = np.array(whole(50_000, 1))
    for other in (np.roll(order, 1), np.arange(50_000)):
        assert abs(np.corrcoef(order, other)[0, 1]) < 5 / math.sqrt(50_000)


def test_every_number_is_equally_likely_in_first_place() -> None:
    counts = Counter(int(Permutation(10, seed)(np.array([0]))[0]) for seed in range(5000))
    chi_squared = sum((counts[number] - 500) ** 2 / 500 for number in range(10))
    assert chi_squared < 27.9, "9 degrees of freedom, p = 0.001"


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_outside_is_refused(position: int) -> None:
    with pytest.raises(ValueError, match="the size is 10"):
        Permutation(10)(np.array([position]))


def test_nothing_cannot_be_permuted() -> None:
    with pytest.raises(ValueError, match="size=0"):
        Permutation(0)
