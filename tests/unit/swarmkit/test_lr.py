"""Learning-rate schedules against their formulas."""

import math

import pytest

from swarmkit.inner import LRShape, OptimizerConfig
from swarmkit.lr import learning_rate


def rates(shape: LRShape, **settings: object) -> list[float]:
    config = OptimizerConfig(lr=0.4, schedule=shape, **settings)  # type: ignore[arg-type]
    return [learning_rate(step, config=config, total_steps=100) for step in range(101)]


def test_the_warm_up_rises_to_the_peak_and_never_starts_at_zero() -> None:
    found = rates(LRShape.constant, warmup_steps=9)
    assert found[:10] == pytest.approx([0.04 * (step + 1) for step in range(10)])
    assert found[10:] == [0.4] * 91


def test_cosine_falls_from_the_peak_to_its_share() -> None:
    found = rates(LRShape.cosine, warmup_steps=20, final_lr=0.25)
    assert found[20] == pytest.approx(0.4)
    assert found[60] == pytest.approx((0.4 + 0.1) / 2)
    assert found[100] == pytest.approx(0.1)
    assert found[40] == pytest.approx(0.1 + 0.3 * (1 + math.cos(math.pi / 4)) / 2)


def test_linear_falls_evenly() -> None:
    found = rates(LRShape.linear, final_lr=0.0, warmup_steps=0)
    assert found[25] == pytest.approx(0.3)
    assert found[100] == pytest.approx(0.0)


def test_step_falls_at_its_milestones() -> None:
    found = rates(LRShape.step, milestones=[0.5, 0.75], gamma=0.1)
    assert found[49] == pytest.approx(0.4)
    assert found[50] == pytest.approx(0.04)
    assert found[75] == pytest.approx(0.004)


def test_the_warm_up_is_a_tenth_of_training_unless_it_is_set() -> None:
    found = rates(LRShape.constant)
    assert found[9] < found[10] == 0.4
