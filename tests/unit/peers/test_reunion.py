"""Peers whose link was cut find each other again although no table, and no routing table, holds the other any more."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import pytest

from swarmkit.peers.node import Node
from swarmkit.peers.reunion import Reunion
from swarmkit.peers.roster import Roster
from swarmkit.peers.settings import NetworkSettings

pytestmark = pytest.mark.timeout(60)
SETTINGS = NetworkSettings(heartbeat_s=0.3, silence_s=1.0, round_timeout_s=5.0)


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    first = Node.start("reunion", settings=SETTINGS)
    second = Node.start("reunion", initial_peers=[first.addresses[0]], settings=SETTINGS)
    try:
        for node in (first, second):
            node.announce("training")
        assert first.wait_for_peers(2, timeout=20)
        assert second.wait_for_peers(2, timeout=20)
        yield first, second
    finally:
        second.close()
        first.close()


async def forget(node: Node) -> None:
    """What a cut that outlasts the heartbeats' lifetime does to a node."""
    routing = node._dht.protocol.routing_table
    for known in list(routing.uid_to_peer_id):
        del routing[known]
    roster = node._roster
    roster._arrived = dict.fromkeys(roster._arrived, time.monotonic() - 1000)
    # Or the next look at the storage of its own brings the record back.
    node._dht.protocol.storage.data.clear()
    node._dht.protocol.cache.data.clear()
    roster._forget_expired()


async def until_known(node: Node, other: Node) -> None:
    """Wait until a node is on the other's DHT again."""
    while other.peer_id not in {peer.to_base58() for peer in node._dht.protocol.routing_table.peer_id_to_uid}:
        await asyncio.sleep(0.05)


def test_two_that_forgot_each_other_are_one_swarm_again(pair: tuple[Node, Node]) -> None:
    for node in pair:
        node._thread.run(forget(node), timeout=5)
    for node, other in (pair, pair[::-1]):
        assert node.wait_for_peers(2, timeout=15)
        assert not node._roster.lost
        node._thread.run(until_known(node, other), timeout=15)


def test_one_that_has_ended_is_not_looked_for_any_more(pair: tuple[Node, Node]) -> None:
    first, second = pair
    record = next(record for record in first.table() if record.peer_id == second.peer_id)
    second.close(state="training")  # says no good-bye
    roster: Roster = first._roster
    roster.lost[record.peer_id] = record
    assert not first._thread.run(roster.may_be_back(record.peer_id), timeout=10)
    assert not roster.lost


def test_an_error_does_not_end_the_search(caplog: pytest.LogCaptureFixture) -> None:
    class Looking:
        """A roster that knows of one lost peer, and fails at the first look."""

        def __init__(self) -> None:
            self.lost = OrderedDict(a=None)
            self.looks = 0
            self.again = asyncio.Event()

        async def may_be_back(self, peer_id: str) -> bool:
            self.looks += 1
            if self.looks == 1:
                raise RuntimeError("what nobody has thought of")
            self.again.set()
            return False

    async def scenario() -> None:
        roster = Looking()
        search = asyncio.ensure_future(Reunion(None, roster, replace(SETTINGS, silence_s=0.01)).run())  # type: ignore[arg-type]
        await asyncio.wait_for(roster.again.wait(), 10)
        search.cancel()

    asyncio.run(scenario())
    assert "what nobody has thought of" in caplog.text


def test_those_who_said_good_bye_are_not_looked_for(pair: tuple[Node, Node]) -> None:
    first, second = pair
    second.close(state="gone")

    async def expire() -> set[str]:
        roster = first._roster
        roster._arrived = dict.fromkeys(roster._arrived, time.monotonic() - 1000)
        roster._forget_expired()
        return set(roster.lost)

    assert not first._thread.run(expire(), timeout=5)
