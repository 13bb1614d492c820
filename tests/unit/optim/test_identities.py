"""Identities between the strategies, in float64 over LocalSwarm: what must come out whatever the implementation.

I26, of Delayed Nesterov, has nothing to hold for: no strategy here takes outer steps without a barrier.
"""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from swarmkit.optim import AllReduce, Collective, DiLoCo, Every, LocalSGD, SyncedOptimizer
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import Make, Quadratics, adamw, sgd, trajectories

START = torch.linspace(-1, 1, 5, dtype=torch.float64)
LR, MU, OUTER = 0.1, 0.9, 0.7


def make_diloco(
    parameters: list[Tensor],
    collective: Collective,
    *,
    h: int = 4,
    lr: float = OUTER,
    mu: float = MU,
    nesterov: bool = True,
    inner: Callable[[list[Tensor]], torch.optim.Optimizer] = sgd,
) -> SyncedOptimizer:
    return DiLoCo(
        inner(parameters), collective=collective, sync=Every(h), outer_lr=lr, outer_momentum=mu, nesterov=nesterov
    )


def make_local_sgd(
    parameters: list[Tensor],
    collective: Collective,
    *,
    h: int = 4,
    inner: Callable[[list[Tensor]], torch.optim.Optimizer] = sgd,
) -> SyncedOptimizer:
    return LocalSGD(inner(parameters), collective=collective, sync=Every(h))


def make_all_reduce(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
    return AllReduce(sgd(parameters), collective=collective)


def by_hand(
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], problem: Quadratics, steps: int
) -> list[Tensor]:
    """A torch optimizer fed the mean gradient of all replicas."""
    x = torch.nn.Parameter(START.clone())
    torch_optimizer = optimizer([x])
    path = [START]
    for step in range(steps):
        ranks = range(len(problem.minima))
        x.grad = torch.stack([problem(rank, step, x.detach()) for rank in ranks]).mean(0)
        torch_optimizer.step()
        path.append(x.detach().clone())
    return path


def assert_close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def assert_paths(left: list[Tensor], right: list[Tensor], every: int = 1) -> None:
    assert len(left) == len(right)
    for a, b in zip(left[::every], right[::every], strict=True):
        assert_close(a, b)


@pytest.mark.parametrize(
    "make", [make_all_reduce, partial(make_local_sgd, h=1), partial(make_diloco, h=1, lr=1.0, mu=0.0)]
)
def test_i1_one_inner_step_without_outer_momentum_is_synchronous_sgd(make: Make) -> None:
    problem = Quadratics.of(3)
    for path in trajectories(make, problem, replicas=3, steps=12, start=START):
        assert_paths(path, by_hand(sgd, problem, 12))


def test_i1_holds_when_the_pseudo_gradient_is_what_is_sent() -> None:
    # outer_lr = 1 sends parameters; any other rate sends pseudo-gradients, and scales the step.
    problem = Quadratics.of(3)
    make = partial(make_diloco, h=1, lr=0.5, mu=0.0)
    reference = by_hand(partial(sgd, lr=LR * 0.5), problem, 12)
    for path in trajectories(make, problem, replicas=3, steps=12, start=START):
        assert_paths(path, reference)


@pytest.mark.parametrize("h", [1, 3, 8])
@pytest.mark.parametrize("inner", [sgd, adamw])
def test_i2_outer_sgd_at_rate_one_is_parameter_averaging(
    h: int, inner: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> None:
    problem = Quadratics.of(3)
    averaged = trajectories(partial(make_local_sgd, h=h, inner=inner), problem, replicas=3, steps=24, start=START)
    outer = trajectories(
        partial(make_diloco, h=h, lr=1.0, mu=0.0, inner=inner), problem, replicas=3, steps=24, start=START
    )
    # The general outer step, which sends pseudo-gradients, is reached by a rate that only rounds to 1.
    general = trajectories(
        partial(make_diloco, h=h, lr=1.0 - 2**-53, mu=0.0, inner=inner), problem, replicas=3, steps=24, start=START
    )
    for a, b, c in zip(averaged, outer, general, strict=True):
        assert_paths(a, b)
        assert_paths(a, c)


def test_i3_one_inner_step_with_an_outer_nesterov_step_is_nesterov_on_the_mean_gradient() -> None:
    problem = Quadratics.of(4)

    def nesterov(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=OUTER * LR, momentum=MU, nesterov=True)

    for path in trajectories(partial(make_diloco, h=1), problem, replicas=4, steps=20, start=START):
        assert_paths(path, by_hand(nesterov, problem, 20))


def test_i3_without_nesterov_it_is_heavy_ball_on_the_mean_gradient() -> None:
    problem = Quadratics.of(2)

    def heavy_ball(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=OUTER * LR, momentum=MU)

    for path in trajectories(partial(make_diloco, h=1, nesterov=False), problem, replicas=2, steps=20, start=START):
        assert_paths(path, by_hand(heavy_ball, problem, 20))


def test_i4_one_replica_without_momentum_is_lookahead() -> None:
    problem = Quadratics.of(1)
    (path,) = trajectories(
        partial(make_diloco, h=4, lr=0.5, mu=0.0, inner=adamw), problem, replicas=1, steps=20, start=START
    )
    slow, x = START.clone(), torch.nn.Parameter(START.clone())
    inner = adamw([x])
    for step in range(20):
        x.grad = problem(0, step, x.detach())
        inner.step()
        if (step + 1) % 4 == 0:
            slow = slow + 0.5 * (x.detach() - slow)
            with torch.no_grad():
                x.copy_(slow)
        assert_close(path[step + 1], x.detach())


def test_i5_one_replica_at_rate_one_is_its_bare_inner_optimizer() -> None:
    problem = Quadratics.of(1)
    reference = by_hand(adamw, problem, 20)
    for lr, tolerance in ((1.0, 0.0), (1.0 - 2**-53, 1e-14)):
        make = partial(make_diloco, h=4, lr=lr, mu=0.0, inner=adamw)
        (path,) = trajectories(make, problem, replicas=1, steps=20, start=START)
        for a, b in zip(path, reference, strict=True):
            assert_close(a, b, tolerance)


def test_i6_a_constant_pseudo_gradient_moves_as_the_closed_form_says() -> None:
    def constant(rank: int, step: int, x: Tensor) -> Tensor:
        return torch.ones_like(x) * (rank + 1)

    rounds, h = 120, 2
    path = trajectories(partial(make_diloco, h=h), constant, replicas=3, steps=rounds * h, start=START)[0][::h]
    delta = LR * h * 2.0  # ranks have gradients 1, 2 and 3
    moved = 0.0
    for j in range(1, rounds + 1):
        moved += 1 + MU * (1 - MU**j) / (1 - MU)
        assert_close(path[j], START - OUTER * delta * moved, 1e-10)
    assert_close(START - path[1], torch.full_like(START, OUTER * (1 + MU) * delta))
    gain = float((path[-2] - path[-1])[0]) / delta
    assert gain == pytest.approx(OUTER / (1 - MU), rel=1e-4)


@pytest.mark.parametrize("h", [1, 2, 4, 8])
def test_i7_quadratics_of_one_hessian_give_the_synchronous_trajectory_at_every_round(h: int) -> None:
    problem = Quadratics.of(4)
    reference = by_hand(sgd, problem, 32)
    for make in (partial(make_local_sgd, h=h), partial(make_diloco, h=h, lr=1.0, mu=0.0)):
        for path in trajectories(make, problem, replicas=4, steps=32, start=START):
            assert_paths(path, reference, every=h)


def test_i7_holds_for_weighted_replicas_with_the_weighted_mean_gradient() -> None:
    problem = Quadratics.of(3)
    samples = [1.0, 2.0, 5.0]
    x = START.clone()
    weights = torch.tensor(samples, dtype=torch.float64) / sum(samples)
    reference = [x]
    for step in range(12):
        gradients = torch.stack([problem(rank, step, x) for rank in range(3)])
        x = x - LR * weights @ gradients
        reference.append(x)
    for make, h in ((make_all_reduce, 1), (partial(make_local_sgd, h=4), 4)):
        for path in trajectories(make, problem, replicas=3, steps=12, start=START, samples=samples):
            assert_paths(path, reference, every=h)


def test_i8_linear_losses_move_by_all_steps_times_the_mean_gradient() -> None:
    slopes = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    make = partial(make_local_sgd, h=5)
    for path in trajectories(make, lambda rank, _, __: slopes[rank].clone(), replicas=3, steps=20, start=START):
        assert_close(path[-1], START - LR * 20 * slopes.mean(0))


def test_i9_an_outer_rate_of_zero_freezes_the_anchor() -> None:
    for path in trajectories(partial(make_diloco, h=4, lr=0.0), Quadratics.of(2), replicas=2, steps=12, start=START):
        assert all(torch.equal(point, START) for point in path[::4])
        assert not torch.equal(path[3], START)


@pytest.mark.parametrize("make", [make_all_reduce, make_local_sgd, make_diloco])
def test_i10_identical_replicas_are_one_replica(make: Make) -> None:
    problem = Quadratics.of(1)
    (alone,) = trajectories(make, problem, replicas=1, steps=16, start=START)
    for path in trajectories(make, lambda _, step, x: problem(0, step, x), replicas=4, steps=16, start=START):
        assert all(torch.equal(a, b) for a, b in zip(alone, path, strict=True))  # quarters are exact


@pytest.mark.parametrize("make", [make_all_reduce, make_local_sgd, make_diloco])
def test_i11_the_order_of_replicas_does_not_matter(make: Make) -> None:
    problem = Quadratics.of(3)
    order = [2, 0, 1]
    forward = trajectories(make, problem, replicas=3, steps=16, start=START)
    turned = trajectories(make, lambda rank, step, x: problem(order[rank], step, x), replicas=3, steps=16, start=START)
    for rank, other in enumerate(order):
        assert_paths(turned[rank], forward[other])


def test_i12_the_mean_pseudo_gradient_is_the_anchor_minus_the_mean_of_the_parameters() -> None:
    problem = Quadratics.of(3)
    samples = [1.0, 3.0, 4.0]

    def task(collective: LocalCollective, rank: int) -> tuple[Tensor, float]:
        x = torch.nn.Parameter(START.clone())
        optimizer = make_diloco([x], collective, h=3)
        for step in range(3):
            x.grad = problem(rank, step, x.detach())
            optimizer.samples += samples[rank]
            if step == 2:
                before = x.detach() - LR * x.grad
            optimizer.step()
        assert optimizer.last_report is not None
        return before, optimizer.last_report.pseudo_gradient_norm

    found = LocalSwarm(3).run(task)
    mean = sum((w * x for w, (x, _) in zip(samples, found, strict=True)), torch.zeros_like(START)) / sum(samples)
    for _, norm in found:
        assert math.isclose(norm, float((START - mean).norm()), rel_tol=1e-12)
