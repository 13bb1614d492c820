"""The swarm's pace: what the coordinator adds up, and real nodes that fill windows together."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmkit.optim import DiLoCo, Every
from swarmkit.optim.synced import RoundReport, SyncedOptimizer
from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.node import Node
from swarmkit.peers.pace import Progress, Tally, read_progress
from swarmkit.peers.settings import NetworkSettings

pytestmark = pytest.mark.timeout(90)
SETTINGS = NetworkSettings(heartbeat_s=0.5, silence_s=2.0, round_timeout_s=8.0)
PEERS = ["a", "b", "c", "d"]
steps = st.integers(0, 1 << 40)


def tally(done: dict[str, int], *, start: int = 100, due: int = 110) -> Tally:
    found = Tally()
    for peer, count in done.items():
        found.note(peer, Progress(start, count, due))
    return found


@given(st.dictionaries(st.sampled_from(PEERS), steps), st.integers(1, 1000))
def test_a_round_is_due_exactly_when_all_have_filled_the_window_together(done: dict[str, int], window: int) -> None:
    progress = Progress(100, 0, 100 + window)
    step = tally(done, due=100 + window).step(progress, PEERS)
    assert progress.start <= step <= progress.due
    assert (step == progress.due) == (sum(done.values()) >= window * len(PEERS))


@given(st.dictionaries(st.sampled_from(PEERS), steps, min_size=1), st.sampled_from(PEERS))
def test_more_steps_never_set_the_swarm_back(done: dict[str, int], peer: str) -> None:
    progress = Progress(100, 0, 110)
    before = tally(done).step(progress, PEERS)
    assert tally(done | {peer: done.get(peer, 0) + 1}).step(progress, PEERS) >= before


def test_who_has_left_counts_no_more() -> None:
    found = tally({"a": 3, "b": 3, "c": 4, "d": 30})
    assert found.step(Progress(100, 3, 110), ["a", "b", "c"]) == 103
    assert found.step(Progress(100, 3, 110), PEERS) == 102  # it comes back with nothing


def test_a_replica_that_most_have_left_behind_is_told_to_come() -> None:
    found = tally({"a": 5})
    for peer in ("b", "c"):
        found.note(peer, Progress(110, 1, 120))
    assert found.step(Progress(100, 5, 110), PEERS) == 101
    found.note("d", Progress(110, 1, 120))
    assert found.step(Progress(100, 5, 110), PEERS) == 110


def test_a_window_that_was_full_stays_full_for_who_comes_after_the_others_have_gone_on() -> None:
    found = tally({"a": 6, "b": 2}, due=104)
    assert found.step(Progress(100, 6, 104), ["a", "b"]) == 104
    found.note("a", Progress(104, 1, 108))
    assert found.step(Progress(100, 3, 104), ["a", "b"]) == 104
    assert found.step(Progress(104, 1, 108), ["a", "b"]) == 104, "its next window is not full"
    assert found.step(Progress(100, 3, 106), ["a", "b"]) == 101, "nor is one with the same start and a later end"


@pytest.mark.parametrize(
    "message",
    [
        {"start": -1, "done": 0, "due": 4},
        {"start": 0, "done": -1, "due": 4},
        {"start": 4, "done": 0, "due": 4},
        {"start": 0, "done": 0, "due": 1 << 60},
        {"start": 0, "done": 1.5, "due": 4},
        {"start": 0, "done": 1 << 60, "due": 4},
        {"done": 1},
    ],
)
def test_nonsense_is_refused(message: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        read_progress(message)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made = [Node.start("paced", settings=SETTINGS)]
    try:
        made += [Node.start("paced", initial_peers=[made[0].addresses[0]], settings=SETTINGS) for _ in range(2)]
        yield made
    finally:
        for node in made:
            node.close()


def prepare(node: Node) -> tuple[torch.nn.Module, SyncedOptimizer, list[RoundReport]]:
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = DiLoCo(inner, collective=node.collective(), sync=Every(8), pace=node.pace)
    reports: list[RoundReport] = []
    optimizer.on_round.append(reports.append)
    return model, optimizer, reports


def work(model: torch.nn.Module, optimizer: SyncedOptimizer, until: int, seconds: float) -> int:
    """Train with steps that take so long, and return how many were taken."""
    steps = 0
    while optimizer.step_count < until:
        threading.Event().wait(seconds)  # what a step of a real model takes
        model(torch.ones(4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


def test_nobody_waits_for_a_peer_that_is_ten_times_slower(nodes: list[Node]) -> None:
    made = [prepare(node) for node in nodes]
    assert nodes[0].wait_for_peers(3, timeout=20)
    started = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        futures = [
            pool.submit(work, model, optimizer, 64, 0.1 if rank == 1 else 0.01)
            for rank, (model, optimizer, _) in enumerate(made)
        ]
        taken = [future.result(60) for future in futures]
    elapsed = time.monotonic() - started
    # At its own pace the slow one alone would have taken 64 steps of 0.1 s.
    assert elapsed < 0.6 * 64 * 0.1
    assert taken[1] < 32
    assert min(taken[0], taken[2]) > 64
    assert sum(taken) >= 3 * 64
    assert len({optimizer.digest() for _, optimizer, _ in made}) == 1
    for _, _, reports in made:
        assert [report.failed for report in reports] == [None] * 8
        assert all(len(report.members) == 3 for report in reports)
        assert [report.step for report in reports] == list(range(8, 65, 8))
    weights = [sum(report.weight for report in reports) for _, _, reports in made]
    assert weights == [float(count) for count in taken]


def test_the_pace_outlives_its_coordinator(nodes: list[Node]) -> None:
    made = [prepare(node) for node in nodes]
    assert nodes[0].wait_for_peers(3, timeout=20)
    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(work, model, optimizer, 8, 0.01) for model, optimizer, _ in made]:
            future.result(60)
        # In the middle of a window, with steps that only it has heard of.
        rest = [pool.submit(work, model, optimizer, 40, 0.01) for model, optimizer, _ in made[1:]]
        nodes[0].close()
        for future in rest:
            future.result(60)
    (_, one, reports), (_, other, _) = made[1:]
    assert one.digest() == other.digest()
    assert reports[-1].failed is None
    assert len(reports[-1].members) == 2
