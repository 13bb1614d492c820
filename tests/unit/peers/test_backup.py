"""Dynamic backup workers: whom a round waits for, in simulated time and by the rule's own arithmetic."""

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkit.peers.backup import ENOUGH, Arrivals

FOUR = ["a", "b", "c", "d"]


def simulate(
    speeds: dict[str, float], rounds: int = 30, *, jitter: float = 0.0, seed: int = 0
) -> tuple[int, float, float]:
    """Members that start together take so many seconds for a window; returns what the rule says in the end, and rates.

    Of the two rates, windows a second of all together, the first follows the rule and the second waits for all.
    """
    draw = random.Random(seed)
    arrivals, clock, done = Arrivals(), 0.0, 0
    free = dict.fromkeys(speeds, 0.0)  # when a member can start its next window
    everybody = 0.0
    for index in range(rounds):
        took = {m: s * (1 + jitter * draw.random()) for m, s in speeds.items()}
        everybody += max(took.values())
        comes = {member: max(clock, free[member]) + took[member] for member in speeds}
        order = sorted(comes, key=lambda member: comes[member])
        first = comes[order[0]]
        count, limit = arrivals.patience(FOUR[: len(speeds)])
        begins = max(comes.values())
        for place, member in enumerate(order, 1):
            if place >= count and first + limit < begins:
                begins = max(comes[member], first + limit)
                break
        for member in order:
            arrivals.note(index, member, comes[member])
        done += sum(comes[member] <= begins for member in speeds)
        for member in speeds:
            free[member] = max(begins, comes[member])
        clock = begins
    return arrivals.patience(FOUR[: len(speeds)])[0], done / clock, rounds * len(speeds) / everybody


def test_a_member_far_behind_is_not_waited_for() -> None:
    count, rate, waiting = simulate({"a": 1.0, "b": 1.1, "c": 1.2, "d": 6.0})
    assert count == 3
    assert rate > 2 * waiting


@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0, 1.0], [1.0, 1.05, 1.1, 1.3]])
def test_members_that_are_alike_are_all_waited_for(speeds: list[float]) -> None:
    count, rate, waiting = simulate(dict(zip(FOUR, speeds, strict=True)), jitter=0.1)
    assert count == 4
    assert rate == pytest.approx(waiting, rel=0.02)


def test_two_are_never_parted_and_nothing_is_concluded_from_little() -> None:
    assert simulate({"a": 1.0, "b": 50.0})[0] == 2
    arrivals = Arrivals()
    for index in range(ENOUGH - 1):
        for member, late in zip(FOUR, (0.0, 0.1, 0.1, 9.0), strict=True):
            arrivals.note(index, member, 10 * index + late)
    assert arrivals.patience(FOUR) == (4, inf)


def test_a_member_that_has_become_quick_is_waited_for_again() -> None:
    arrivals = Arrivals()
    for index in range(40):
        late = 9.0 if index < 12 else 0.1
        for member, offset in zip(FOUR, (0.0, 0.1, 0.1, late), strict=True):
            arrivals.note(index, member, 10.0 * index + offset)
        if index == 11:
            assert arrivals.patience(FOUR)[0] == 3
    assert arrivals.patience(FOUR) == (4, inf)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=3, max_size=4), st.integers(0, 99))
def test_the_rule_never_does_much_worse_than_waiting_for_all(speeds: list[float], seed: int) -> None:
    count, rate, waiting = simulate(dict(zip(FOUR, speeds, strict=False)), rounds=40, jitter=0.2, seed=seed)
    assert len(speeds) // 2 < count <= len(speeds)
    assert rate > 0.8 * waiting
