"""Nodes on loopback: the peer table, the configuration, the state, and what they leave behind."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from swarmkit.optim.collective import Reduced, RoundKey
from swarmkit.peers import directory
from swarmkit.peers.collective import SwarmCollective, _Member
from swarmkit.peers.errors import JoinFailed
from swarmkit.peers.hygiene import make_socket_folder
from swarmkit.peers.node import Node
from swarmkit.peers.settings import NetworkSettings, Transport

QUICK = {"heartbeat_s": 0.5, "round_timeout_s": 10.0}


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    first = Node.start("pair", settings=NetworkSettings(**QUICK))  # type: ignore[arg-type]
    try:
        second = Node.start("pair", initial_peers=[first.addresses[0]], settings=NetworkSettings(**QUICK))  # type: ignore[arg-type]
        try:
            yield first, second
        finally:
            second.close()
    finally:
        first.close()


def test_nodes_see_each_others_heartbeats(pair: tuple[Node, Node]) -> None:
    first, second = pair
    second.heartbeat(step=17, loss=2.5, device="cpu")
    second.announce("training")
    first.announce("training")
    assert first.wait_for_peers(2, timeout=10)
    record = next(record for record in first.refresh() if record.peer_id == second.peer_id)
    assert (record.step, record.loss, record.state) == (17, 2.5, "training")
    assert [record.peer_id for record in first.table()] == [first.peer_id, second.peer_id]


def test_a_node_that_leaves_is_not_waited_for(pair: tuple[Node, Node]) -> None:
    first, second = pair
    both = [node.collective() for node in pair]
    assert first.wait_for_peers(2, timeout=10)
    futures = [c.all_reduce([torch.ones(3)], round=RoundKey("x", 0), weight=1.0) for c in both]
    assert all(len(future.result(15).members) == 2 for future in futures)
    second.close()
    alone = both[0].all_reduce([torch.ones(3)], round=RoundKey("x", 1), weight=1.0).result(5)
    assert alone.members == (first.peer_id,)
    assert alone.waited < 1.0


def test_the_configuration_reaches_a_joiner(pair: tuple[Node, Node]) -> None:
    first, second = pair
    with pytest.raises(JoinFailed, match="nobody offers a configuration"):
        second.fetch_config()
    first.publish_config(json.dumps({"steps": 100, "text": "x" * 20_000}))
    assert json.loads(second.fetch_config())["steps"] == 100


@pytest.mark.parametrize("transport", list(Transport))
def test_the_state_reaches_a_joiner_whole(transport: Transport) -> None:
    settings = NetworkSettings(transport=transport, **QUICK)  # type: ignore[arg-type]
    state = {"a/weight": torch.randn(300, 1000), "b": torch.arange(5), "empty": torch.zeros(0, 3)}
    with_node = Node.start("state", settings=settings)
    try:
        with_node.serve_state(lambda: (state, {"round": 7}))
        with_node.announce("training")
        joiner = Node.start("state", initial_peers=[with_node.addresses[0]], settings=settings)
        try:
            seen: list[tuple[int, int]] = []
            tensors, meta = joiner.fetch_state(lambda at: seen.append((at.done, at.total)), timeout=30)
            assert meta == {"round": 7}
            assert all(torch.equal(tensors[name], state[name]) for name in state)
            assert seen[-1][0] == seen[-1][1] > 1_200_000
            assert len(seen) > 1
            assert joiner.bytes_received >= 1_200_000
        finally:
            joiner.close()
    finally:
        with_node.close()


def test_a_state_beyond_the_limit_is_refused_before_it_is_downloaded() -> None:
    donor = Node.start("limit", settings=NetworkSettings(**QUICK))  # type: ignore[arg-type]
    try:
        donor.serve_state(lambda: ({"w": torch.zeros(1000)}, {}))
        donor.announce("training")
        small = NetworkSettings(max_state_bytes=1000, **QUICK)  # type: ignore[arg-type]
        joiner = Node.start("limit", initial_peers=[donor.addresses[0]], settings=small)
        try:
            with pytest.raises(JoinFailed, match="max_state_bytes is 1000"):
                joiner.fetch_state(timeout=30)
            assert joiner.bytes_received == 0
        finally:
            joiner.close()
    finally:
        donor.close()


def test_a_joiner_that_finds_nobody_with_a_state_is_told_so(pair: tuple[Node, Node]) -> None:
    with pytest.raises(JoinFailed, match="no active replica"):
        pair[1].fetch_state(timeout=20)
    pair[0].announce("training")
    with pytest.raises(JoinFailed, match="holds no state yet"):
        pair[1].fetch_state(timeout=20)


def test_a_node_leaves_no_process_and_no_socket() -> None:
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    node = Node.start("clean")
    folder = node._sockets
    assert list(folder.iterdir())
    assert {child.pid for child in psutil.Process().children(recursive=True)} - children
    node.close()
    node.close()
    assert not folder.exists()
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in children]
    assert not [c for c in left if c.status() != psutil.STATUS_ZOMBIE]


def test_sockets_of_dead_processes_are_removed_by_the_next_node() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        stale = Path(root, "swarmkit-999999999-dead")
        living = Path(root, f"swarmkit-{os.getpid()}-alive")
        stale.mkdir()
        living.mkdir()
        fresh = make_socket_folder(Path(root))
        assert fresh.exists()
        assert living.exists()
        assert not stale.exists()


@pytest.mark.parametrize("run", ["", "with.dot", "x" * 101])
def test_a_run_name_that_hivemind_cannot_use_is_refused(run: str) -> None:
    with pytest.raises(ValueError, match="run name"):
        Node.start(run)


def test_an_unknown_heartbeat_field_is_refused(pair: tuple[Node, Node]) -> None:
    with pytest.raises(TypeError, match="stepp"):
        pair[0].heartbeat(stepp=1)


def test_an_address_alone_is_enough_to_find_the_run(pair: tuple[Node, Node]) -> None:
    third = Node.start(initial_peers=[pair[1].addresses[0]])
    try:
        assert third.run == "pair"
    finally:
        third.close()


def test_an_observer_sees_the_table_and_is_not_in_it(pair: tuple[Node, Node]) -> None:
    observer = Node.start(initial_peers=[pair[0].addresses[0]], role="observer")
    try:
        assert {record.peer_id for record in observer.refresh()} == {node.peer_id for node in pair}
        assert observer.peer_id not in {record.peer_id for record in pair[0].refresh()}
    finally:
        observer.close()


def test_joining_says_which_runs_there_are() -> None:
    bootstrap = Node.start("lobby", role="bootstrap")
    try:
        with pytest.raises(JoinFailed, match="runs at this address: none"):
            Node.start(initial_peers=bootstrap.addresses)
        runs = [Node.start(name, initial_peers=bootstrap.addresses) for name in ("alpha", "beta")]
        try:
            with pytest.raises(JoinFailed, match="alpha, beta; say which"):
                Node.start(initial_peers=bootstrap.addresses)
            with pytest.raises(JoinFailed, match="no run 'gamma'"):
                Node.start("gamma", initial_peers=bootstrap.addresses, role="observer")
        finally:
            for node in runs:
                node.close()
    finally:
        bootstrap.close()


def test_a_run_that_speaks_another_protocol_is_refused_with_both_numbers(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "PROTOCOL", directory.PROTOCOL + 1)
    with pytest.raises(JoinFailed, match="protocol 2, this peer 3: upgrade swarmkit on the run"):
        Node.start(initial_peers=pair[0].addresses)


CUT_OFF = """
import torch
from swarmkit.optim.collective import Reduced, RoundKey
from swarmkit.optim.errors import RoundFailed
from swarmkit.peers.node import Node
node = Node.start("cut")
collective = node.collective()
assert collective.all_reduce([torch.ones(3)], round=RoundKey("x", 0), weight=1.0).result(15).members
node._p2p._child.kill()
node._thread.run(node._p2p._child.wait(), timeout=10)
try:
    collective.all_reduce([torch.ones(3)], round=RoundKey("x", 1), weight=1.0).result(15)
except RoundFailed as error:
    print(error)
node.close()
"""


def test_a_node_whose_p2pd_died_fails_its_rounds_instead_of_going_on_alone() -> None:
    # In a process of its own: hivemind leaves calls behind that never end when p2pd is gone.
    done = subprocess.run([sys.executable, "-c", CUT_OFF], capture_output=True, text=True, timeout=60)
    assert "p2pd died" in done.stdout, done.stderr
    assert done.returncode == 0


def test_a_download_that_is_abandoned_ends_at_once_and_so_does_every_later_one(pair: tuple[Node, Node]) -> None:
    first, second = pair
    asked, release = threading.Event(), threading.Event()

    def provide() -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        asked.set()
        release.wait(30)
        return {"a": torch.ones(3)}, {}

    first.serve_state(provide)
    first.announce("training")
    with ThreadPoolExecutor() as pool:
        fetching = pool.submit(second.fetch_state)
        assert asked.wait(20)
        second.abandon_fetch()
        with pytest.raises(JoinFailed, match="given up: this peer leaves"):
            fetching.result(5)
        release.set()
        with pytest.raises(JoinFailed, match="given up: this peer leaves"):
            second.fetch_state()


def test_a_joiner_that_watched_a_round_is_waited_for_in_the_next(pair: tuple[Node, Node]) -> None:
    """It has not told yet that it trains, and the others are quick."""
    first, second = pair
    trains, joins = first.collective(), second.collective(joining=True)
    first.serve_state(lambda: ({"a": torch.ones(3)}, {}))
    second.fetch_state(timeout=20)

    def round(collective: SwarmCollective, index: int, weight: float) -> "Future[Reduced]":
        return collective.all_reduce([torch.ones(3)], round=RoundKey("x", index), weight=weight)

    watched, other = round(trains, 0, 1.0), round(joins, 0, 0.0)
    assert len(watched.result(20).members) == len(other.result(20).members) == 2
    early = round(trains, 1, 1.0)
    with pytest.raises(TimeoutError):
        early.result(0.5)
    assert round(joins, 1, 1.0).result(20).weights == early.result(20).weights == (1.0, 1.0)


def test_a_joiner_gets_no_state_from_before_the_end_of_a_round_that_had_begun(pair: tuple[Node, Node]) -> None:
    first, second = pair
    trains, state = first.collective(), {"round": 0}
    first.serve_state(lambda: ({"a": torch.ones(3)}, dict(state)))
    begun, release = threading.Event(), threading.Event()

    async def slow(member: object, agreement: object) -> object:
        begun.set()
        await asyncio.to_thread(release.wait, 30)
        return await real(member, agreement)

    real = _Member._exchange
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Member, "_exchange", slow)
        running = trains.all_reduce([torch.ones(3)], round=RoundKey("x", 0), weight=1.0)
        running.add_done_callback(lambda _: state.update(round=1))
        assert begun.wait(20)
        with ThreadPoolExecutor(1) as pool:
            fetching = pool.submit(second.fetch_state)
            with pytest.raises(TimeoutError):
                fetching.result(1.0)
            release.set()
            assert fetching.result(20)[1]["round"] == 1
