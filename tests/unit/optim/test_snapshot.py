"""Snapshots: a joiner becomes equal to the rest, and what does not fit changes nothing."""

import threading
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmkit.optim import Collective, DiLoCo, Every, RoundFailed, SyncedOptimizer, parameter_names
from swarmkit.optim.snapshot import digest_tensors
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import STRATEGIES, Make, Net, all_reduce, diloco, local_sgd, sgd, train, trained

every_strategy = pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
Snapshot = tuple[dict[str, Tensor], dict[str, Any]]


def state_of(net: Net, optimizer: SyncedOptimizer) -> tuple[object, ...]:
    """Everything that loading may change, comparable with ==."""
    tensors, meta = optimizer.snapshot()
    parameters = digest_tensors(dict(net.named_parameters()))
    counters = (optimizer.round, optimizer.step_count, optimizer.samples, optimizer.needs_state)
    return digest_tensors(tensors), sorted(tensors), meta, parameters, counters


@every_strategy
@pytest.mark.parametrize("steps", [4, 8])
def test_a_joiner_that_observes_the_round_ends_up_equal_to_the_rest(make: Make, steps: int) -> None:
    swarm = LocalSwarm(3)
    swarm.kill("local2")
    handed: list[Snapshot] = []
    taken, revived = threading.Event(), threading.Event()

    def member(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer]:
        net = Net()
        optimizer = make(list(net.parameters()), collective)
        train(net, optimizer, rank, range(steps))
        if rank == 0:
            handed.append(optimizer.snapshot())
            taken.set()
        assert revived.wait(60)
        train(net, optimizer, rank, range(steps, 3 * steps))
        return net, optimizer

    def joiner(collective: LocalCollective) -> tuple[Net, SyncedOptimizer]:
        net = Net(seed=5)
        optimizer = make(list(net.parameters()), collective)
        optimizer.load_snapshot(*handed[0])
        optimizer.observe_round()
        assert optimizer.step_count == steps + (1 if make is all_reduce else 4)
        train(net, optimizer, 2, range(optimizer.step_count, 3 * steps))
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
    everyone = rest + result
    assert len(everyone) == 3
    assert len({optimizer.digest() for _, optimizer in everyone}) == 1
    assert {(optimizer.step_count, optimizer.round) for _, optimizer in everyone} == {
        (3 * steps, rest[0][1].round),
    }
    assert not any(optimizer.needs_state for _, optimizer in everyone)
    assert len({digest_tensors(dict(net.named_parameters())) for net, _ in everyone}) == 1


@every_strategy
def test_a_snapshot_taken_amid_a_window_is_of_its_start(make: Make) -> None:
    ((net, optimizer),) = trained(make, replicas=1, steps=10)
    tensors, meta = optimizer.snapshot()
    assert meta["step"] == (10 if make is all_reduce else 8)
    other = Net(seed=1)
    copy = make(list(other.parameters()), LocalSwarm(1).collectives[0])
    copy.load_snapshot(tensors, meta)
    assert copy.digest() == optimizer.digest()
    assert copy.round == optimizer.round == meta["round"]


@every_strategy
def test_loading_the_snapshot_of_another_gives_its_whole_state(make: Make) -> None:
    ((_, donor),) = trained(make, replicas=1, steps=8)
    net = Net(seed=3)
    optimizer = make(list(net.parameters()), LocalSwarm(1).collectives[0])
    train(net, optimizer, 1, range(5))
    optimizer.load_snapshot(*donor.snapshot())
    tensors, meta = optimizer.snapshot()
    assert digest_tensors(tensors) == digest_tensors(donor.snapshot()[0])
    assert meta == donor.snapshot()[1]


def rename(snapshot: Snapshot, kind: str) -> None:
    tensors = snapshot[0]
    name = next(name for name in tensors if name.startswith(kind))
    tensors[name.replace("parameter", "unknown")] = tensors.pop(name)


def remove(snapshot: Snapshot, kind: str) -> None:
    del snapshot[0][next(name for name in snapshot[0] if name.startswith(kind))]


def reshape(snapshot: Snapshot, kind: str) -> None:
    name = next(name for name, tensor in snapshot[0].items() if name.startswith(kind) and tensor.dim() == 2)
    snapshot[0][name] = snapshot[0][name].T.contiguous()


def retype(snapshot: Snapshot, kind: str) -> None:
    name = next(name for name in snapshot[0] if name.startswith(kind))
    snapshot[0][name] = snapshot[0][name].double()


def set_meta(snapshot: Snapshot, key: str, value: object) -> None:
    snapshot[1][key] = value


def add(snapshot: Snapshot, name: str) -> None:
    snapshot[0][name] = torch.zeros(2)


BROKEN = {
    "anchor renamed": partial(rename, kind="anchor/"),
    "anchor missing": partial(remove, kind="anchor/"),
    "anchor of another shape": partial(reshape, kind="anchor/"),
    "anchor of another dtype": partial(retype, kind="anchor/"),
    "outer renamed": partial(rename, kind="outer/"),
    "outer missing": partial(remove, kind="outer/"),
    "outer of another shape": partial(reshape, kind="outer/"),
    "outer of another dtype": partial(retype, kind="outer/"),
    "outer unknown": partial(add, name="outer/other"),
    "inner renamed": partial(rename, kind="inner/"),
    "inner of another shape": partial(reshape, kind="inner/"),
    "inner numbers of an unknown parameter": partial(set_meta, key="inner", value={"other": {"step": 1}}),
    "inner numbers that are none": partial(set_meta, key="inner", value={"parameter0": {"step": "1"}}),
    "inner numbers in a list": partial(set_meta, key="inner", value=[1]),
    "buffer unknown": partial(add, name="buffer/0"),
    "kind unknown": partial(add, name="other/0"),
    "strategy": partial(set_meta, key="strategy", value="Other"),
    "round negative": partial(set_meta, key="round", value=-1),
    "step a string": partial(set_meta, key="step", value="3"),
    "step a boolean": partial(set_meta, key="step", value=True),
    "window zero": partial(set_meta, key="window", value=0),
}


@pytest.mark.parametrize("breakage", BROKEN.values(), ids=BROKEN)
def test_what_does_not_fit_is_refused_and_changes_nothing(breakage: Any) -> None:
    ((_, donor),) = trained(diloco, replicas=1, steps=8)
    net = Net(seed=3)
    optimizer = diloco(list(net.parameters()), LocalSwarm(1).collectives[0])
    train(net, optimizer, 1, range(5))
    optimizer.needs_state = True
    before = state_of(net, optimizer)
    snapshot = donor.snapshot()
    breakage(snapshot)
    with pytest.raises(ValueError):
        optimizer.load_snapshot(*snapshot)
    assert state_of(net, optimizer) == before


@every_strategy
def test_a_snapshot_of_another_strategy_is_refused(make: Make) -> None:
    ((_, donor),) = trained(make, replicas=1, steps=8)
    for other in STRATEGIES.values():
        if other is not make:
            net = Net()
            optimizer = other(list(net.parameters()), LocalSwarm(1).collectives[0])
            before = state_of(net, optimizer)
            with pytest.raises(ValueError, match="strategy"):
                optimizer.load_snapshot(*donor.snapshot())
            assert state_of(net, optimizer) == before


def test_a_snapshot_shares_no_memory_with_the_optimizer() -> None:
    ((net, optimizer),) = trained(diloco, replicas=1, steps=8)
    before = state_of(net, optimizer)
    for tensor in optimizer.snapshot()[0].values():
        tensor.add_(1)
    assert state_of(net, optimizer) == before
    tensors, meta = optimizer.snapshot()
    optimizer.load_snapshot(tensors, meta)
    for tensor in tensors.values():
        tensor.add_(1)
    assert state_of(net, optimizer)[0] == before[0]


@every_strategy
def test_snapshots_from_another_thread_pair_each_anchor_with_its_own_round(make: Make) -> None:
    net = Net()
    optimizer = make(list(net.parameters()), LocalSwarm(1).collectives[0])
    anchors: dict[int, str] = {0: optimizer.digest()}
    optimizer.on_round.append(lambda report: anchors.update({report.round + 1: optimizer.digest()}))
    seen: list[Snapshot] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(optimizer.snapshot())

    watcher = threading.Thread(target=watch)
    watcher.start()
    train(net, optimizer, 0, range(40))
    done.set()
    watcher.join(30)
    assert seen
    for tensors, meta in seen:
        held = {name.removeprefix("anchor/"): t for name, t in tensors.items() if name.startswith("anchor/")}
        assert digest_tensors(held) == anchors[meta["round"]]
        assert meta["step"] == meta["round"] * (1 if make is all_reduce else 4)


class SnapshotAtRelease:
    """A lock that takes a snapshot whenever it comes free: what the luckiest other thread can see."""

    def __init__(self, optimizer: SyncedOptimizer) -> None:
        self._lock, self._optimizer, self._depth = threading.RLock(), optimizer, 0
        self.seen: list[Snapshot] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        self._lock.release()
        if self._depth == 0:
            self._depth = 1_000_000  # its own release is none to look at
            self.seen.append(self._optimizer.snapshot())
            self._depth = 0


@every_strategy
def test_no_moment_shows_a_new_anchor_under_an_old_round(make: Make) -> None:
    net = Net()
    optimizer = make(list(net.parameters()), LocalSwarm(1).collectives[0])
    lock = SnapshotAtRelease(optimizer)
    optimizer._lock = lock  # type: ignore[assignment]
    train(net, optimizer, 0, range(8))
    anchors: dict[int, set[str]] = {}
    for tensors, meta in lock.seen:
        held = {name: tensor for name, tensor in tensors.items() if name.startswith("anchor/")}
        anchors.setdefault(meta["round"], set()).add(digest_tensors(held))
    assert len(anchors) > 1
    assert {len(digests) for digests in anchors.values()} == {1}
    assert len(set().union(*anchors.values())) == len(anchors)


@settings(max_examples=40, deadline=None)
@given(position=st.integers(0, 5), bit=st.integers(0, 31))
def test_any_bit_changes_the_digest(position: int, bit: int) -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    before = digest_tensors({"x": tensor})
    flipped = tensor.clone()
    flipped.view(torch.int32)[position] ^= 1 << bit if bit < 31 else -(2**31)
    assert digest_tensors({"x": flipped}) != before
    assert digest_tensors({"x": tensor.clone()}) == before


def test_names_dtypes_and_shapes_change_the_digest() -> None:
    tensor = torch.zeros(6)
    variants = [{"x": tensor}, {"y": tensor}, {"x": tensor.view(2, 3)}, {"x": tensor.view(torch.int32)}, {}]
    assert len({digest_tensors(variant) for variant in variants}) == len(variants)


def test_the_digest_of_an_optimizer_follows_its_anchor() -> None:
    net = Net()
    optimizer = local_sgd(list(net.parameters()), LocalSwarm(1).collectives[0])
    before = optimizer.digest()
    train(net, optimizer, 0, range(3))
    assert optimizer.digest() == before  # no round yet
    train(net, optimizer, 0, range(3, 4))
    assert optimizer.digest() != before


def test_snapshots_use_the_names_of_the_model() -> None:
    net = Net()

    def make(collective: Collective) -> SyncedOptimizer:
        return DiLoCo(sgd(list(net.parameters())), collective=collective, names=parameter_names(net), sync=Every(1))

    optimizer = make(LocalSwarm(1).collectives[0])
    train(net, optimizer, 0, range(1))
    tensors, _ = optimizer.snapshot()
    assert "anchor/first.weight" in tensors
    assert "outer/first.weight/momentum_buffer" in tensors


def test_two_parameters_of_one_name_are_refused() -> None:
    a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="same name"):
        DiLoCo(sgd([a, b]), collective=LocalSwarm(1).collectives[0], names={a: "x", b: "x"})


def test_observing_a_round_that_is_over_says_that_it_was_missed() -> None:
    swarm = LocalSwarm(1)
    net = Net()
    optimizer = local_sgd(list(net.parameters()), swarm.collectives[0])
    snapshot = deepcopy(optimizer.snapshot())
    train(net, optimizer, 0, range(4))
    late = local_sgd(list(Net().parameters()), swarm.revive("local1"))
    late.load_snapshot(*snapshot)
    with pytest.raises(RoundFailed) as caught:
        late.observe_round()
    assert caught.value.missed
    assert late.needs_state
