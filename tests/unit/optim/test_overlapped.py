"""Rounds in flight: what they hide, what they survive, and what of them is resumed or handed to joiners."""

import json
import math
import threading
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmkit.optim import CO2, Collective, DiLoCo, Every, RoundFailed, RoundReport, SyncedOptimizer
from swarmkit.optim.overlapped import OverlappedOptimizer
from swarmkit.optim.snapshot import digest_tensors
from swarmkit.peers.local import LocalCollective, LocalSwarm
from swarmkit.training_state import collect, resume_exactly
from tests.unit.optim.replicas import Make, Net, adamw, batch, loss_of, same, sgd, train, trained
from tests.unit.optim.rounding import Rounding
from tests.unit.optim.simulated import Clock, SimulatedCollective


def of(kind: Any, parameters: list[Tensor], collective: Collective, h: int = 4, **options: Any) -> OverlappedOptimizer:
    found = kind(adamw(parameters), collective=collective, sync=Every(h), **options)
    assert isinstance(found, OverlappedOptimizer)
    return found


def coded(kind: Any, parameters: list[Tensor], collective: Collective, **options: Any) -> OverlappedOptimizer:
    return of(kind, parameters, collective, averaging_for=lambda _: Rounding(collective, 2**-12), **options)


EAGER: dict[str, Callable[..., OverlappedOptimizer]] = {
    "eager": partial(of, DiLoCo, eager=True),
    "delayed": partial(of, DiLoCo, eager="delayed"),
    "CO2": partial(of, CO2),
    "CO2 that keeps": partial(of, CO2, keep_local=True),
}
ALL = EAGER | {
    "blocking": partial(of, DiLoCo),
    "streaming": partial(of, DiLoCo, fragments=2, overlap_steps=1, mixing=0.25),
    "eager fragments": partial(of, DiLoCo, fragments=2, eager=True),
    "eager, coded": partial(coded, DiLoCo, eager=True),
    "streaming, coded": partial(coded, DiLoCo, fragments=2, overlap_steps=1),
    "CO2, coded": partial(coded, CO2),
}
hidden = pytest.mark.parametrize("make", EAGER.values(), ids=EAGER)
everyone = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


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


# -- resuming ----------------------------------------------------------------------------------------------------------


@everyone
@pytest.mark.parametrize("stop", [8, 9, 10, 12])
def test_a_state_in_the_middle_of_a_flight_resumes_bit_for_bit(make: Make, stop: int) -> None:
    """(I27)"""
    half = [deepcopy((n.state_dict(), o.state_dict())) for n, o in trained(make, replicas=2, steps=stop)]
    if make in (ALL["eager"], ALL["CO2"]):
        assert all(state["synced"]["fragments"][0]["flight"] is not None for _, state in half)

    def task(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer]:
        net = Net(seed=4)
        optimizer = make(list(net.parameters()), collective)
        net.load_state_dict(half[rank][0])
        optimizer.load_state_dict(half[rank][1])
        train(net, optimizer, rank, range(stop, 22))
        optimizer.finish()
        return net, optimizer

    def whole(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer]:
        net = Net()
        optimizer = make(list(net.parameters()), collective)
        train(net, optimizer, rank, range(22))
        optimizer.finish()
        return net, optimizer

    pairs = zip(LocalSwarm(2).run(task), LocalSwarm(2).run(whole), strict=True)
    for (net, optimizer), (reference, uninterrupted) in pairs:
        assert same(net, reference)
        assert optimizer.round == uninterrupted.round
        found, expected = optimizer.snapshot(), uninterrupted.snapshot()
        assert digest_tensors(found[0]) == digest_tensors(expected[0])
        assert found[1] == expected[1]


@everyone
def test_what_is_in_flight_passes_through_a_checkpoint(make: Make) -> None:
    ((net, optimizer),) = trained(make, replicas=1, steps=9)
    tensors, meta = collect(net, optimizer, {})
    resumed = Net(seed=7)
    other = make(list(resumed.parameters()), LocalSwarm(1).collectives[0])
    resume_exactly(resumed, other, (tensors, json.loads(json.dumps(meta))))
    reference = Net(seed=7)
    go_through = make(list(reference.parameters()), LocalSwarm(1).collectives[0])
    reference.load_state_dict(net.state_dict())
    go_through.load_state_dict(optimizer.state_dict())
    for model, stepped in ((resumed, other), (reference, go_through)):
        train(model, stepped, 0, range(9, 15))
        stepped.finish()
    assert same(resumed, reference)
    assert other.digest() == go_through.digest()


@pytest.mark.parametrize("lost", ["carry", "start", "outer", "flight"])
def test_i27_notices_what_is_missing_from_a_state(lost: str) -> None:
    """(I27)"""
    saved = [deepcopy((n.state_dict(), o.state_dict())) for n, o in trained(EAGER["eager"], replicas=2, steps=14)]
    broken = deepcopy(saved)
    for _, state in broken:
        if lost == "outer":
            state["synced"]["outer"] = {}
        else:
            state["synced"]["fragments"][0][lost] = None if lost == "flight" else []
    pairs = zip(go_on(saved).parameters(), go_on(broken).parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) > 1e-3


def go_on(saved: list[Any]) -> Net:
    def task(collective: LocalCollective, rank: int) -> Net:
        net = Net()
        net.load_state_dict(saved[rank][0])
        optimizer = EAGER["eager"](list(net.parameters()), collective)
        optimizer.load_state_dict(saved[rank][1])
        train(net, optimizer, rank, range(14, 22))
        return net

    return LocalSwarm(2).run(task)[0]


def test_a_state_of_another_number_of_fragments_is_refused_and_changes_nothing() -> None:
    ((_, donor),) = trained(ALL["streaming"], replicas=1, steps=9)
    ((_, optimizer),) = trained(EAGER["eager"], replicas=1, steps=9)
    before = digest_tensors(optimizer.snapshot()[0])
    with pytest.raises(ValueError, match="2 fragments"):
        optimizer.load_state_dict(donor.state_dict())
    with pytest.raises(ValueError, match="1 fragments"):
        optimizer.load_snapshot(*donor.snapshot())
    assert digest_tensors(optimizer.snapshot()[0]) == before


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


def same_as_anchor(net: Net, optimizer: SyncedOptimizer) -> bool:
    pairs = zip(net.parameters(), optimizer.anchor().values(), strict=True)
    return all(torch.equal(parameter, held.to(parameter.dtype)) for parameter, held in pairs)


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


# -- members that change -----------------------------------------------------------------------------------------------


def test_i28_a_mean_is_over_those_that_are_there_and_the_local_term_follows() -> None:
    """(I28, I17)"""

    def task(collective: LocalCollective, rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        x = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        optimizer = DiLoCo(sgd([x]), collective=collective, sync=Every(2), outer_lr=0.5, outer_momentum=0.9, eager=True)
        seen = []
        start = x.detach().clone()
        for step in range(12):
            if (rank, step) == (2, 6):
                optimizer.finish()
                collective.close()
                break
            x.grad = torch.full_like(x, rank + 1.0 + step) + x.detach()
            before = x.detach() - 0.1 * x.grad
            optimizer.step()
            if step % 2:
                seen.append((x.detach().clone(), optimizer.anchor()["parameter0"].clone(), start - before))
                start = x.detach().clone()
        return seen

    found = LocalSwarm(3).run(task)
    members = [3, 3, 3, 2, 2, 2]
    carry, foreseen = torch.zeros(4, dtype=torch.float64), [3, 3, 3, 3, 2, 2]  # a loss is seen one round later
    theta = momentum = torch.zeros(4, dtype=torch.float64)
    for index in range(6):
        mean = torch.stack([seen[index][2] for seen in found[: members[index]]]).mean(0)
        x, anchor, own = found[0][index]
        if index > 0:
            # The first round was waited for; from then on the anchor holds all rounds but the one just begun.
            torch.testing.assert_close(anchor, theta, rtol=0, atol=1e-12)
            shown = own / foreseen[index]
            expected = theta - 0.5 * (shown + 0.9 * (0.9 * carry + shown))
            torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)
            assert torch.equal(anchor, found[1][index][1])
        momentum = 0.9 * momentum + mean
        theta = theta - 0.5 * (mean + 0.9 * momentum)
        carry = 0.9 * carry + own / members[index]


@everyone
@pytest.mark.parametrize("steps", [8, 9])
def test_a_joiner_that_asks_until_it_gets_the_state_ends_up_equal_to_the_rest(make: Make, steps: int) -> None:
    swarm = LocalSwarm(3)
    swarm.kill("local2")
    optimizers: list[SyncedOptimizer] = []
    taken, revived, end = threading.Event(), threading.Event(), 48

    def member(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer]:
        net = Net()
        optimizer = make(list(net.parameters()), collective)
        train(net, optimizer, rank, range(steps))
        if rank == 0:
            optimizers.append(optimizer)
            taken.set()
        assert revived.wait(60)
        train(net, optimizer, rank, range(steps, end))
        optimizer.finish()
        return net, optimizer

    def joiner(collective: LocalCollective) -> tuple[Net, SyncedOptimizer]:
        net = Net(seed=5)
        optimizer = make(list(net.parameters()), collective)
        weights: list[float] = []
        optimizer.on_round.append(lambda report: weights.append(report.weight))
        for _ in range(10_000):
            optimizer.load_snapshot(*optimizers[0].snapshot())
            try:
                optimizer.observe_round()
            except RoundFailed:
                continue
            break
        assert set(weights) == {0.0}
        assert same_as_anchor(net, optimizer)
        train(net, optimizer, 2, range(optimizer.step_count, end))
        optimizer.finish()
        assert weights[-1] > 0
        return net, optimizer

    result: list[tuple[Net, SyncedOptimizer]] = []

    def join() -> None:
        assert taken.wait(60)
        collective = swarm.revive("local2")
        revived.set()
        result.append(joiner(collective))

    thread = threading.Thread(target=join)
    thread.start()
    rest = swarm.run(member)
    thread.join(60)
    swarmed = rest + result
    assert len(swarmed) == 3
    assert {(optimizer.step_count, optimizer.round) for _, optimizer in swarmed} == {(end, rest[0][1].round)}
    assert not any(optimizer.needs_state for _, optimizer in swarmed)
    assert len({optimizer.digest() for _, optimizer in swarmed}) == 1
    assert len({digest_tensors(dict(net.named_parameters())) for net, _ in swarmed}) == 1


@everyone
def test_any_number_of_peers_can_start_from_a_snapshot_taken_in_flight(make: Make) -> None:
    snapshots = [optimizer.snapshot() for _, optimizer in trained(make, replicas=2, steps=13)]
    assert snapshots[0][1]["round"] == snapshots[1][1]["round"]
    tensors, meta = snapshots[0]

    def task(collective: LocalCollective, rank: int) -> tuple[str, Net, list[RoundReport]]:
        net = Net(seed=rank)
        optimizer = make(list(net.parameters()), collective)
        optimizer.load_snapshot(tensors, meta)
        reports: list[RoundReport] = []
        optimizer.on_round.append(reports.append)
        train(net, optimizer, rank, range(optimizer.step_count, 30))
        optimizer.finish()
        return optimizer.digest(), net, reports

    found = LocalSwarm(3).run(task)
    assert len({digest for digest, _, _ in found}) == 1
    assert all(report.failed is None and report.weight > 0 for _, _, reports in found for report in reports)
    assert found[0][2][0].round == meta["round"]


def test_members_agree_on_the_lineage_of_every_round_however_early_each_learnt_of_the_last() -> None:
    def task(collective: LocalCollective, rank: int) -> list[tuple[int, str]]:
        net = Net()
        codec = Rounding(collective, 2**-12)
        optimizer = of(DiLoCo, list(net.parameters()), collective, eager=True, averaging=codec)
        for step in range(24):
            if rank == 0:  # asked by a joiner, it takes results in as soon as they are there
                optimizer._asked = True
            train(net, optimizer, rank, range(step, step + 1))
        optimizer.finish()
        return [(key.index, key.lineage) for key, _, _ in codec.begun]

    left, right = LocalSwarm(2).run(task)
    assert left == right
    assert len({lineage for _, lineage in left}) == len(left) == 6


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
    ((net, _), _) = trained(partial(of, DiLoCo, eager=True, offload="cpu"), replicas=2, steps=14)
    ((reference, _), _) = trained(EAGER["eager"], replicas=2, steps=14)
    assert same(net, reference)
