"""A replica that missed rounds brings in what it did meanwhile, discounted by how long ago it began."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swarmkit.optim import AllReduce, Collective, DiLoCo, Every, LocalSGD, SyncedOptimizer
from swarmkit.optim.compression import CompressedAveraging, make_codec
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import Faulty, sgd

H = 4
Make = Callable[[list[Tensor], Collective], SyncedOptimizer]


def local_sgd(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
    return LocalSGD(sgd(parameters, lr=1.0), collective=collective, sync=Every(H))


def diloco(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
    outer = {"outer_lr": 1.0, "outer_momentum": 0.5, "nesterov": False}
    return DiLoCo(sgd(parameters, lr=1.0), collective=collective, sync=Every(H), **outer)


def step(x: torch.nn.Parameter, optimizer: SyncedOptimizer, by: float) -> None:
    """Move the parameters by so much."""
    x.grad = torch.full_like(x, -by)
    optimizer.samples += 10
    optimizer.step()


def fresh(make: Make, collective: Collective, start: float = 0.0) -> tuple[torch.nn.Parameter, SyncedOptimizer]:
    x = torch.nn.Parameter(torch.full((3,), start, dtype=torch.float64))
    return x, make([x], collective)


def ahead(make: Make, rounds: int) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The snapshot of a replica that began elsewhere and went on alone for so many rounds, by 1 a step."""

    def task(collective: LocalCollective, _: int) -> tuple[dict[str, Tensor], dict[str, object]]:
        x, optimizer = fresh(make, collective, start=1.0)
        for _ in range(H * rounds):
            step(x, optimizer, 1.0)
        return optimizer.snapshot()

    return LocalSwarm(1).run(task)[0]


@pytest.mark.parametrize("missed", [0, 1, 3])
@pytest.mark.parametrize("make", [local_sgd, diloco])
def test_work_since_an_anchor_of_k_rounds_ago_counts_for_one_in_k_plus_one(make: Make, missed: int) -> None:
    """Both begin alike and close round 0 alike; one goes on for `missed` rounds, the other does three steps."""

    def task(collective: LocalCollective, _: int) -> None:
        x, optimizer = fresh(make, collective)
        for _ in range(H):
            step(x, optimizer, 1.0)
        state = optimizer.snapshot()
        for _ in range(3):
            step(x, optimizer, 7.0)
        # Replicas of one process: the others' rounds, from the same past.
        y, others = fresh(make, collective)
        others.load_snapshot(*state)
        for _ in range(H * missed):
            step(y, others, 1.0)
        tensors, meta = others.snapshot()
        share = optimizer.rejoin(tensors, meta)
        assert share == pytest.approx(1 / (1 + missed))
        assert optimizer.digest() == others.digest()
        assert optimizer.round == others.round
        torch.testing.assert_close(x.detach(), y.detach() + share * 21.0)
        samples, steps = optimizer._unsent()
        assert samples == pytest.approx(30 * share)
        assert steps == max(1, round(3 * share))
        reports = []
        optimizer.on_round.append(reports.append)
        optimizer.observe_round(contribute=True)
        assert reports[0].weight == pytest.approx(30 * share)
        assert reports[0].pseudo_gradient_norm == pytest.approx(share * 21.0 * 3**0.5)

    LocalSwarm(1).run(task)


@pytest.mark.parametrize("make", [local_sgd, diloco])
def test_work_of_another_past_is_dropped(make: Make) -> None:
    def task(collective: LocalCollective, _: int) -> None:
        x, optimizer = fresh(make, collective)
        for _ in range(H + 2):
            step(x, optimizer, 1.5)
        tensors, meta = ahead(make, rounds=3)
        assert optimizer.rejoin(tensors, meta) == 0.0
        torch.testing.assert_close(x.detach(), tensors["anchor/parameter0"])
        assert optimizer._unsent() == (0.0, 0)

    LocalSwarm(1).run(task)


def test_strategies_that_cannot_take_work_along_fetch() -> None:
    def eager(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        return DiLoCo(sgd(parameters), collective=collective, sync=Every(H), eager=True)

    def every_step(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        return AllReduce(sgd(parameters), collective=collective)

    for make in (eager, every_step):

        def task(collective: LocalCollective, _: int, make: Make = make) -> None:
            x, optimizer = fresh(make, collective)
            for _ in range(H + 1):
                step(x, optimizer, 1.0)
            assert optimizer.rejoin(*optimizer.snapshot()) == 0.0

        LocalSwarm(1).run(task)


@pytest.mark.parametrize("ancestors", ["no list", [1, 2], ["x" * 65], ["a"] * 17])
def test_ancestors_of_a_stranger_are_checked(ancestors: object) -> None:
    def task(collective: LocalCollective, _: int) -> None:
        _, optimizer = fresh(local_sgd, collective)
        tensors, meta = optimizer.snapshot()
        with pytest.raises(ValueError, match=r"ancestors|lineage"):
            optimizer.load_snapshot(tensors, {**meta, "ancestors": ancestors})

    LocalSwarm(1).run(task)


def test_what_a_codec_would_leave_out_is_not_said_to_be_kept() -> None:
    """PowerSGD's bases are those of the last round: who missed it has to observe one before it can contribute."""

    def powersgd(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        codec = make_codec("powersgd", rank=1, min_size=1)
        averaging = CompressedAveraging(codec, collective, error_feedback=True)
        return LocalSGD(sgd(parameters, lr=1.0), collective=collective, sync=Every(H), averaging=averaging)

    def task(collective: LocalCollective, _: int) -> None:
        x = torch.nn.Parameter(torch.zeros(4, 4))
        optimizer = powersgd([x], Faulty(collective, {1}, missed=True))
        for _ in range(H):
            step(x, optimizer, 1.0)
        tensors, meta = optimizer.snapshot()
        for _ in range(H):
            step(x, optimizer, 1.0)
        assert optimizer.needs_state
        step(x, optimizer, 1.0)
        assert optimizer.rejoin(tensors, meta) == 0.0
        assert [tensor for name, tensor in tensors.items() if name.startswith("anchor/")][0].equal(x)
        assert optimizer.samples == 0.0

    LocalSwarm(1).run(task)
