"""Windows that all replicas fill together: rounds by the swarm's steps, weights by what each has done."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swarmkit.optim import CO2, AllReduce, Collective, DeMo, DiLoCo, Every, LocalSGD, SyncedOptimizer
from swarmkit.optim.pace import Pace
from swarmkit.optim.synced import RoundReport
from swarmkit.peers.local import LocalCollective, LocalSwarm
from swarmkit.peers.pace import Progress, Tally
from tests.unit.optim.replicas import Net, adamw, batch, same, sgd, train

Make = Callable[[list[Tensor], Collective, Pace | None], SyncedOptimizer]


def local_sgd(parameters: list[Tensor], collective: Collective, pace: Pace | None) -> SyncedOptimizer:
    return LocalSGD(adamw(parameters), collective=collective, sync=Every(4), pace=pace)


def diloco(parameters: list[Tensor], collective: Collective, pace: Pace | None) -> SyncedOptimizer:
    return DiLoCo(adamw(parameters), collective=collective, sync=Every(4), pace=pace)


def eager(parameters: list[Tensor], collective: Collective, pace: Pace | None) -> SyncedOptimizer:
    return DiLoCo(adamw(parameters), collective=collective, sync=Every(4), pace=pace, eager=True)


def streaming(parameters: list[Tensor], collective: Collective, pace: Pace | None) -> SyncedOptimizer:
    return DiLoCo(
        adamw(parameters), collective=collective, sync=Every(4), pace=pace, fragments=2, overlap_steps=1, mixing=0.25
    )


def co2(parameters: list[Tensor], collective: Collective, pace: Pace | None) -> SyncedOptimizer:
    return CO2(adamw(parameters), collective=collective, sync=Every(4), pace=pace)


STRATEGIES: dict[str, Make] = {
    "LocalSGD": local_sgd,
    "DiLoCo": diloco,
    "eager": eager,
    "streaming": streaming,
    "CO2": co2,
}


class Alone:
    """The pace of a swarm of one."""

    def advance(self, start: int, done: int, due: int) -> int:
        return start + done


class Together:
    """The pace of several replicas in one process; `after` hears of every step, and whether a round is due."""

    def __init__(self, replicas: int, after: Callable[[int, bool], None] = lambda rank, is_due: None) -> None:
        self.tally, self.names = Tally(), [str(rank) for rank in range(replicas)]
        self.lock = threading.Lock()
        self.after = after

    def of(self, rank: int) -> Pace:
        shared = self

        class Mine:
            def advance(self, start: int, done: int, due: int) -> int:
                progress = Progress(start, done, due)
                with shared.lock:
                    shared.tally.note(str(rank), progress)
                    step = shared.tally.step(progress, shared.names)
                shared.after(rank, step >= due)
                return step

        return Mine()


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_swarm_of_one_sets_its_own_pace(name: str) -> None:
    def trained(pace: Pace | None) -> tuple[Net, SyncedOptimizer]:
        def task(collective: LocalCollective, _: int) -> tuple[Net, SyncedOptimizer]:
            net = Net()
            optimizer = STRATEGIES[name](list(net.parameters()), collective, pace)
            train(net, optimizer, 0, range(18))
            return net, optimizer

        return LocalSwarm(1).run(task)[0]

    (net, paced), (reference, plain) = trained(Alone()), trained(None)
    assert same(net, reference)
    assert (paced.step_count, paced.round, paced.lineage) == (plain.step_count, plain.round, plain.lineage)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_fast_and_a_slow_replica_fill_windows_together(name: str) -> None:
    """Rank 0 takes three steps for each of rank 1: of two windows of four, six are its own and two the other's."""
    turns = [threading.Semaphore(3), threading.Semaphore(0)]
    taken = [0, 0]

    def after(rank: int, is_due: bool) -> None:
        """Before the replica meets the other, which may still have to take the step that shows it the round."""
        taken[rank] += 1
        if rank == 1:
            turns[0].release(3)
        elif taken[0] % 3 == 0 or is_due:
            turns[1].release()

    together = Together(2, after)
    reports: list[list[RoundReport]] = [[], []]

    def task(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer, list[int]]:
        net, seen = Net(), []
        optimizer = STRATEGIES[name](list(net.parameters()), collective, together.of(rank))
        optimizer.on_round.append(reports[rank].append)
        while optimizer.step_count < 16:
            assert turns[rank].acquire(timeout=20)
            inputs, _ = batch(rank, taken[rank])
            optimizer.samples += len(inputs)
            train(net, optimizer, rank, range(taken[rank], taken[rank] + 1))
            seen.append(optimizer.step_count)
        turns[1 - rank].release(99)
        optimizer.finish()
        return net, optimizer, seen

    (fast, one, seen), (slow, other, _) = LocalSwarm(2).run(task)
    assert one.digest() == other.digest()
    assert one.round == other.round
    assert all(report.failed is None for report in reports[0])
    parts = 2 if name == "streaming" else 1
    # Whoever hears last that a round is due has taken a step more.
    assert 32 <= sum(taken) <= 32 + one.round
    assert taken[0] > 1.5 * taken[1]
    for rank in range(2):
        assert sum(report.weight for report in reports[rank]) == 16 * taken[rank] * parts
        assert [report.round for report in reports[rank]] == [report.round for report in reports[0]]
    assert seen == sorted(seen)
    assert seen[-1] == 16


def test_rounds_average_by_what_each_has_done() -> None:
    """LocalSGD, H = 4, two replicas that do 6 and 2 steps: the mean is (6 a + 2 b) / 8."""
    together = Together(2)
    gate = threading.Event()

    def task(collective: LocalCollective, rank: int) -> Tensor:
        x = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        optimizer = LocalSGD(sgd([x], lr=1.0), collective=collective, sync=Every(4), pace=together.of(rank))
        for step in range(6 if rank == 0 else 2):
            if rank == 1 and step == 1:
                assert gate.wait(20)
            x.grad = torch.full_like(x, -1.0 if rank == 0 else -10.0)
            if rank == 0 and step == 5:
                gate.set()
            if rank == 0 and step == 5:
                # The last of the eight steps is the slow one's; the fast one sees it after a step more.
                break
            optimizer.step()
        optimizer.finish()
        return x.detach()

    fast, slow = LocalSwarm(2).run(task)
    assert torch.equal(fast, slow)
    torch.testing.assert_close(fast, torch.full((3,), (5 * 5 + 2 * 20) / 7, dtype=torch.float64))


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_resumes_in_the_middle_of_a_window_bit_for_bit(name: str) -> None:
    class Half:
        """Another replica does as much: the swarm's step is what each has done."""

        def advance(self, start: int, done: int, due: int) -> int:
            return start + done // 2

    def task(collective: LocalCollective, _: int) -> None:
        net, copied = Net(), Net()
        optimizer = STRATEGIES[name](list(net.parameters()), collective, Half())
        optimizer.on_round.append(reports.append)
        train(net, optimizer, 0, range(13))
        state = copy.deepcopy(optimizer.state_dict())
        copied.load_state_dict(net.state_dict())
        train(net, optimizer, 0, range(13, 40))
        assert optimizer.step_count == 20
        assert [report.failed for report in reports] == [None] * len(reports)

        def again(collective: LocalCollective, _: int) -> SyncedOptimizer:
            resumed = STRATEGIES[name](list(copied.parameters()), collective, Half())
            resumed.load_state_dict(state)
            train(copied, resumed, 0, range(13, 40))
            return resumed

        (resumed,) = LocalSwarm(1).run(again)
        assert resumed.step_count == 20
        assert same(net, copied)

    reports: list[RoundReport] = []
    LocalSwarm(1).run(task)


@pytest.mark.parametrize("strategy", [AllReduce, DeMo])
def test_strategies_without_windows_refuse_a_pace(strategy: type[SyncedOptimizer]) -> None:
    inner = adamw(list(Net().parameters()))
    with pytest.raises(ValueError, match="no window to fill together"):
        LocalSwarm(1).run(lambda collective, _: strategy(inner, collective=collective, pace=Alone()))
