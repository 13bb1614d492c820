"""CO2: its limits, its penalty and its clip, and the slips of the public code."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmkit.optim import CO2, Collective, Every, LocalSGD, RoundReport, SyncedOptimizer
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim import by_hand
from tests.unit.optim.replicas import Net, Quadratics, adamw, held_out_loss, same, sgd, train, trajectories
from tests.unit.optim.rounding import Rounding
from tests.unit.optim.simulated import Clock, SimulatedCollective

START = torch.linspace(-1, 1, 5, dtype=torch.float64)
LR, TAU, ROUNDS = 0.1, 4, 7
AS_PUBLISHED: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.5, "penalty": "gap", "keep_local": False}


def run(
    replicas: int = 3, gradient: Any = None, inner: Any = sgd, rounds: int = ROUNDS, **options: Any
) -> list[list[Tensor]]:
    def make(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        return CO2(inner(parameters), collective=collective, sync=Every(TAU), **(AS_PUBLISHED | options))

    problem = gradient or Quadratics.of(replicas)
    return trajectories(make, problem, replicas=replicas, steps=TAU * rounds, start=START)


def distance(left: list[list[Tensor]], right: list[list[Tensor]], every: int = 1) -> float:
    rows = zip(left, right, strict=True)
    pairs = [(a, b) for one, other in rows for a, b in zip(one[::every], other[::every], strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def averaging_distance(**options: Any) -> float:
    def local_sgd(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        return LocalSGD(sgd(parameters), collective=collective, sync=Every(TAU))

    averaged = trajectories(local_sgd, Quadratics.of(3), replicas=3, steps=TAU * ROUNDS, start=START)
    return distance(run(overlap=False, outer_momentum=0.0, **{"clip": None, **options}), averaged)


def test_14_fresh_without_momentum_it_is_local_sgd() -> None:
    """(14)"""
    assert averaging_distance() < 1e-12


def slow_mo_distance(outer_lr: float = 0.7, beta: float = 0.6, **options: Any) -> float:
    """(15) torch's SGD with momentum on the mean pseudo-gradients."""
    anchor = torch.nn.Parameter(START.clone())
    outer = torch.optim.SGD([anchor], lr=outer_lr, momentum=beta)
    problem, reference = Quadratics.of(3), [START]
    for index in range(ROUNDS):
        ends = []
        for rank in range(3):
            x = anchor.detach().clone()
            for step in range(index * TAU, (index + 1) * TAU):
                x = x - LR * problem(rank, step, x)
            ends.append(x)
        anchor.grad = anchor.detach() - torch.stack(ends).mean(0)
        outer.step()
        reference.append(anchor.detach().clone())
    paths = run(overlap=False, outer_lr=outer_lr, outer_momentum=beta, **{"penalty": None, "clip": None, **options})
    return distance([path[::TAU] for path in paths], [reference] * 3)


def test_15_fresh_without_penalty_it_is_slow_mo() -> None:
    """(15)"""
    assert slow_mo_distance() < 1e-12
    assert slow_mo_distance(penalty="gap") < 1e-12  # a fresh mean is not penalised


def test_16_on_linear_losses_stale_is_fresh_one_round_late() -> None:
    """(16)"""
    slopes = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"gradient": lambda rank, _, __: slopes[rank].clone(), "penalty": None, "clip": None}
    late = [path[TAU::TAU] for path in run(rounds=ROUNDS + 1, **options)]
    fresh = [path[::TAU] for path in run(overlap=False, **options)]
    assert distance(late, fresh) < 1e-12


@pytest.mark.parametrize("inner", [sgd, adamw])
def test_17_one_fresh_worker_is_its_inner_optimizer(inner: Any) -> None:
    """(17)"""
    x = torch.nn.Parameter(START.clone())
    optimizer, problem, reference = inner([x]), Quadratics.of(1), [START]
    for step in range(TAU * ROUNDS):
        x.grad = problem(0, step, x.detach())
        optimizer.step()
        reference.append(x.detach().clone())
    options: dict[str, Any] = {"overlap": False, "outer_momentum": 0.0, "penalty": None, "clip": None}
    assert distance(run(replicas=1, inner=inner, **options), [reference]) < 1e-12


@pytest.mark.parametrize("options", [{"clip": 0.0}, {"penalty": math.inf}], ids=["clip", "penalty"])
def test_18_a_clip_of_0_and_an_endless_penalty_freeze_the_anchor(options: dict[str, float]) -> None:
    """(18)"""
    for path in run(**options):
        assert all(torch.equal(point, START) for point in path[::TAU])
        assert not torch.equal(path[TAU - 1], START)


def test_18_an_endless_clip_and_a_penalty_of_1_change_nothing() -> None:
    """(18)"""
    assert distance(run(clip=math.inf, penalty=1.0), run(clip=None, penalty=None)) == 0


def test_19_the_clip_is_none_of_the_public_code_s_no_op() -> None:
    """(19) There the result of torch.clamp is thrown away."""
    free, clipped = run(clip=None, penalty=None), run(clip=0.05, penalty=None)
    assert distance(free, clipped, TAU) > 1e-2
    for path in clipped:
        steps = torch.stack(path[::TAU]).diff(dim=0).abs()
        assert float(steps.max()) == pytest.approx(0.05)  # outer_lr is 1


def stale_by_hand(outer_lr: float, beta: float, penalty: Any, clip: float | None) -> list[list[Tensor]]:
    """The paper's equations with the penalty of the gap."""
    state = {"x": START, "m": torch.zeros_like(START), "moved": 0.0, "first": 0.0}
    penalties: list[float] = []

    def outer(g: Tensor) -> Tensor:
        if penalty == "gap":
            if state["moved"] > 0 and state["first"] == 0:
                state["first"] = state["moved"]
            ratio = 1 + (state["moved"] / state["first"] if state["first"] else 0.0)
        else:
            ratio = penalty or 1.0
        penalties.append(ratio)
        m = beta * state["m"] + g / ratio
        state["m"] = m if clip is None else m.clamp(-clip, clip)
        step = outer_lr * state["m"]
        state["x"], state["moved"] = state["x"] - step, float(step.norm())
        found: Tensor = state["x"]
        return found

    return by_hand.delayed(Quadratics.of(3), START, replicas=3, h=TAU, rounds=ROUNDS, lr=LR, outer=outer)


@pytest.mark.parametrize("penalty", ["gap", 2.0, None])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_stale_rounds_follow_the_equations(penalty: Any, clip: float | None) -> None:
    options: dict[str, Any] = {"outer_lr": 0.8, "penalty": penalty, "clip": clip}
    assert distance(run(outer_momentum=0.3, **options), stale_by_hand(beta=0.3, **options)) < 1e-12


@settings(max_examples=20, deadline=None)
@given(
    outer_lr=st.floats(0.1, 1.2),
    beta=st.floats(0, 0.9),
    penalty=st.one_of(st.just("gap"), st.none(), st.floats(1, 5)),
    clip=st.one_of(st.none(), st.floats(0, 1)),
)
def test_any_setting_follows_the_equations(outer_lr: float, beta: float, penalty: Any, clip: float | None) -> None:
    found = run(outer_lr=outer_lr, outer_momentum=beta, penalty=penalty, clip=clip)
    assert distance(found, stale_by_hand(outer_lr=outer_lr, beta=beta, penalty=penalty, clip=clip)) < 1e-9


def test_keeping_local_progress_is_delayed_averaging_that_corrects_for_the_stale_mean() -> None:
    """x <- x + (mean - own) of one round ago, when nothing else is done to the mean."""
    problem = Quadratics.of(3)
    xs, paths = [START] * 3, [[START] for _ in range(3)]
    own, mean = [torch.zeros_like(START)] * 3, torch.zeros_like(START)
    for index in range(ROUNDS):
        starts, ends = xs, []
        for rank, start in enumerate(starts):
            x = start
            for step in range(index * TAU, (index + 1) * TAU):
                x = x - LR * problem(rank, step, x)
                paths[rank].append(x)
            ends.append(x)
        xs = [end + own[rank] - mean for rank, end in enumerate(ends)]
        for path, x in zip(paths, xs, strict=True):
            path[-1] = x
        own = [start - end for start, end in zip(starts, ends, strict=True)]
        mean = torch.stack(own).mean(0)
    found = run(keep_local=True, outer_momentum=0.0, penalty=None, clip=None)
    assert distance(found, paths) < 1e-12


def reports(**options: Any) -> tuple[list[RoundReport], Net]:
    def task(collective: LocalCollective, rank: int) -> tuple[list[RoundReport], Net]:
        net = Net()
        optimizer = CO2(  # as published
            adamw(list(net.parameters())), collective=collective, sync=Every(TAU), **(AS_PUBLISHED | options)
        )
        found: list[RoundReport] = []
        optimizer.on_round.append(found.append)
        train(net, optimizer, rank, range(24))
        optimizer.finish()
        return found, net

    results = LocalSwarm(2).run(task)
    assert same(results[0][1], results[1][1])
    return results[0]


def test_every_round_reports_its_penalty_and_what_was_clipped() -> None:
    found, _ = reports(clip=0.05)
    assert [report.staleness_penalty for report in found[:2]] == [1.0, 2.0]  # at first nothing, then as much as ever
    assert all(report.staleness_penalty > 1 for report in found[1:])
    assert 0 < found[0].clipped < 1
    off, _ = reports(clip=None, penalty=None)
    assert {(report.staleness_penalty, report.clipped) for report in off} == {(1.0, 0.0)}


def test_the_penalty_is_agreed_on_bit_for_bit_and_survives_a_codec() -> None:
    def task(collective: LocalCollective, rank: int) -> list[float]:
        net = Net()
        optimizer = CO2(
            adamw(list(net.parameters())), collective=collective, sync=Every(TAU), averaging=Rounding(collective, 2**-8)
        )
        found: list[float] = []
        optimizer.on_round.append(lambda report: found.append(report.staleness_penalty))
        optimizer._moved = 0.0
        train(net, optimizer, rank, range(12))
        optimizer._moved *= 1 + rank * 1e-12  # another machine rounds otherwise
        train(net, optimizer, rank, range(12, 24))
        optimizer.finish()
        return found

    left, right = LocalSwarm(2).run(task)
    assert left == right
    assert len(left) == 6


def test_what_a_failed_round_offered_is_penalised_for_its_whole_age_when_it_comes_in() -> None:
    def penalties(failing: list[int]) -> tuple[list[float], list[float]]:
        x = torch.nn.Parameter(START.clone())
        collective = SimulatedCollective(Clock(), 1.0, failing=failing)
        options = AS_PUBLISHED | {"outer_momentum": 0.0, "clip": None}
        optimizer = CO2(sgd([x]), collective=collective, sync=Every(2), **options)
        found: list[float] = []
        optimizer.on_round.append(lambda report: found.append(report.staleness_penalty))
        for _ in range(10):
            x.grad = torch.ones_like(x)
            optimizer.step()
        gaps = [float(tensors[1]) for _, _, tensors in collective.offered]
        return found, gaps

    found, gaps = penalties([])
    assert (found[:2], gaps[:2]) == ([1.0, 2.0], [0.0, pytest.approx(gaps[1])])
    found, gaps = penalties([1])
    assert found[:3] == [1.0, 1.0, 2.0]  # the second failed: its report has no penalty
    assert gaps[2] == gaps[1] > 0


def test_learns() -> None:
    before = held_out_loss(Net())
    assert held_out_loss(reports(outer_momentum=0.2)[1]) < 0.6 * before


# -- planted slips -----------------------------------------------------------------------------------------------------


def test_14_and_15_notice_a_clip_that_does_nothing_and_dampened_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CO2, "_clip_momentum", lambda self: 0.0)
    assert distance(run(clip=0.05, penalty=None), run(clip=None, penalty=None)) == 0  # what 19 would have seen
    monkeypatch.undo()

    def dampened(self: CO2, exact: list[Tensor]) -> float:
        return 1 / (1 - self.outer_momentum)  # m <- beta m + (1 - beta) g

    monkeypatch.setattr(CO2, "_next_penalty", dampened)
    assert slow_mo_distance() > 1e-3


def test_15_notices_a_first_window_of_one_step_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Every, "next_window", lambda self, step, lr: self.h + (step == 0))
    assert slow_mo_distance() > 1e-3
    assert averaging_distance() < 1e-12  # both are late alike: 14 cannot see it


def test_refuses_settings_that_cannot_work() -> None:
    parameters = list(Net().parameters())
    collective = LocalSwarm(1).collectives[0]
    for options, message in [
        ({"penalty": 0.5}, "penalty=0.5"),
        ({"penalty": "gaps"}, "penalty='gaps'"),
        ({"clip": -1.0}, "clip=-1.0"),
        ({"clip": math.nan}, "clip=nan"),
        ({"overlap": False, "keep_local": True}, "keep_local"),
        ({"fragments": 2}, "fragments: CO2 sends the whole model"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            CO2(sgd(parameters), collective=collective, **options)  # type: ignore[arg-type]
