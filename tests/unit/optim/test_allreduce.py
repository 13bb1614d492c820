"""AllReduce equals data-parallel training, repeats bit for bit, learns, and weights every sample alike."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkit.optim import AllReduce, Every
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import (
    Net,
    Quadratics,
    adamw,
    all_reduce,
    held_out_loss,
    loss_of,
    same,
    sgd,
    train,
    trained,
    trajectories,
)


def test_equals_one_process_on_the_mean_loss() -> None:
    reference = Net(dtype=torch.float64)
    optimizer = adamw(list(reference.parameters()))
    for step in range(20):
        optimizer.zero_grad()
        torch.stack([loss_of(reference, rank, step) for rank in range(3)]).mean().backward()
        optimizer.step()
    for net, _ in trained(all_reduce, replicas=3, steps=20, dtype=torch.float64):
        for a, b in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_peer_equals_its_inner_optimizer_bit_for_bit(dtype: torch.dtype) -> None:
    reference = Net(dtype=dtype)
    train(reference, adamw(list(reference.parameters())), 0, range(20))
    ((net, _),) = trained(all_reduce, replicas=1, steps=20, dtype=dtype)
    assert same(net, reference)


def test_two_runs_are_equal_bit_for_bit_and_so_are_all_replicas() -> None:
    first = trained(all_reduce, replicas=3, steps=15)
    again = trained(all_reduce, replicas=3, steps=15)
    assert all(same(net, first[0][0]) for net, _ in first + again)
    assert len({optimizer.digest() for _, optimizer in first + again}) == 1


def test_learns() -> None:
    before = held_out_loss(Net())
    assert held_out_loss(trained(all_reduce, replicas=2, steps=80)[0][0]) < 0.15 * before


@settings(max_examples=25, deadline=None)
@given(samples=st.lists(st.integers(1, 1000), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_a_step_follows_the_gradient_of_the_mean_sample(samples: list[int], seed: int) -> None:
    replicas = len(samples)
    problem = Quadratics.of(replicas, steps=1, seed=seed)
    start = torch.zeros(5, dtype=torch.float64)
    paths = trajectories(
        lambda parameters, collective: AllReduce(sgd(parameters), collective=collective),
        problem,
        replicas=replicas,
        steps=1,
        start=start,
        samples=[float(count) for count in samples],
    )
    mean = sum(count * problem(rank, 0, start) for rank, count in enumerate(samples)) / sum(samples)
    for path in paths:
        torch.testing.assert_close(path[1], start - 0.1 * mean, rtol=1e-12, atol=1e-12)


def test_a_parameter_without_gradient_on_one_peer_counts_as_zero_there_and_nowhere_is_left_alone() -> None:
    def task(collective: LocalCollective, rank: int) -> list[torch.Tensor]:
        both, one, none = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
        # Weight decay would move a parameter whose gradient is zero: only None leaves it alone.
        inner = torch.optim.SGD([both, one, none], lr=1.0, weight_decay=0.5)
        optimizer = AllReduce(inner, collective=collective)
        both.grad = torch.full((2,), 1.0)
        if rank == 0:
            one.grad = torch.full((2,), 1.0)
        optimizer.step()
        return [both.detach(), one.detach(), none.detach()]

    for both, one, none in LocalSwarm(2).run(task):
        assert both.tolist() == [-0.5, -0.5]
        assert one.tolist() == [0.0, 0.0]
        assert none.tolist() == [1.0, 1.0]


def test_the_closure_is_called_once_and_its_loss_returned() -> None:
    x = torch.nn.Parameter(torch.ones(3))
    optimizer = AllReduce(sgd([x]), collective=LocalSwarm(1).collectives[0])
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        x.grad = torch.ones(3)
        return 1.5

    assert optimizer.step(closure) == 1.5
    assert calls == [True]
    torch.testing.assert_close(x.detach(), torch.full((3,), 0.9))


def test_refuses_a_window() -> None:
    x = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="sync"):
        AllReduce(sgd([x]), collective=LocalSwarm(1).collectives[0], sync=Every(4))
