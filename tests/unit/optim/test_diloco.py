"""DiLoCo equals its algorithm written by hand, repeats bit for bit, learns, and scales as its outer step says."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmkit.optim import Collective, DiLoCo, Every, LocalSGD, SyncedOptimizer
from swarmkit.peers.local import LocalSwarm
from tests.unit.optim.replicas import (
    Net,
    Quadratics,
    adamw,
    diloco,
    held_out_loss,
    local_sgd,
    same,
    sgd,
    train,
    trained,
    trajectories,
)


def averaging(parameters: list[Tensor], collective: Collective, h: int = 1) -> SyncedOptimizer:
    return DiLoCo(adamw(parameters), collective=collective, sync=Every(h), outer_lr=1.0, outer_momentum=0.0)


@pytest.mark.parametrize("h", [1, 4, 6])
def test_equals_algorithm_1_written_by_hand(h: int) -> None:
    nets = [Net(dtype=torch.float64) for _ in range(3)]
    optimizers = [adamw(list(net.parameters())) for net in nets]
    anchor = [p.detach().clone() for p in nets[0].parameters()]
    velocity = [torch.zeros_like(a) for a in anchor]
    for step in range(24):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            train(net, optimizer, rank, range(step, step + 1))
        if (step + 1) % h == 0:
            for i, locals_ in enumerate(zip(*(net.parameters() for net in nets), strict=True)):
                gradient = anchor[i] - torch.stack([p.detach() for p in locals_]).mean(0)
                velocity[i] = 0.9 * velocity[i] + gradient
                anchor[i] = anchor[i] - 0.7 * (gradient + 0.9 * velocity[i])
                for parameter in locals_:
                    parameter.data.copy_(anchor[i])
    for net, _ in trained(partial(diloco, h=h), replicas=3, steps=24, dtype=torch.float64):
        for a, b in zip(net.parameters(), anchor, strict=True):
            torch.testing.assert_close(a.detach(), b, rtol=0, atol=1e-9)


def test_a_window_of_one_without_outer_momentum_equals_parameter_averaging() -> None:
    averaged = trained(partial(local_sgd, h=1), replicas=3, steps=20)
    for (net, _), (reference, _) in zip(trained(averaging, replicas=3, steps=20), averaged, strict=True):
        for a, b in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("h", [1, 5])
def test_one_peer_without_outer_momentum_equals_its_inner_optimizer_bit_for_bit(dtype: torch.dtype, h: int) -> None:
    reference = Net(dtype=dtype)
    train(reference, adamw(list(reference.parameters())), 0, range(20))
    ((net, _),) = trained(partial(averaging, h=h), replicas=1, steps=20, dtype=dtype)
    assert same(net, reference)


def test_two_runs_are_equal_bit_for_bit_and_so_are_all_replicas() -> None:
    first = trained(diloco, replicas=3, steps=16)
    again = trained(diloco, replicas=3, steps=16)
    assert all(same(net, first[0][0]) for net, _ in first + again)
    assert len({optimizer.digest() for _, optimizer in first + again}) == 1


def test_learns() -> None:
    def make(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        # Momentum 0.9 takes far more than these 40 rounds to settle.
        return DiLoCo(adamw(parameters, lr=0.02), collective=collective, sync=Every(5), outer_momentum=0.5)

    before = held_out_loss(Net())
    assert held_out_loss(trained(make, replicas=2, steps=200)[0][0]) < 0.15 * before


@settings(max_examples=25, deadline=None)
@given(
    lr=st.floats(0.0, 1.5),
    momentum=st.floats(0.0, 0.95),
    h=st.integers(1, 4),
    replicas=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_the_first_outer_step_moves_the_mean_update_times_its_gain(
    lr: float, momentum: float, h: int, replicas: int, seed: int
) -> None:
    problem = Quadratics.of(replicas, steps=h, seed=seed)
    start = torch.zeros(5, dtype=torch.float64)

    def outer(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        return DiLoCo(sgd(parameters), collective=collective, sync=Every(h), outer_lr=lr, outer_momentum=momentum)

    def mean(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        return LocalSGD(sgd(parameters), collective=collective, sync=Every(h))

    averaged = trajectories(mean, problem, replicas=replicas, steps=h, start=start)[0][h]
    for path in trajectories(outer, problem, replicas=replicas, steps=h, start=start):
        torch.testing.assert_close(path[h], lr * (1 + momentum) * averaged, rtol=1e-9, atol=1e-12)


def test_anchor_and_momentum_are_float32_under_bfloat16_parameters() -> None:
    for net, optimizer in trained(diloco, replicas=2, steps=8, dtype=torch.bfloat16):
        assert {anchor.dtype for anchor in optimizer.anchor().values()} == {torch.float32}
        tensors, _ = optimizer.snapshot()
        momenta = [tensor for name, tensor in tensors.items() if name.startswith("outer/")]
        assert len(momenta) == 4
        assert {tensor.dtype for tensor in momenta} == {torch.float32}
        for parameter, anchor in zip(net.parameters(), optimizer.anchor().values(), strict=True):
            assert torch.equal(parameter, anchor.to(torch.bfloat16))


def test_rounding_to_bfloat16_is_never_taken_for_progress() -> None:
    # The anchor falls between two bfloat16 numbers; replicas that do not move then must not move it.
    x = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = DiLoCo(
        sgd([x], lr=0.1), collective=LocalSwarm(1).collectives[0], sync=Every(1), outer_lr=0.3, outer_momentum=0.0
    )
    x.grad = torch.full_like(x, 0.3)
    optimizer.step()
    (anchor,) = (tensor.clone() for tensor in optimizer.anchor().values())
    assert not torch.equal(anchor, anchor.bfloat16().float())
    for _ in range(5):
        x.grad = torch.zeros_like(x)
        optimizer.step()
    assert torch.equal(next(iter(optimizer.anchor().values())), anchor)


def test_what_is_sent_names_the_round_so_that_unlike_peers_never_meet() -> None:
    x = torch.nn.Parameter(torch.ones(4))
    collective = LocalSwarm(1).collectives[0]
    assert DiLoCo(sgd([x]), collective=collective).round_name == "pseudo-gradients"
    assert averaging([x], collective).round_name == "parameters"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outer_lr": -0.1}, "outer_lr=-0.1"),
        ({"outer_lr": float("nan")}, "outer_lr=nan"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0"),
        ({"outer_momentum": -0.1}, "outer_momentum=-0.1"),
    ],
)
def test_refuses_settings_that_cannot_work(options: dict[str, float], message: str) -> None:
    x = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=message):
        DiLoCo(sgd([x]), collective=LocalSwarm(1).collectives[0], **options)
