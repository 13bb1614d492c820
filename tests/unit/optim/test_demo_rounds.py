"""DeMo's rounds: failed, missed and garbled ones, odd parameters, resumption."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmkit.optim.collective import Collective, Gathered, RoundKey
from swarmkit.optim.demo import DeMo
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.schedule import Every
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import Net, loss_of, same, train

LR = 0.05


def make_demo(parameters: Iterable[Tensor], collective: Collective, **options: object) -> DeMo:
    settings: dict[str, object] = {"k": 16, "chunk": 8, "beta": 0.9, "precondition": None} | options
    return DeMo(torch.optim.SGD(list(parameters), lr=LR), collective=collective, **settings)  # type: ignore[arg-type]


class Altered:
    """A collective whose gathers fail in some rounds, or give other payloads than were sent."""

    def __init__(
        self,
        collective: LocalCollective,
        *,
        fails: Sequence[int] = (),
        missed: bool = False,
        alter: Callable[[int, Gathered], None] | None = None,
    ) -> None:
        self.peer_id = collective.peer_id
        self._collective, self._fails, self._missed, self._alter = collective, fails, missed, alter
        self.all_reduce, self.close = collective.all_reduce, collective.close

    def all_gather(self, payload: Sequence[Tensor], *, round: RoundKey, weight: float) -> Future[Gathered]:
        future: Future[Gathered] = Future()
        if round.index in self._fails:
            future.set_exception(RoundFailed("lost", missed=self._missed))
            return future
        gathered = self._collective.all_gather(payload, round=round, weight=weight).result()
        if self._alter is not None:
            self._alter(round.index, gathered)
        future.set_result(gathered)
        return future


def momentum(optimizer: DeMo) -> list[Tensor]:
    return [tensor.clone() for tensor in optimizer.averaging.momentum.tensors]


def assert_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_failed_round_takes_nothing_out_of_the_momentum_and_the_next_sends_it() -> None:
    net, alone = Net(), Net()
    failing = make_demo(net.parameters(), Altered(LocalSwarm(1).collectives[0], fails=[0]))
    loss_of(net, 0, 0).backward()
    failing.step()
    assert same(net, Net())
    assert failing.last_report is not None
    assert failing.last_report.failed == "lost"
    gathering = make_demo(alone.parameters(), LocalSwarm(1).collectives[0], sync=Every(2))
    loss_of(alone, 0, 0).backward()
    gathering.step()
    assert_equal(momentum(failing), momentum(gathering))
    for model, optimizer in ((net, failing), (alone, gathering)):
        optimizer.zero_grad()
        loss_of(model, 0, 1).backward()
        optimizer.step()
    assert same(net, alone)
    assert_equal(momentum(failing), momentum(gathering))


def test_a_peer_that_missed_a_payload_knows_and_is_healed_by_a_snapshot() -> None:
    swarm = LocalSwarm(2)

    def first(collective: LocalCollective, rank: int) -> tuple[Net, DeMo]:
        net = Net()
        optimizer = make_demo(net.parameters(), collective)
        train(net, optimizer, rank, range(2))
        return net, optimizer

    (net, ahead), (late, behind) = swarm.run(first)
    assert ahead.lineage == behind.lineage != ""
    assert ahead.digest() == behind.digest()
    swarm.kill(behind.collective.peer_id)
    train(net, ahead, 0, range(2, 3))  # a round without the other
    behind.collective = swarm.revive(behind.collective.peer_id)
    behind.averaging._collective = behind.collective
    train(late, behind, 1, range(2, 3))
    assert behind.last_report is not None
    assert behind.last_report.missed
    assert behind.needs_state
    assert ahead.digest() != behind.digest()
    kept = momentum(behind)
    tensors, meta = ahead.snapshot()
    behind.load_snapshot(tensors, meta)
    assert not behind.needs_state
    assert (behind.round, behind.lineage, behind.digest()) == (ahead.round, ahead.lineage, ahead.digest())
    assert_equal(momentum(behind), kept)  # its own, and no step was missed in the counting

    def on(collective: LocalCollective, rank: int) -> None:
        train(*((net, ahead) if rank == 0 else (late, behind)), rank, range(3, 5))

    swarm.run(on)
    assert ahead.digest() == behind.digest()
    assert ahead.last_report is not None
    assert len(ahead.last_report.members) == 2


def test_the_momentum_decays_by_the_steps_that_a_snapshot_is_ahead() -> None:
    nets = [Net(), Net()]
    ahead, behind = (make_demo(net.parameters(), LocalSwarm(1).collectives[0]) for net in nets)
    train(nets[0], ahead, 0, range(5))
    train(nets[1], behind, 0, range(2))
    kept = momentum(behind)
    behind.load_snapshot(*ahead.snapshot())
    for now, before in zip(momentum(behind), kept, strict=True):
        torch.testing.assert_close(now, before * 0.9**3)
    behind.load_snapshot(*make_demo(Net().parameters(), LocalSwarm(1).collectives[0]).snapshot())  # a rollback
    assert not any(tensor.any() for tensor in momentum(behind))


def test_a_snapshot_that_does_not_fit_changes_nothing() -> None:
    net = Net()
    optimizer = make_demo(net.parameters(), LocalSwarm(1).collectives[0])
    train(net, optimizer, 0, range(2))
    before, held = copy.deepcopy(net), momentum(optimizer)
    tensors, meta = make_demo([torch.nn.Parameter(torch.zeros(3))], LocalSwarm(1).collectives[0]).snapshot()
    with pytest.raises(ValueError, match="anchor"):
        optimizer.load_snapshot(tensors, meta)
    assert same(net, before)
    assert_equal(momentum(optimizer), held)


def test_an_observer_adopts_the_round_without_a_share_in_it() -> None:
    def task(collective: LocalCollective, rank: int) -> tuple[Net, DeMo]:
        net = Net()
        optimizer = make_demo(net.parameters(), collective)
        if rank == 2:
            optimizer.observe_round()
        else:
            train(net, optimizer, rank, range(1))
        return net, optimizer

    found = LocalSwarm(3).run(task)
    pair = LocalSwarm(2).run(task)
    assert all(same(net, pair[0][0]) for net, _ in found)
    assert not any(tensor.any() for tensor in momentum(found[2][1]))


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e35])
def test_gradients_that_are_not_finite_are_left_out_and_said(poison: float) -> None:
    def task(collective: LocalCollective, rank: int) -> tuple[Net, DeMo]:
        net = Net()
        optimizer = make_demo(net.parameters(), collective)
        loss_of(net, rank, 0).backward()
        if rank == 1:
            assert net.first.weight.grad is not None
            net.first.weight.grad[2, 2] = poison
        optimizer.step()
        return net, optimizer

    (net, healthy), (other, poisoned) = LocalSwarm(2).run(task)
    assert same(net, other)
    assert healthy.last_report is not None
    assert healthy.last_report.failed is None
    assert poisoned.last_report is not None
    assert "not finite" in str(poisoned.last_report.failed)
    assert not any(tensor.any() for tensor in momentum(poisoned))
    ((alone, _),) = LocalSwarm(1).run(task)
    assert same(net, alone)


def test_a_swarm_of_nobody_but_observers_has_no_round() -> None:
    optimizer = make_demo(Net().parameters(), LocalSwarm(1).collectives[0])
    with pytest.raises(RoundFailed, match="nobody contributed"):
        optimizer.observe_round()


# -- hostile payloads ------------------------------------------------------------------------------------------------


def garble_bytes(payload: Tensor) -> list[Tensor]:
    return [torch.full_like(payload, 255)]


GARBLES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "all ones": garble_bytes,
    "cut": lambda payload: [payload[:-1]],
    "empty": lambda payload: [],
    "two": lambda payload: [payload, payload],
    "floats": lambda payload: [payload.float()],
}


@pytest.mark.parametrize("garble", GARBLES.values(), ids=GARBLES.keys())
@pytest.mark.parametrize("values", ["sign", "float32"])
def test_a_garbled_member_is_dropped_by_all(garble: Callable[[Tensor], list[Tensor]], values: str) -> None:
    def alter(index: int, gathered: Gathered) -> None:
        if index == 1:
            gathered.payloads[1][:] = garble(gathered.payloads[1][0])

    def task(collective: LocalCollective, rank: int) -> tuple[Net, DeMo]:
        net = Net()
        optimizer = make_demo(net.parameters(), Altered(collective, alter=alter), values=values)
        train(net, optimizer, rank, range(2))
        return net, optimizer

    (net, optimizer), (other, garbled) = LocalSwarm(2).run(task)
    assert same(net, other)
    assert optimizer.lineage == garbled.lineage
    for each in (optimizer, garbled):
        assert each.last_report is not None
        assert each.last_report.members == ("local0",)


def test_a_member_that_is_dropped_takes_nothing_out_of_its_momentum() -> None:
    def alter(index: int, gathered: Gathered) -> None:
        gathered.payloads[1][:] = []

    def task(collective: LocalCollective, rank: int) -> list[Tensor]:
        net = Net()
        optimizer = make_demo(net.parameters(), Altered(collective, alter=alter))
        train(net, optimizer, rank, range(1))
        return momentum(optimizer)

    _, dropped = LocalSwarm(2).run(task)
    net = Net()
    gathering = make_demo(net.parameters(), LocalSwarm(1).collectives[0], sync=Every(9))
    train(net, gathering, 1, range(1))
    assert_equal(dropped, momentum(gathering))


def test_peers_with_payloads_of_another_form_do_not_meet() -> None:
    (collective,) = LocalSwarm(1).collectives
    names = {
        make_demo(Net().parameters(), collective, **options).round_name
        for options in ({}, {"k": 64}, {"chunk": 4}, {"values": "int8"}, {"buffers": [torch.zeros(3)]})
    }
    assert len(names) == 5
    assert make_demo(Net().parameters(), collective).round_name in names


# -- odd parameters --------------------------------------------------------------------------------------------------


def test_odd_parameters_break_nothing_and_frozen_ones_cost_nothing() -> None:
    def parameters() -> list[torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(1)
        shapes: list[tuple[int, ...]] = [(5, 3, 3, 3), (), (0, 4), (7,), (9, 9), (4, 4), (1, 1), (6, 1), (33, 17)]
        found = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        found[4].requires_grad_(False)
        return found

    def task(collective: LocalCollective, rank: int) -> tuple[list[torch.nn.Parameter], DeMo]:
        ours = parameters()
        optimizer = make_demo(ours, collective)
        for step in range(3):
            for i, parameter in enumerate(ours):
                # The sixth has never a gradient anywhere, the fourth on the second peer only.
                if i in (4, 5) or (i == 3 and rank == 0):
                    continue
                generator = torch.Generator().manual_seed(100 * step + 10 * rank + i)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        return ours, optimizer

    found = LocalSwarm(3).run(task)
    for ours, optimizer in found:
        assert optimizer.last_report is not None
        assert optimizer.last_report.failed is None
        assert_equal(ours, found[0][0])
        for i, (parameter, before) in enumerate(zip(ours, parameters(), strict=True)):
            assert torch.equal(parameter, before) == (i in (2, 4, 5))
    thawed = make_demo([torch.nn.Parameter(p.detach()) for p in parameters()], LocalSwarm(1).collectives[0])
    assert thawed.averaging.form.num_bytes > found[0][1].averaging.form.num_bytes


def test_a_parameter_that_nobody_has_a_gradient_for_is_not_decayed() -> None:
    used, unused = (torch.nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    sgd = torch.optim.SGD([used, unused], lr=0.1, weight_decay=0.5)
    optimizer = DeMo(sgd, collective=LocalSwarm(1).collectives[0], chunk=8)
    used.grad = torch.zeros(8, 8)
    optimizer.step()
    assert torch.equal(unused, torch.ones(8, 8))
    torch.testing.assert_close(used.detach(), torch.full((8, 8), 0.95))


def test_tied_parameters_are_sent_once() -> None:
    tied = torch.nn.Parameter(torch.ones(16, 16))
    (collective,) = LocalSwarm(1).collectives
    once = make_demo([tied], collective)
    model = torch.nn.ModuleList([torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False)])
    model[0].weight = model[1].weight = tied
    assert make_demo(model.parameters(), collective).averaging.form == once.averaging.form


def test_sparse_and_strided_gradients_are_taken_as_the_dense_ones() -> None:
    def trained(gradient: Callable[[Tensor], Tensor]) -> Tensor:
        parameter = torch.nn.Parameter(torch.ones(16, 8))
        optimizer = make_demo([parameter], LocalSwarm(1).collectives[0])
        dense = torch.zeros(16, 8)
        dense[3] = torch.arange(8.0)
        parameter.grad = gradient(dense)
        optimizer.step()
        return parameter.detach()

    wanted = trained(lambda g: g)
    assert torch.equal(trained(lambda g: g.to_sparse(1)), wanted)
    assert torch.equal(trained(lambda g: g.T.contiguous().T), wanted)


def test_no_parameters_at_all_are_refused() -> None:
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    with pytest.raises(ValueError, match="no parameter has requires_grad=True"):
        make_demo([frozen], LocalSwarm(1).collectives[0])


def test_buffers_are_averaged_as_they_are() -> None:
    def task(collective: LocalCollective, rank: int) -> Tensor:
        net = Net()
        buffer = torch.full((3,), float(rank))
        train(net, make_demo(net.parameters(), collective, buffers=[buffer]), rank, range(1))
        return buffer

    assert all(torch.equal(buffer, torch.ones(3)) for buffer in LocalSwarm(3).run(task))


# -- an ordinary optimizer -------------------------------------------------------------------------------------------


def test_schedulers_groups_and_closures_work() -> None:
    net = Net()
    groups: list[dict[str, Any]] = [{"params": net.first.parameters(), "lr": 0.0}, {"params": net.second.parameters()}]
    optimizer = DeMo(torch.optim.SGD(groups, lr=0.1), collective=LocalSwarm(1).collectives[0])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, 0, 0)
        loss.backward()
        return loss

    before = copy.deepcopy(net)
    assert optimizer.step(closure).item() == pytest.approx(loss_of(before, 0, 0).item())
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.05]
    assert torch.equal(net.first.weight, before.first.weight)
    assert not torch.equal(net.second.weight, before.second.weight)


def test_an_overflow_under_a_gradient_scaler_leaves_the_gradients_out() -> None:
    net = Net()
    optimizer = make_demo(net.parameters(), LocalSwarm(1).collectives[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for broken in (True, False):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, 0, 0)).backward()
        if broken:
            assert net.first.bias.grad is not None
            net.first.bias.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        assert bool(optimizer.averaging.momentum.tensors[0].any()) != broken
        assert optimizer.last_report is not None
        assert optimizer.last_report.failed is None
    plain = Net()
    other = make_demo(plain.parameters(), LocalSwarm(1).collectives[0])
    train(plain, other, 0, range(1))
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


# -- resumption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
@pytest.mark.parametrize("values", ["sign", "int8", "float16", "float32"])
def test_resuming_in_the_middle_of_a_window_is_bit_exact(values: str, inner: str) -> None:
    def make(net: Net, collective: Collective) -> DeMo:
        kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        optimizer = kinds[inner](net.parameters(), lr=LR)
        return DeMo(optimizer, collective=collective, k=16, chunk=8, values=values, sync=Every(3))

    def whole(collective: LocalCollective, rank: int) -> tuple[Net, DeMo]:
        net = Net()
        optimizer = make(net, collective)
        train(net, optimizer, rank, range(11))
        return net, optimizer

    def halves(collective: LocalCollective, rank: int) -> tuple[Net, DeMo]:
        net = Net()
        optimizer = make(net, collective)
        train(net, optimizer, rank, range(5))
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        again = Net(seed=5)
        again.load_state_dict(saved[0])
        resumed = make(again, collective)
        resumed.load_state_dict(saved[1])
        train(again, resumed, rank, range(5, 11))
        return again, resumed

    for (net, optimizer), (again, resumed) in zip(LocalSwarm(2).run(whole), LocalSwarm(2).run(halves), strict=True):
        assert same(net, again)
        assert_equal(momentum(optimizer), momentum(resumed))
        assert (optimizer.round, optimizer.lineage) == (resumed.round, resumed.lineage)


def test_a_state_holds_the_momentum_and_not_the_parameters() -> None:
    net = Net()
    optimizer = make_demo(net.parameters(), LocalSwarm(1).collectives[0])
    train(net, optimizer, 0, range(2))
    synced = optimizer.state_dict()["synced"]
    assert synced["anchor"] == []
    assert_equal(synced["averaging"][0]["momentum"], momentum(optimizer))


def test_a_state_of_other_parameters_is_refused_and_changes_nothing() -> None:
    net = Net()
    optimizer = make_demo(net.parameters(), LocalSwarm(1).collectives[0])
    train(net, optimizer, 0, range(2))
    held = momentum(optimizer)
    other = make_demo([torch.nn.Parameter(torch.zeros(30, 30))], LocalSwarm(1).collectives[0])
    with pytest.raises(ValueError, match="momentum"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="bare"):
        optimizer.load_state_dict(torch.optim.SGD(net.parameters(), lr=0.1).state_dict())
    assert_equal(momentum(optimizer), held)
