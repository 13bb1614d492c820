"""One's own loop in a run: late, with other parameters, left behind."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from swarmkit.optim import DiLoCo, Every
from swarmkit.optim.synced import RoundReport, SyncedOptimizer
from swarmkit.peers.node import Node
from swarmkit.peers.settings import NetworkSettings

pytestmark = pytest.mark.timeout(90)
SETTINGS = NetworkSettings(heartbeat_s=0.5, silence_s=2.0, round_timeout_s=8.0)
STEPS = 60


def loop(node: Node, start: float) -> tuple[torch.nn.Module, SyncedOptimizer]:
    """What a user writes, up to the loop itself."""
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, start)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = DiLoCo(inner, collective=node.collective(), sync=Every(3), outer_momentum=0.5)
    node.attach(optimizer)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: SyncedOptimizer, until: int) -> None:
    while optimizer.step_count < until:
        model(torch.ones(4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made = [Node.start("own", settings=SETTINGS)]
    try:
        made.append(Node.start("own", initial_peers=[made[0].addresses[0]], settings=SETTINGS))
        yield made
    finally:
        for node in made:
            node.close()


def test_a_late_peer_with_other_parameters_ends_up_equal(nodes: list[Node]) -> None:
    model, optimizer = loop(nodes[0], start=1.0)
    train(model, optimizer, until=9)

    def late() -> None:
        rest.append(loop(nodes[1], start=-3.0))
        assert rest[0][1].step_count > 9
        train(*rest[0], until=STEPS)

    rest: list[tuple[torch.nn.Module, SyncedOptimizer]] = []
    thread = threading.Thread(target=late)
    thread.start()
    members: list[int] = []
    optimizer.on_round.append(lambda report: members.append(len(report.members)))
    assert nodes[0].wait_for_peers(1, timeout=10)
    while not rest and optimizer.step_count < STEPS // 2:
        train(model, optimizer, until=optimizer.step_count + 1)
        threading.Event().wait(0.05)  # what a step of a real model takes
    train(model, optimizer, until=STEPS)
    thread.join(60)
    assert members[-1] == 2
    assert optimizer.digest() == rest[0][1].digest()
    assert torch.equal(model.weight, rest[0][0].weight)


def test_a_peer_that_was_left_behind_fetches_the_state(nodes: list[Node]) -> None:
    alone, parted = threading.Event(), threading.Event()

    def behind() -> tuple[torch.nn.Module, SyncedOptimizer]:
        pair = loop(nodes[1], start=1.0)
        parted.set()
        train(*pair, until=pair[1].step_count + 4)
        assert alone.wait(30)  # busy with something else, while the other goes on
        train(*pair, until=STEPS)
        return pair

    model, optimizer = loop(nodes[0], start=1.0)
    met = 0

    def watch(report: RoundReport) -> None:
        nonlocal met
        met = max(met, len(report.members))
        if met == 2 and len(report.members) == 1:
            alone.set()

    optimizer.on_round.append(watch)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(behind)
        while not parted.is_set():
            train(model, optimizer, until=optimizer.step_count + 1)
            parted.wait(0.05)  # what a step of a real model takes
        assert optimizer.step_count < STEPS - 12
        train(model, optimizer, until=STEPS)
        _, late = other.result(60)
    assert alone.is_set()
    assert not late.needs_state
    assert optimizer.digest() == late.digest()
