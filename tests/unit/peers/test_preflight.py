"""A failed join names its cause."""

import asyncio
import socket

import pytest

from swarmkit.peers.errors import JoinFailed
from swarmkit.peers.node import Node
from swarmkit.peers.preflight import check_address, find_reachable
from swarmkit.peers.settings import NetworkSettings

PEER = "QmW9eVnKzTBtQNsYmSAMPLEPeerXdentity123456789abc"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("garbage", "it looks like"),
        ("203.0.113.5:31337", "it looks like"),
        ("/ip4/203.0.113.5/tcp/31337", "no /p2p/ peer id"),
        (f"/ip4/203.0.113.5/tcp/0/p2p/{PEER}", "port 0"),
        (f"/ip4/203.0.113.5/tcp/99999/p2p/{PEER}", "port 99999"),
        (f"/ip4/300.0.113.5/tcp/31337/p2p/{PEER}", "not an IP address"),
    ],
)
def test_a_malformed_address_is_refused_with_the_reason(address: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_address(address)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_closed_port_is_told_from_a_name_that_does_not_resolve() -> None:
    closed = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{PEER}"
    with pytest.raises(JoinFailed, match="nothing listens on port"):
        asyncio.run(find_reachable([closed]))
    unknown = f"/dns4/no-such-host.invalid/tcp/31337/p2p/{PEER}"
    with pytest.raises(JoinFailed, match="cannot be resolved"):
        asyncio.run(find_reachable([unknown]))


def test_one_live_bootstrap_peer_among_dead_ones_is_enough() -> None:
    first = Node.start("preflight", settings=NetworkSettings())
    try:
        dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{PEER}"
        second = Node.start("preflight", initial_peers=[dead, first.addresses[0]])
        try:
            assert second.wait_for_peers(0, timeout=1)
            assert first.peer_id in {record.peer_id for record in second.table()}
        finally:
            second.close()
    finally:
        first.close()


def test_a_live_host_with_another_peer_id_is_said_to_be_another_peer() -> None:
    first = Node.start("preflight")
    other = Node.start("preflight")
    try:
        wrong = first.addresses[0].rsplit("/", 1)[0] + "/" + other.peer_id
        with pytest.raises(JoinFailed, match="it is not that peer"):
            Node.start("preflight", initial_peers=[wrong])
    finally:
        first.close()
        other.close()
