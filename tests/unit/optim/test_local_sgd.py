"""LocalSGD equals averaging by hand, repeats bit for bit, learns, and weights every sample alike."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkit.optim import Every, LocalSGD, QuadraticSync, RoundReport, SyncedOptimizer
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import (
    Net,
    Quadratics,
    adamw,
    all_reduce,
    batch,
    held_out_loss,
    local_sgd,
    same,
    sgd,
    train,
    trained,
    trajectories,
)


def average(nets: list[Net]) -> None:
    with torch.no_grad():
        for parameters in zip(*(net.parameters() for net in nets), strict=True):
            mean = torch.stack(parameters).mean(0)
            for parameter in parameters:
                parameter.copy_(mean)


@pytest.mark.parametrize("h", [1, 3, 8])
def test_equals_replicas_that_are_averaged_by_hand(h: int) -> None:
    nets = [Net(dtype=torch.float64) for _ in range(3)]
    optimizers = [adamw(list(net.parameters())) for net in nets]
    for step in range(24):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            train(net, optimizer, rank, range(step, step + 1))
        if (step + 1) % h == 0:
            average(nets)
    for net, _ in trained(partial(local_sgd, h=h), replicas=3, steps=24, dtype=torch.float64):
        for a, b in zip(net.parameters(), nets[0].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_peer_equals_its_inner_optimizer_bit_for_bit(dtype: torch.dtype) -> None:
    reference = Net(dtype=dtype)
    train(reference, adamw(list(reference.parameters())), 0, range(20))
    ((net, _),) = trained(partial(local_sgd, h=3), replicas=1, steps=20, dtype=dtype)
    assert same(net, reference)


def test_two_runs_are_equal_bit_for_bit_and_so_are_all_replicas() -> None:
    first = trained(local_sgd, replicas=3, steps=16)
    again = trained(local_sgd, replicas=3, steps=16)
    assert all(same(net, first[0][0]) for net, _ in first + again)


def test_learns() -> None:
    before = held_out_loss(Net())
    assert held_out_loss(trained(partial(local_sgd, h=10), replicas=2, steps=80)[0][0]) < 0.15 * before


@settings(max_examples=25, deadline=None)
@given(samples=st.lists(st.integers(1, 1000), min_size=1, max_size=4), h=st.integers(1, 4), seed=st.integers(0, 1000))
def test_a_round_is_the_sample_weighted_mean_of_the_parameters(samples: list[int], h: int, seed: int) -> None:
    replicas = len(samples)
    problem = Quadratics.of(replicas, steps=h, seed=seed)
    start = torch.zeros(5, dtype=torch.float64)
    paths = trajectories(
        lambda parameters, collective: LocalSGD(sgd(parameters), collective=collective, sync=Every(h)),
        problem,
        replicas=replicas,
        steps=h,
        start=start,
        samples=[float(count) for count in samples],
    )
    mean = torch.zeros_like(start)
    for rank, count in enumerate(samples):
        x = start
        for step in range(h):
            x = x - 0.1 * problem(rank, step, x)
        mean += count / sum(samples) * x
    for path in paths:
        torch.testing.assert_close(path[h], mean, rtol=1e-12, atol=1e-12)


def test_a_window_of_32_steps_sends_a_thirty_second_of_all_reduce() -> None:
    def sent(optimizer_of: object, steps: int) -> int:
        def task(collective: LocalCollective, rank: int) -> int:
            model = torch.nn.Linear(64, 64)
            torch.nn.init.zeros_(model.weight)
            torch.nn.init.zeros_(model.bias)
            assert callable(optimizer_of)
            optimizer: SyncedOptimizer = optimizer_of(list(model.parameters()), collective)
            reports: list[RoundReport] = []
            optimizer.on_round.append(reports.append)
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()
            return sum(report.bytes_sent for report in reports)

        return sum(LocalSwarm(4).run(task))

    ratio = sent(partial(local_sgd, h=32), 64) / sent(all_reduce, 64)
    assert ratio == pytest.approx(1 / 32, rel=0.05)


def test_buffers_are_averaged_and_integers_left_alone() -> None:
    def task(collective: LocalCollective, rank: int) -> torch.nn.BatchNorm1d:
        model = torch.nn.BatchNorm1d(6)
        optimizer = LocalSGD(
            sgd(list(model.parameters())), collective=collective, sync=Every(2), buffers=list(model.buffers())
        )
        for step in range(2):
            optimizer.zero_grad()
            model(batch(rank, step)[0] + rank).square().sum().backward()
            optimizer.step()
        return model

    def alone(rank: int) -> torch.Tensor:
        model = torch.nn.BatchNorm1d(6)
        for step in range(2):
            model(batch(rank, step)[0] + rank)
        assert model.running_mean is not None
        return model.running_mean

    first, second = LocalSwarm(2).run(task)
    expected = (alone(0) + alone(1)) / 2
    for model in (first, second):
        assert model.running_mean is not None
        assert model.num_batches_tracked is not None
        torch.testing.assert_close(model.running_mean, expected)
        assert int(model.num_batches_tracked) == 2


def test_qsr_synchronises_when_the_schedule_says_so() -> None:
    x = torch.nn.Parameter(torch.ones(3))
    inner = sgd([x], lr=1.0)
    optimizer = LocalSGD(
        inner, collective=LocalSwarm(1).collectives[0], sync=QuadraticSync(alpha=0.2, h_base=2, total_steps=20)
    )
    windows: list[int] = []
    optimizer.on_round.append(lambda report: windows.append(report.window))
    decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    for _ in range(20):
        x.grad = torch.ones(3)
        optimizer.step()
        decay.step()
    # Decay falls into the fourth window, which runs its course; then (0.2 / 0.1)^2, then all that is left.
    assert windows == [2, 2, 2, 2, 4, 4, 4]
