"""What of rounds in flight is resumed, and what joiners get while rounds fly."""

import json
import threading
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmkit.optim import DiLoCo, Every, RoundFailed, RoundReport, SyncedOptimizer
from swarmkit.optim.snapshot import digest_tensors
from swarmkit.peers.local import LocalCollective, LocalSwarm
from swarmkit.training_state import collect, resume_exactly
from tests.unit.optim.flying import ALL, EAGER, everyone, of, same_as_anchor
from tests.unit.optim.replicas import Make, Net, same, sgd, train, trained
from tests.unit.optim.rounding import Rounding

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
