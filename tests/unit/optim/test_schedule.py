"""Schedules: QSR replays its authors' run, and every window is at least one step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmkit.optim import Every, QuadraticSync, Schedule


def cosine(step: int, *, peak: float, total: int, warmup: int, floor: float = 1e-6) -> float:
    """Learning rate of the step that follows `step` completed ones, as in the authors' recipe."""
    if step < warmup:
        return peak * step / warmup
    return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def windows(schedule: Schedule, lr_at: list[float]) -> list[tuple[int, int]]:
    """Start and length of every window of a run."""
    found, step = [], 0
    while step < len(lr_at):
        found.append((step, schedule.next_window(step, lr_at[step])))
        step += found[-1][1]
    assert step == len(lr_at)
    return found


def running(found: list[tuple[int, int]], step: float) -> int:
    """H of the window that is under way after `step` steps."""
    return next(h for start, h in reversed(found) if start <= step)


VIT = [cosine(step, peak=0.008, total=93600, warmup=10000) for step in range(93600)]
RESNET = [cosine(step, peak=0.8, total=62400, warmup=1560) for step in range(62400)]


@pytest.mark.parametrize(("h_base", "rounds"), [(4, 9711), (8, 6461)])
def test_qsr_has_the_published_number_of_rounds_on_vit(h_base: int, rounds: int) -> None:
    schedule = QuadraticSync(alpha=0.0175, h_base=h_base, total_steps=93600, warmup_steps=10000)
    assert len(windows(schedule, VIT)) == rounds


def test_qsr_has_the_published_windows_on_vit() -> None:
    found = windows(QuadraticSync(alpha=0.0175, h_base=4, total_steps=93600, warmup_steps=10000), VIT)
    shares = (0.20, 0.40, 0.50, 0.60, 0.70, 0.80, 0.90, 0.95)
    assert [running(found, share * 93600) for share in shares] == [5, 8, 13, 27, 74, 327, 2769, 8142]
    assert [h for _, h in found[-3:]] == [1612, 2769, 8142]


@pytest.mark.parametrize(("alpha", "h_base", "rounds"), [(0.2, 2, 24792), (0.25, 4, 12539)])
def test_qsr_has_the_published_number_of_rounds_on_resnet(alpha: float, h_base: int, rounds: int) -> None:
    schedule = QuadraticSync(alpha=alpha, h_base=h_base, total_steps=62400, warmup_steps=1560)
    assert len(windows(schedule, RESNET)) == rounds


def test_qsr_takes_what_is_left_at_learning_rate_zero() -> None:
    schedule = QuadraticSync(alpha=0.1, h_base=4, total_steps=1000)
    assert schedule.next_window(900, 0.0) == 100
    assert schedule.next_window(1000, 0.0) == 1


@pytest.mark.parametrize(("alpha", "lr"), [(1e300, 1e-300), (1e308, 1.0), (1.0, 5e-324)])
def test_a_huge_alpha_neither_overflows_nor_runs_past_the_end(alpha: float, lr: float) -> None:
    assert QuadraticSync(alpha=alpha, h_base=4, total_steps=1000, power=8.0).next_window(3, lr) == 997


def test_the_last_round_is_cut_to_the_steps_left() -> None:
    assert [h for _, h in windows(Every(4, total_steps=10), [0.1] * 10)] == [4, 4, 2]
    assert [h for _, h in windows(QuadraticSync(alpha=0.2, h_base=1, total_steps=10), [0.1] * 10)] == [4, 4, 2]


def test_every_without_an_end_is_constant() -> None:
    assert {Every(7).next_window(step, 0.0) for step in range(100)} == {7}


def test_a_window_that_straddles_the_warm_up_runs_its_course() -> None:
    # Windows of 4 start at 0, 4 and 8; the warm-up ends at 10, so the next choice is made at 12.
    schedule = QuadraticSync(alpha=0.5, h_base=4, total_steps=40, warmup_steps=10)
    assert windows(schedule, [0.1] * 40) == [(0, 4), (4, 4), (8, 4), (12, 25), (37, 3)]


def test_small_learning_rates_of_a_warm_up_do_not_lengthen_windows() -> None:
    schedule = QuadraticSync(alpha=1.0, h_base=2, total_steps=1000, warmup_steps=100)
    assert schedule.next_window(0, 0.0) == 2
    assert schedule.next_window(99, 1e-9) == 2


def test_alpha_zero_keeps_h_at_its_base() -> None:
    assert QuadraticSync(alpha=0.0, h_base=3, total_steps=100).next_window(50, 0.0) == 3


def test_h_follows_a_step_schedule_quadratically() -> None:
    lr_at = [1.0] * 100 + [0.1] * 200 + [0.01] * 4000
    found = windows(QuadraticSync(alpha=0.2, h_base=2, total_steps=len(lr_at)), lr_at)
    assert [h for start, h in found if start < 100] == [2] * 50
    assert [h for start, h in found if 100 <= start < 300] == [4] * 50
    assert [h for start, h in found if start >= 300] == [400] * 10


def test_h_never_falls_on_a_cosine_schedule_but_for_the_cut() -> None:
    lengths = [
        h for _, h in windows(QuadraticSync(alpha=0.25, h_base=4, total_steps=62400), RESNET[1560:] + [1e-6] * 1560)
    ]
    assert lengths[:-1] == sorted(lengths[:-1])


@given(
    alpha=st.floats(0, 1e308),
    lr=st.floats(0, 1e308),
    h_base=st.integers(1, 1000),
    total=st.integers(1, 10**7),
    step=st.integers(0, 10**7),
    power=st.floats(0.1, 20),
)
def test_every_window_has_a_step_and_ends_with_training(
    alpha: float, lr: float, h_base: int, total: int, step: int, power: float
) -> None:
    window = QuadraticSync(alpha=alpha, h_base=h_base, total_steps=total, power=power).next_window(step, lr)
    assert min(h_base, max(1, total - step)) <= window <= max(1, total - step)


@given(lr=st.floats(1e-4, 1.0), alpha=st.floats(1e-3, 1.0))
def test_halving_the_learning_rate_lengthens_the_window_about_fourfold(lr: float, alpha: float) -> None:
    schedule = QuadraticSync(alpha=alpha, h_base=1, total_steps=10**12)
    longer = schedule.next_window(0, lr / 2)
    assert abs(longer - 4 * (alpha / lr) ** 2) <= 1 + 1e-9 * longer or longer == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"h_base": 0}, "h_base=0"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"alpha": math.nan}, "alpha=nan"),
        ({"alpha": math.inf}, "alpha=inf"),
        ({"total_steps": 0}, "total_steps=0"),
        ({"power": 0.0}, "power=0.0"),
        ({"power": math.inf}, "power=inf"),
    ],
)
def test_qsr_refuses_settings_that_cannot_work(options: dict[str, float], message: str) -> None:
    settings = {"alpha": 0.1, "h_base": 2, "total_steps": 10} | options
    with pytest.raises(ValueError, match=message):
        QuadraticSync(**settings)  # type: ignore[arg-type]


def test_every_refuses_a_window_without_steps() -> None:
    with pytest.raises(ValueError, match="h=0"):
        Every(0)
