"""Rounds in flight: what they hide, what they survive, and what all members share meanwhile."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmkit.optim import CO2, AllReduce, DiLoCo, Every, LocalSGD, Pending, RoundKey, RoundReport, SyncedOptimizer
from swarmkit.optim.overlapped import OverlappedOptimizer
from swarmkit.optim.snapshot import digest_tensors
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.flying import ALL, EAGER, everyone, hidden, of, same_as_anchor
from tests.unit.optim.replicas import Make, Net, batch, loss_of, same, sgd, train, trained
from tests.unit.optim.rounding import Rounding
from tests.unit.optim.simulated import Clock, SimulatedCollective

# -- what is hidden ----------------------------------------------------------------------------------------------------


def utilisation(make: Any, *, seconds: float, windows: int = 64, h: int = 4) -> tuple[float, list[RoundReport]]:
    """Share of the time in which the peer computed, when a step takes a second and a round so many."""
    clock = Clock()
    net = Net()
    optimizer = make(list(net.parameters()), SimulatedCollective(clock, seconds), h=h, clock=clock)
    reports: list[RoundReport] = []
    optimizer.on_round.append(reports.append)
    for step in range(windows * h):
        optimizer.zero_grad()
        loss_of(net, 0, step % 8).backward()
        clock.now += 1
        optimizer.step()
    optimizer.finish()
    return windows * h / clock.now, reports


@hidden
def test_a_collective_as_slow_as_a_window_is_hidden_behind_the_next_one(make: Any) -> None:
    share, reports = utilisation(make, seconds=4.0)
    assert share >= 0.95
    inner = reports[1:-1]  # the first may be waited for and the last is drained
    assert {report.overlap for report in inner} == {1.0}
    assert {report.exposed for report in inner} == {0.0}
    assert reports[-1].exposed == 4.0
    assert (reports[-1].overlap, len(reports)) == (0.0, 64)


def test_blocking_rounds_as_slow_as_a_window_take_half_of_the_time() -> None:
    share, reports = utilisation(ALL["blocking"], seconds=4.0)
    assert share == pytest.approx(0.5)
    assert {(report.overlap, report.exposed) for report in reports} == {(0.0, 4.0)}


@dataclass
class Slow(Rounding):
    """A codec that takes a quarter of a second to encode."""

    clock: Clock = field(default_factory=Clock)

    def begin(
        self, tensors: Sequence[Tensor], exact: Sequence[Tensor] = (), *, round: RoundKey, weight: float
    ) -> Pending:
        self.clock.now += 0.25
        return super().begin(tensors, exact, round=round, weight=weight)


@pytest.mark.parametrize(
    ("kind", "options", "waited"),
    [
        (LocalSGD, {}, 4.0),
        (AllReduce, {}, 4.0),
        (DiLoCo, {}, 4.0),
        (DiLoCo, {"eager": True}, 0.0),
        (DiLoCo, {"overlap_steps": 1}, 3.0),
        (CO2, {}, 0.0),
    ],
)
def test_encoding_is_told_as_time_that_training_stood_still(kind: Any, options: dict[str, Any], waited: float) -> None:
    clock = Clock()
    collective = SimulatedCollective(clock, 4.0)
    averaging = Slow(collective, clock=clock)
    window = {} if kind is AllReduce else {"sync": Every(4)}
    net = Net()
    optimizer = kind(
        sgd(list(net.parameters())), collective=collective, averaging=averaging, clock=clock, **window, **options
    )
    reports: list[RoundReport] = []
    optimizer.on_round.append(reports.append)
    for step in range(24):
        loss_of(net, 0, step).backward()
        clock.now += 1
        optimizer.step()
    inner = reports[1:]  # the first may be waited for
    assert len(inner) >= 4
    assert {(report.exposed, report.overlap) for report in inner} == {(0.25 + waited, 1 - waited / 4)}


@hidden
def test_of_a_round_twice_as_slow_as_a_window_half_is_hidden(make: Any) -> None:
    share, reports = utilisation(make, seconds=8.0)
    assert share == pytest.approx(0.5, abs=0.02)
    assert {report.overlap for report in reports[1:-1]} == {0.5}


def test_streaming_hides_as_many_steps_as_it_is_told_and_sends_one_fragment_at_a_time() -> None:
    clock = Clock()
    net = Net()
    collective = SimulatedCollective(clock, 3.0)
    optimizer = of(
        DiLoCo, list(net.parameters()), collective, h=8, fragments=2, overlap_steps=2, mixing=0.5, clock=clock
    )
    reports: list[RoundReport] = []
    optimizer.on_round.append(reports.append)
    for step in range(64):
        optimizer.zero_grad()
        loss_of(net, 0, step).backward()
        clock.now += 1
        optimizer.step()
    assert [report.overlap for report in reports] == pytest.approx([2 / 3] * len(reports))
    assert collective.most_at_once == 1


def test_eager_fragments_spread_the_traffic_and_hide_it() -> None:
    share, reports = utilisation(partial(of, DiLoCo, fragments=2, eager=True), seconds=3.9, h=8)
    assert share >= 0.95
    assert {report.overlap for report in reports[2:-2]} == {1.0}


# -- rounds that fail --------------------------------------------------------------------------------------------------


def simulated(
    make: Any, failing: list[int], steps: int, missed: bool = False, finish: bool = False
) -> tuple[Net, OverlappedOptimizer, SimulatedCollective, list[RoundReport]]:
    net = Net(dtype=torch.float64)
    collective = SimulatedCollective(Clock(), 1.0, failing=failing, missed=missed)
    optimizer = make(list(net.parameters()), collective)
    reports: list[RoundReport] = []
    optimizer.on_round.append(reports.append)
    train(net, optimizer, 0, range(steps))
    if finish:
        optimizer.finish()
    return net, optimizer, collective, reports


@everyone
def test_nothing_of_failed_rounds_is_applied_and_none_of_them_raises(make: Any) -> None:
    _, optimizer, _, reports = simulated(make, list(range(40)), 24, finish=True)
    reference = Net(dtype=torch.float64)
    for held, parameter in zip(optimizer.anchor().values(), reference.parameters(), strict=True):
        assert torch.equal(held, parameter)
    assert {report.failed for report in reports} == {"the line was cut"}
    assert optimizer.round == len(reports)


@hidden
def test_the_contribution_of_a_failed_round_is_offered_again_with_the_next(make: Any) -> None:
    net, optimizer, collective, reports = simulated(make, [1], 16, finish=True)
    n = len(list(net.parameters()))
    offered = [(weight, tensors[:n]) for _, weight, tensors in collective.offered]
    # Rounds 0, 1 and 2 have 4 steps each; when round 2 begins round 1 is known to have failed.
    assert [weight for weight, _ in offered[:4]] == [4, 4, 8, 4]
    assert [report.failed is None for report in reports] == [True, False, True, True]
    reference = [torch.zeros_like(t) for t in offered[0][1]]
    for _, tensors in (offered[0], offered[2], offered[3]):
        torch._foreach_add_(reference, tensors)
    kept = offered[1][1]
    assert all(not torch.equal(a, b) for a, b in zip(kept, offered[2][1], strict=True))


@settings(max_examples=60, deadline=None)
@given(
    failing=st.sets(st.integers(0, 3)),
    options=st.sampled_from([{"eager": True}, {"eager": "delayed"}, {"overlap_steps": 2, "mixing": 1.0}, {}]),
    fragments=st.integers(1, 2),
    steps=st.integers(18, 26),
)
def test_work_survives_failed_flights_whole(
    failing: set[int], options: dict[str, Any], fragments: int, steps: int
) -> None:
    # Linear losses and plain means: every step counts once, whatever failed on the way. (A mixing factor below 1 gives
    # up steps that were taken during a flight, by intention.)
    xs = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2)]
    optimizer = DiLoCo(
        sgd(xs),
        collective=SimulatedCollective(Clock(), 1.0, failing=sorted(failing)),
        sync=Every(4),
        outer_lr=1.0,
        outer_momentum=0.0,
        fragments=fragments,
        **options,
    )
    for step in range(steps):
        for x in xs:
            x.grad = torch.full_like(x, step + 1.0)
        optimizer.step()
    optimizer.finish()
    expected = torch.full((2,), -0.1 * sum(range(1, steps + 1)), dtype=torch.float64)
    for x in xs:
        torch.testing.assert_close(x.detach(), expected, rtol=0, atol=1e-12)


def test_a_last_round_that_failed_is_offered_again_by_finish() -> None:
    net, optimizer, collective, reports = simulated(EAGER["eager"], [3], 16)
    optimizer.finish()
    assert [report.failed is None for report in reports] == [True, True, True, False, True]
    assert [report.weight for report in reports] == [4] * 5
    assert same_as_anchor(net, optimizer)
    rounds = optimizer.round
    optimizer.finish()
    assert optimizer.round == rounds
    assert len(collective.offered) == 5


@everyone
def test_a_missed_flight_asks_for_the_state_and_offers_nothing_at_the_end(make: Any) -> None:
    _, optimizer, collective, _ = simulated(make, [1], 16, missed=True)
    assert optimizer.needs_state
    offered = len(collective.offered)
    optimizer.finish()
    assert len(collective.offered) == offered
    optimizer.load_snapshot(*optimizer.snapshot())
    assert not optimizer.needs_state
    assert not optimizer._flying()


@everyone
def test_a_nan_is_never_sent_and_heals(make: Any) -> None:
    def task(collective: LocalCollective, rank: int) -> tuple[Net, OverlappedOptimizer, list[RoundReport]]:
        net = Net()
        optimizer = make(list(net.parameters()), collective)
        reports: list[RoundReport] = []
        optimizer.on_round.append(reports.append)
        for step in range(24):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            if (rank, step) == (1, 5):
                net.first.weight.grad = torch.full_like(net.first.weight, math.nan)
            optimizer.step()
        optimizer.finish()
        return net, optimizer, reports

    (net, one, _), (broken, other, reports) = LocalSwarm(2).run(task)
    assert same(net, broken)
    assert one.digest() == other.digest()
    assert all(torch.isfinite(p).all() for p in broken.parameters())
    troubled = [report for report in reports if report.failed is not None]
    assert troubled
    assert all("local1 are not finite" in str(report.failed) and report.weight == 0 for report in troubled)


# -- the shared state --------------------------------------------------------------------------------------------------


@hidden
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shared_state_is_equal_while_replicas_differ_and_all_end_on_it(make: Make, dtype: torch.dtype) -> None:
    (left, one), (right, other) = trained(make, replicas=2, steps=18, dtype=dtype)
    assert one.digest() == other.digest()
    assert not same(left, right)
    assert {held.dtype for held in one.anchor().values()} == {torch.float32}

    def task(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer]:
        net = Net(dtype=dtype)
        optimizer = make(list(net.parameters()), collective)
        train(net, optimizer, rank, range(18))
        optimizer.finish()
        assert same_as_anchor(net, optimizer)
        return net, optimizer

    (left, one), (right, other) = LocalSwarm(2).run(task)
    assert same(left, right)


def test_no_moment_shows_a_new_anchor_under_an_old_round_while_rounds_fly() -> None:
    clock = Clock()
    net = Net()
    optimizer = of(DiLoCo, list(net.parameters()), SimulatedCollective(clock, 2.5), eager=True, clock=clock)
    seen: dict[int, set[tuple[str, int, int | None]]] = {}
    for step in range(24):
        optimizer._asked = step % 3 == 0
        train(net, optimizer, 0, range(step, step + 1))
        clock.now += 1
        tensors, meta = optimizer.snapshot()
        held = {name: tensor for name, tensor in tensors.items() if name.startswith(("anchor/", "outer/"))}
        seen.setdefault(meta["round"], set()).add((digest_tensors(held), meta["step"], meta["round"] * 4))
    assert len(seen) == 6
    for states in seen.values():
        assert len(states) == 1  # one anchor, and one step that it is of
        ((_, at, expected),) = states
        assert at == expected


def test_buffers_are_averaged_through_flights() -> None:
    def task(collective: LocalCollective, rank: int) -> torch.nn.BatchNorm1d:
        model = torch.nn.BatchNorm1d(6)
        optimizer = DiLoCo(
            sgd(list(model.parameters())),
            collective=collective,
            sync=Every(2),
            eager=True,
            buffers=list(model.buffers()),
        )
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, step)[0] + rank).square().sum().backward()
            optimizer.step()
        optimizer.finish()
        return model

    first, second = LocalSwarm(2).run(task)
    assert first.running_mean is not None
    assert second.running_mean is not None
    assert torch.equal(first.running_mean, second.running_mean)
    assert float(first.running_mean.mean()) == pytest.approx(0.5 * (1 - 0.9**4), abs=0.1)


def test_training_does_not_depend_on_how_early_results_are_taken_in() -> None:
    def go(asked: bool) -> Net:
        clock, net = Clock(), Net()
        optimizer = of(DiLoCo, list(net.parameters()), SimulatedCollective(clock, 1.5), eager=True, clock=clock)
        for step in range(21):
            optimizer._asked = asked
            train(net, optimizer, 0, range(step, step + 1))
            clock.now += 1
        return net

    assert same(go(True), go(False))


def test_offload_changes_no_bit() -> None:
    ((net, _), _) = trained(partial(of, DiLoCo, eager=True, outer_momentum=0.9, offload="cpu"), replicas=2, steps=14)
    ((reference, _), _) = trained(EAGER["eager"], replicas=2, steps=14)
    assert same(net, reference)
