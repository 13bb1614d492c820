"""SyncedOptimizer is an ordinary optimizer, and neither failed rounds nor broken values stop it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmkit.optim import (
    AllReduce,
    Collective,
    DiLoCo,
    Every,
    LocalSGD,
    RoundReport,
    SyncedOptimizer,
    parameter_names,
)
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import (
    STRATEGIES,
    Make,
    Net,
    adamw,
    all_reduce,
    local_sgd,
    loss_of,
    same,
    train,
    trained,
)

every_strategy = pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)


def averaging(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
    return DiLoCo(adamw(parameters), collective=collective, sync=Every(4), outer_lr=1.0, outer_momentum=0.0)


# One peer of these equals its inner optimizer bit for bit, so whatever torch offers can be compared.
transparent = pytest.mark.parametrize(
    "make", [all_reduce, local_sgd, averaging], ids=["AllReduce", "LocalSGD", "averaging"]
)


def alone() -> LocalCollective:
    return LocalSwarm(1).collectives[0]


# -- an ordinary optimizer ---------------------------------------------------------------------------------------------


@transparent
@pytest.mark.parametrize("wrapped", [True, False], ids=["of the wrapper", "of the inner optimizer"])
def test_learning_rate_schedulers_work_as_on_the_inner_optimizer(make: Make, wrapped: bool) -> None:
    def run(net: Net, optimizer: torch.optim.Optimizer, scheduled: torch.optim.Optimizer) -> list[float]:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(scheduled, max_lr=0.1, total_steps=12)
        rates = []
        for step in range(11):
            train(net, optimizer, 0, range(step, step + 1))
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    reference, net = Net(), Net()
    plain = adamw(list(reference.parameters()))
    optimizer = make(list(net.parameters()), alone())
    # A scheduler of the inner optimizer counts the inner steps, so both ways are silent.
    assert run(net, optimizer, optimizer if wrapped else optimizer.inner) == run(reference, plain, plain)
    assert same(net, reference)


@transparent
def test_closures_return_their_loss(make: Make) -> None:
    reference, net = Net(), Net()
    plain, optimizer = adamw(list(reference.parameters())), make(list(net.parameters()), alone())

    def losses(model: Net, stepped: torch.optim.Optimizer) -> list[float]:
        found = []
        for step in range(9):

            def closure(step: int = step) -> float:
                stepped.zero_grad()
                loss = loss_of(model, 0, step)
                loss.backward()
                return loss.item()

            found.append(float(stepped.step(closure)))  # type: ignore[arg-type]
        return found

    assert losses(net, optimizer) == losses(reference, plain)
    assert same(net, reference)


@transparent
def test_gradients_can_be_clipped(make: Make) -> None:
    reference, net = Net(), Net()
    plain, optimizer = adamw(list(reference.parameters())), make(list(net.parameters()), alone())
    for model, stepped in ((net, optimizer), (reference, plain)):
        for step in range(9):
            stepped.zero_grad()
            loss_of(model, 0, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            stepped.step()
    assert same(net, reference)


@transparent
@pytest.mark.parametrize("unscale", [True, False], ids=["unscaled by hand", "unscaled in the step"])
def test_a_grad_scaler_gives_the_unscaled_steps(make: Make, unscale: bool) -> None:
    reference, net = Net(), Net()
    train(reference, adamw(list(reference.parameters())), 0, range(9))
    optimizer = make(list(net.parameters()), alone())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(9):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, 0, step)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert same(net, reference)


@transparent
def test_a_grad_scaler_takes_parameters_of_several_dtypes_and_steps_without_gradients(make: Make) -> None:
    wide, narrow = (torch.nn.Parameter(torch.ones(3, dtype=t)) for t in (torch.float32, torch.bfloat16))
    optimizer = make([wide, narrow], alone())
    # What GradScaler sets before it calls step().
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(1), torch.tensor(1024.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(wide, torch.ones(3))
    wide.grad, narrow.grad = torch.full((3,), 512.0), torch.full((3,), 256.0, dtype=torch.bfloat16)
    optimizer.step()
    assert optimizer.state[wide]["exp_avg"].tolist() == pytest.approx([0.05] * 3)  # a tenth of the gradient
    assert optimizer.state[narrow]["exp_avg"].tolist() == pytest.approx([0.025] * 3, rel=0.01)


@every_strategy
@pytest.mark.parametrize("unscale", [True, False], ids=["unscaled by hand", "unscaled in the step"])
def test_an_overflow_on_one_peer_stops_nobody_and_reaches_nobody(make: Make, unscale: bool) -> None:
    def task(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer, float, list[RoundReport]]:
        net = Net()
        optimizer = make(list(net.parameters()), collective)
        reports: list[RoundReport] = []
        optimizer.on_round.append(reports.append)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(net, rank, step)
            scaler.scale(loss * math.inf if (rank, step) == (1, 2) else loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return net, optimizer, scaler.get_scale(), reports

    found = LocalSwarm(2).run(task)
    assert [scale for _, _, scale, _ in found] == [2.0**10, 2.0**9]
    assert same(found[0][0], found[1][0])
    assert all(torch.isfinite(p).all() for net, *_ in found for p in net.parameters())
    assert {optimizer.step_count for _, optimizer, _, _ in found} == {8}
    assert all(report.failed is None for report in found[0][3])
    if make is all_reduce:
        assert [report.weight for report in found[1][3]] == [1, 1, 0, 1, 1, 1, 1, 1]


@every_strategy
def test_every_group_keeps_its_own_settings(make: Make) -> None:
    def run(net: Net, optimizer: torch.optim.Optimizer) -> None:
        train(net, optimizer, 0, range(8))

    net = Net()
    groups: Any = [
        {"params": list(net.first.parameters()), "lr": 0.0, "weight_decay": 0.0},
        {"params": list(net.second.parameters()), "lr": 0.05},
    ]
    optimizer = make(groups, alone())
    before = Net()
    run(net, optimizer)
    assert len(optimizer.param_groups) == 2
    assert same(net.first, before.first)
    assert not same(net.second, before.second)


@every_strategy
def test_frozen_parameters_are_not_sent_and_stay_bit_for_bit(make: Make) -> None:
    def task(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer]:
        net = Net(dtype=torch.float64)
        net.first.requires_grad_(False)
        with torch.no_grad():
            net.first.weight.add_(rank)  # would be averaged if it were sent
        optimizer = make(list(net.parameters()), collective)
        train(net, optimizer, rank, range(8))
        return net, optimizer

    for rank, (net, optimizer) in enumerate(LocalSwarm(2).run(task)):
        expected = Net(dtype=torch.float64).first
        with torch.no_grad():
            expected.weight.add_(rank)
        assert same(net.first, expected)
        assert len(optimizer.anchor()) == 2
        assert optimizer.last_report is not None
        # Two peers send what they hold once: 27 numbers, and AllReduce a float32 for each of the two parameters.
        assert optimizer.last_report.bytes_sent == 27 * 8 + (8 if make is all_reduce else 0)


@every_strategy
def test_bfloat16_parameters_have_a_float32_anchor(make: Make) -> None:
    for net, optimizer in trained(make, replicas=2, steps=8, dtype=torch.bfloat16):
        for parameter, anchor in zip(net.parameters(), optimizer.anchor().values(), strict=True):
            assert parameter.dtype is torch.bfloat16
            # Where parameters move in rounds only, they are their own anchor.
            assert anchor.dtype is (torch.bfloat16 if isinstance(optimizer, AllReduce) else torch.float32)
            assert torch.equal(parameter, anchor.to(torch.bfloat16))


@every_strategy
def test_dtypes_may_be_mixed(make: Make) -> None:
    def task(collective: LocalCollective, rank: int) -> list[Tensor]:
        parameters = [torch.nn.Parameter(torch.ones(3, dtype=t)) for t in (torch.bfloat16, torch.float32)]
        optimizer = make(list(parameters), collective)
        for _ in range(8):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, rank + 1.0)
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    left, right = LocalSwarm(2).run(task)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Tied(torch.nn.Module):
    """The output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.output = torch.nn.Linear(4, 5, bias=False)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.linspace(-1, 1, 20).view(5, 4))
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.output(self.embedding(tokens))
        return found


@every_strategy
def test_tied_weights_are_sent_once_and_stay_tied(make: Make) -> None:
    def task(collective: LocalCollective, rank: int) -> tuple[Tied, SyncedOptimizer]:
        model = Tied()
        optimizer = make(list(model.parameters()), collective)
        for _ in range(8):
            optimizer.zero_grad()
            tokens = torch.tensor([rank, rank + 1])
            torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
        return model, optimizer

    (left, optimizer), (right, _) = LocalSwarm(2).run(task)
    assert left.embedding.weight is left.output.weight
    assert torch.equal(left.embedding.weight, right.embedding.weight)
    assert len(optimizer.anchor()) == 1
    assert list(parameter_names(left).values()) == ["embedding.weight"]


@transparent
def test_parameters_without_a_gradient_are_left_alone(make: Make) -> None:
    net, reference = Net(), Net()
    plain, optimizer = adamw(list(reference.parameters())), make(list(net.parameters()), alone())
    for model, stepped in ((net, optimizer), (reference, plain)):
        for step in range(8):
            stepped.zero_grad()
            loss_of(model, 0, step).backward()
            model.first.bias.grad = None
            stepped.step()
    assert same(net, reference)
    assert torch.equal(net.first.bias, Net().first.bias)


@every_strategy
def test_a_parameter_group_can_be_added_before_the_first_step_only(make: Make) -> None:
    def task(collective: LocalCollective, rank: int) -> Net:
        net = Net()
        optimizer = make(list(net.first.parameters()), collective)
        optimizer.add_param_group({"params": list(net.second.parameters()), "lr": 0.01})
        assert len(optimizer.anchor()) == 4
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
        train(net, optimizer, rank, range(8))
        with pytest.raises(ValueError, match="before the first step"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        return net

    left, right = LocalSwarm(2).run(task)
    assert same(left, right)
    assert not same(left.second, Net().second)


@every_strategy
def test_offload_to_the_cpu_changes_no_bit(make: Make) -> None:
    def offloaded(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        inner = adamw(parameters)
        if make is all_reduce:
            return AllReduce(inner, collective=collective, offload="cpu")
        kind = LocalSGD if make is local_sgd else DiLoCo
        return kind(inner, collective=collective, sync=Every(4), offload="cpu")

    ((net, optimizer), _) = trained(offloaded, replicas=2, steps=8)
    ((reference, _), _) = trained(make, replicas=2, steps=8)
    assert same(net, reference)
    assert {anchor.device.type for anchor in optimizer.anchor().values()} == {"cpu"}


# -- reports -----------------------------------------------------------------------------------------------------------


@every_strategy
def test_every_round_is_reported_with_its_members_weights_and_bytes(make: Make) -> None:
    def task(collective: LocalCollective, rank: int) -> list[RoundReport]:
        net = Net()
        optimizer = make(list(net.parameters()), collective)
        reports: list[RoundReport] = []
        optimizer.on_round.append(reports.append)
        for step in range(8):
            optimizer.samples += 16
            train(net, optimizer, rank, range(step, step + 1))
        assert optimizer.last_report is reports[-1]
        return reports

    h = 1 if make is all_reduce else 4
    for reports in LocalSwarm(2).run(task):
        assert [report.round for report in reports] == list(range(8 // h))
        assert [report.step for report in reports] == list(range(h, 9, h))
        for report in reports:
            assert report.window == h
            assert report.members == ("local0", "local1")
            assert report.weight == 16 * h
            assert report.bytes_sent == report.bytes_received > 0
            assert 0 <= report.waited <= report.seconds
            assert report.pseudo_gradient_norm > 0
            assert report.failed is None
            assert not report.missed


def test_without_counted_samples_a_peer_weighs_its_steps() -> None:
    ((_, optimizer), _) = trained(local_sgd, replicas=2, steps=8)
    assert optimizer.last_report is not None
    assert optimizer.last_report.weight == 4


def test_finish_synchronises_what_the_running_window_holds_and_only_once() -> None:
    def task(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer]:
        net = Net()
        optimizer = local_sgd(list(net.parameters()), collective)
        train(net, optimizer, rank, range(6))
        optimizer.finish()
        assert optimizer.last_report is not None
        assert (optimizer.last_report.window, optimizer.round) == (2, 2)
        optimizer.finish()
        assert optimizer.round == 2
        return net, optimizer

    (left, _), (right, _) = LocalSwarm(2).run(task)
    assert same(left, right)


@pytest.mark.parametrize("make", [LocalSGD, DiLoCo, AllReduce])
def test_replicas_that_begin_with_different_parameters_do_not_meet(make: type[SyncedOptimizer]) -> None:
    def replica(collective: LocalCollective, rank: int) -> RoundReport:
        model = torch.nn.Linear(3, 3)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, float(rank == 2))
        optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1), collective=collective)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        assert optimizer.last_report is not None
        return optimizer.last_report

    reports = LocalSwarm(3, round_timeout=5.0).run(replica)
    assert [len(report.members) for report in reports] == [2, 2, 0]
    assert [report.missed for report in reports] == [False, False, True]
