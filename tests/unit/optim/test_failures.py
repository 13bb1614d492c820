"""Failed and missed rounds, broken values and restarts: none of them stops a strategy or loses what it holds."""

import math
from copy import deepcopy
from functools import partial
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
    QuadraticSync,
    RoundReport,
    SyncedOptimizer,
)
from swarmkit.optim.compression import CODECS, CompressedAveraging, make_codec
from swarmkit.optim.snapshot import digest_tensors
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import (
    STRATEGIES,
    Faulty,
    Make,
    Net,
    adamw,
    all_reduce,
    diloco,
    local_sgd,
    loss_of,
    same,
    sgd,
    train,
    trained,
)

every_strategy = pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)


def averaging(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
    return DiLoCo(adamw(parameters), collective=collective, sync=Every(4), outer_lr=1.0, outer_momentum=0.0)


def alone() -> LocalCollective:
    return LocalSwarm(1).collectives[0]


def run_with_failures(make: Make, failing: set[int], steps: int, replicas: int = 2) -> list[Any]:
    def task(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer, list[RoundReport]]:
        net = Net(dtype=torch.float64)
        optimizer = make(list(net.parameters()), Faulty(collective, failing))
        reports: list[RoundReport] = []
        optimizer.on_round.append(reports.append)
        train(net, optimizer, rank, range(steps))
        return net, optimizer, reports

    return LocalSwarm(replicas).run(task)


@pytest.mark.parametrize("kind", [local_sgd, diloco], ids=["LocalSGD", "DiLoCo"])
def test_a_failed_round_keeps_the_work_and_the_next_one_takes_it(kind: Any) -> None:
    failed = run_with_failures(partial(kind, h=3), {0}, 6)
    undisturbed = run_with_failures(partial(kind, h=6), set(), 6)
    for (net, optimizer, reports), (reference, _, _) in zip(failed, undisturbed, strict=True):
        # A window whose round failed and the next one are one window of twice the length.
        assert same(net, reference)
        assert [report.failed for report in reports] == ["the line was cut", None]
        assert [report.weight for report in reports] == [3, 6]
        assert not optimizer.needs_state


def test_gradients_of_a_failed_round_are_averaged_into_the_next_by_weight() -> None:
    def make(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        return AllReduce(sgd(parameters), collective=collective)

    reference = Net(dtype=torch.float64)
    plain = sgd(list(reference.parameters()))
    plain.zero_grad()
    # No step was taken after the failed round, so both steps' gradients are of the same parameters.
    torch.stack([loss_of(reference, rank, step) for rank in range(2) for step in range(2)]).mean().backward()
    plain.step()
    for net, _, reports in run_with_failures(make, {0}, 2):
        for a, b in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        assert [report.weight for report in reports] == [1, 2]


def test_a_gradient_that_only_the_failed_round_had_still_counts() -> None:
    def task(collective: LocalCollective, rank: int) -> Tensor:
        x = torch.nn.Parameter(torch.zeros(2))
        optimizer = AllReduce(sgd([x], lr=1.0), collective=Faulty(collective, {0}))
        x.grad = torch.ones(2)
        optimizer.step()
        x.grad = None
        optimizer.step()
        return x.detach()

    for x in LocalSwarm(2).run(task):
        assert x.tolist() == [-0.5, -0.5]


@every_strategy
def test_nothing_of_a_failed_round_is_applied(make: Make) -> None:
    ((_, optimizer, _), _) = run_with_failures(make, {0, 1, 2, 3, 4, 5, 6, 7}, 8)
    assert torch.equal(optimizer.anchor()["parameter0"], Net(dtype=torch.float64).first.weight)


@pytest.mark.parametrize("kind", [local_sgd, diloco], ids=["LocalSGD", "DiLoCo"])
def test_what_a_failed_last_round_did_not_take_is_offered_again_by_finish(kind: Make) -> None:
    def task(collective: LocalCollective, rank: int) -> tuple[Net, list[RoundReport]]:
        net = Net(dtype=torch.float64)
        optimizer = kind(list(net.parameters()), Faulty(collective, {1}))
        reports: list[RoundReport] = []
        optimizer.on_round.append(reports.append)
        train(net, optimizer, rank, range(8))
        optimizer.finish()
        optimizer.finish()
        return net, reports

    undisturbed = run_with_failures(kind, set(), 8)
    for (net, reports), (reference, _, _) in zip(LocalSwarm(2).run(task), undisturbed, strict=True):
        assert same(net, reference)
        assert [(report.round, report.failed) for report in reports] == [(0, None), (1, "the line was cut"), (2, None)]


@every_strategy
def test_a_peer_that_was_left_behind_offers_nothing_at_the_end(make: Make) -> None:
    net = Net()
    optimizer = make(list(net.parameters()), Faulty(alone(), {0}, missed=True))
    train(net, optimizer, 0, range(4))
    rounds = optimizer.round
    optimizer.finish()
    assert optimizer.round == rounds


@every_strategy
def test_a_missed_round_asks_for_the_state(make: Make) -> None:
    net = Net()
    optimizer = make(list(net.parameters()), Faulty(alone(), {0}, missed=True))
    train(net, optimizer, 0, range(4))
    assert optimizer.needs_state
    optimizer.load_snapshot(*optimizer.snapshot())
    assert not optimizer.needs_state


@every_strategy
def test_a_peer_that_comes_too_late_misses_the_round(make: Make) -> None:
    swarm = LocalSwarm(1)
    net = Net()
    train(net, make(list(net.parameters()), swarm.collectives[0]), 0, range(4))
    late_net = Net()
    late = make(list(late_net.parameters()), swarm.revive("local1"))
    train(late_net, late, 1, range(1 if make is all_reduce else 4))
    assert late.last_report is not None
    assert late.last_report.missed
    assert late.needs_state


def nan_on_rank_1(make: Make, at: int, steps: int) -> list[tuple[Net, SyncedOptimizer, list[RoundReport]]]:
    def task(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer, list[RoundReport]]:
        net = Net()
        optimizer = make(list(net.parameters()), collective)
        reports: list[RoundReport] = []
        optimizer.on_round.append(reports.append)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            if (rank, step) == (1, at):
                assert net.first.weight.grad is not None
                net.first.weight.grad[0, 0] = math.nan
            optimizer.step()
        return net, optimizer, reports

    return LocalSwarm(2).run(task)


@every_strategy
def test_a_nan_on_one_peer_contributes_nothing_and_heals(make: Make) -> None:
    first = 1 if make is all_reduce else 4
    (net, _, _), (broken, _, reports) = nan_on_rank_1(make, 0, first)
    ((reference, _),) = trained(make, replicas=1, steps=first)
    assert same(net, reference)  # as if the other had not been there
    assert same(broken, reference)
    assert reports[0].weight == 0
    assert reports[0].failed is not None
    assert "local1 are not finite" in reports[0].failed

    (net, _, _), (broken, optimizer, reports) = nan_on_rank_1(make, 0, 12)
    assert same(net, broken)
    assert all(torch.isfinite(p).all() for p in broken.parameters())
    # The moments of AdamW held the NaN too, and would have put it back in the next step.
    assert all(report.weight > 0 for report in reports[1:])
    assert all(torch.isfinite(value).all() for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("kind", [local_sgd, diloco], ids=["LocalSGD", "DiLoCo"])
def test_a_nan_on_the_only_peer_costs_it_the_window_and_no_more(kind: Make) -> None:
    net = Net()
    optimizer = kind(list(net.parameters()), alone())
    reports: list[RoundReport] = []
    optimizer.on_round.append(reports.append)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(net, 0, step).backward()
        if step == 2:
            net.second.weight.grad = torch.full_like(net.second.weight, math.nan)
        optimizer.step()
        if step == 3:
            assert same(net, Net())
    assert reports[0].failed is not None
    assert "not finite" in reports[0].failed
    assert reports[1].failed is None
    assert all(torch.isfinite(p).all() for p in net.parameters())


# -- resuming ----------------------------------------------------------------------------------------------------------


def momentum_sgd(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
    inner = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return DiLoCo(inner, collective=collective, sync=Every(4), outer_momentum=0.8)


RESUMED: dict[str, Make] = STRATEGIES | {"averaging": averaging, "DiLoCo over momentum SGD": momentum_sgd}


@pytest.mark.parametrize("make", RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_resumes_bit_for_bit_amid_a_window(make: Make, dtype: torch.dtype) -> None:
    half = [deepcopy((n.state_dict(), o.state_dict())) for n, o in trained(make, replicas=2, steps=10, dtype=dtype)]

    def task(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer]:
        net = Net(seed=4, dtype=dtype)
        optimizer = make(list(net.parameters()), collective)
        net.load_state_dict(half[rank][0])
        optimizer.load_state_dict(half[rank][1])
        train(net, optimizer, rank, range(10, 20))
        return net, optimizer

    whole = trained(make, replicas=2, steps=20, dtype=dtype)
    for (net, optimizer), (reference, uninterrupted) in zip(LocalSwarm(2).run(task), whole, strict=True):
        assert same(net, reference)
        assert (optimizer.step_count, optimizer.round) == (20, uninterrupted.round)
        found, expected = optimizer.snapshot(), uninterrupted.snapshot()
        assert digest_tensors(found[0]) == digest_tensors(expected[0])  # anchor, momentum and inner state
        assert found[1] == expected[1]


def test_gradients_kept_from_a_failed_round_are_resumed() -> None:
    def task(collective: LocalCollective, rank: int) -> Net:
        net = Net()
        optimizer = all_reduce(list(net.parameters()), Faulty(collective, {1}))
        train(net, optimizer, rank, range(2))
        saved = deepcopy((net.state_dict(), optimizer.state_dict()))
        resumed = Net(seed=8)
        optimizer = all_reduce(list(resumed.parameters()), Faulty(collective, set()))
        resumed.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(resumed, optimizer, rank, range(2, 6))
        return resumed

    uninterrupted = run_kept()
    for net, reference in zip(LocalSwarm(2).run(task), uninterrupted, strict=True):
        assert same(net, reference)


def run_kept() -> list[Net]:
    def task(collective: LocalCollective, rank: int) -> Net:
        net = Net()
        optimizer = all_reduce(list(net.parameters()), Faulty(collective, {1}))
        train(net, optimizer, rank, range(6))
        return net

    return LocalSwarm(2).run(task)


@every_strategy
def test_a_state_of_other_parameters_is_refused(make: Make) -> None:
    optimizer = make(list(Net().parameters()), alone())
    other = make([torch.nn.Parameter(torch.ones(2))], alone())
    with pytest.raises(ValueError, match="1 parameters"):
        optimizer.load_state_dict(other.state_dict())


@every_strategy
def test_a_state_has_the_keys_of_the_inner_optimizer_s_own(make: Make) -> None:
    ((net, optimizer),) = trained(make, replicas=1, steps=4)
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups", "synced"}
    bare = adamw(list(net.parameters()))
    bare.load_state_dict(state)  # what torch's own tools would do with it
    assert torch.equal(bare.state[net.first.weight]["exp_avg"], optimizer.state[net.first.weight]["exp_avg"])
    with pytest.raises(ValueError, match="bare optimizer"):
        optimizer.load_state_dict(bare.state_dict())


@pytest.mark.parametrize("counted", [True, False], ids=["samples", "steps"])
def test_a_resumed_window_weighs_as_much_as_an_uninterrupted_one(counted: bool) -> None:
    net = Net()
    optimizer = local_sgd(list(net.parameters()), alone())
    for step in range(3):
        optimizer.samples += 16 * counted
        train(net, optimizer, 0, range(step, step + 1))
    resumed = local_sgd(list(net.parameters()), alone())
    resumed.load_state_dict(optimizer.state_dict())
    resumed.samples += 16 * counted
    train(net, resumed, 0, range(3, 4))
    assert resumed.last_report is not None
    assert resumed.last_report.weight == (64 if counted else 4)
    assert resumed.last_report.window == 4


def test_a_peer_that_was_left_behind_is_so_after_a_restart() -> None:
    optimizer = local_sgd(list(Net().parameters()), Faulty(alone(), {0}, missed=True))
    for _ in range(4):
        optimizer.step()
    resumed = local_sgd(list(Net().parameters()), alone())
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.needs_state


def test_a_resumed_window_keeps_its_length_whatever_the_learning_rate_has_become() -> None:
    def make(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        sync = QuadraticSync(alpha=0.1, h_base=2, total_steps=100)
        return LocalSGD(adamw(parameters, lr=0.05), collective=collective, sync=sync)

    net = Net()
    optimizer = make(list(net.parameters()), alone())
    train(net, optimizer, 0, range(2))
    optimizer.param_groups[0]["lr"] = 0.01  # would make a window of 100 steps, but this one has 4
    resumed = make(list(net.parameters()), alone())
    resumed.load_state_dict(optimizer.state_dict())
    train(net, resumed, 0, range(2, 4))
    assert resumed.last_report is not None
    assert resumed.last_report.window == 4


@pytest.mark.parametrize("codec", [name for name in CODECS if make_codec(name).contractive])
def test_what_overflows_only_with_the_kept_error_does_not_end_training(codec: str) -> None:
    """Gradients of 2e38 fit float32; what a codec left of one, added to the next, does not."""

    def task(collective: LocalCollective, rank: int) -> list[RoundReport]:
        net, reports = Net(), []
        averaging = CompressedAveraging(make_codec(codec, min_size=1), collective, error_feedback=True)
        optimizer = AllReduce(adamw(list(net.parameters())), collective=collective, averaging=averaging)
        optimizer.on_round.append(reports.append)
        for _ in range(4):
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, 2e38)
                parameter.grad.view(-1)[::2] = 1e20
            optimizer.step()
        return reports

    for reports in LocalSwarm(2).run(task):
        assert [report.round for report in reports] == sorted(report.round for report in reports)
        assert len(reports) == 4
