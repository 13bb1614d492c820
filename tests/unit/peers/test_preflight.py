"""Addresses are checked, and whether anything listens there."""

import asyncio
import socket

import pytest

from swarmkit.peers.errors import ClosedPort, UnknownName
from swarmkit.peers.preflight import check_address, split_peer_id, why_unreachable

PEER = "QmTTSmGoWvbDzYNU4GSLsPUw8sk6xRZBN71BrEkQ2HxvVc"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("garbage", "it looks like"),
        ("203.0.113.5:31337", "it looks like"),
        ("/ip4/203.0.113.5/tcp/31337", "no /p2p/ peer id"),
        (f"/ip4/203.0.113.5/tcp/0/p2p/{PEER}", "port 0"),
        (f"/ip4/203.0.113.5/tcp/99999/p2p/{PEER}", "port 99999"),
        (f"/ip4/300.0.113.5/tcp/31337/p2p/{PEER}", "not an IP address"),
        (f"/ip4/203.0.113.5/tcp/31337/p2p/{PEER[:-1]}", "only a part of one"),
        (f"/ip4/203.0.113.5/tcp/31337/p2p/{PEER[:-4]}/p2p-circuit/p2p/{PEER}", "only a part of one"),
    ],
)
def test_a_malformed_address_is_refused_with_the_reason(address: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_address(address)


@pytest.mark.parametrize("peer", [PEER, "12D3KooWB89EF4eK5Cp2C1HTsx7LPxVCCiMB3zU4WghNzpGsEouY"])
def test_an_address_is_split_into_what_is_dialled_and_who_is_expected(peer: str) -> None:
    relayed = f"/dns4/relay.example/tcp/4001/p2p/{PEER}/p2p-circuit/p2p/{peer}"
    assert check_address(relayed) == ("relay.example", 4001)
    assert split_peer_id(relayed) == (f"/dns4/relay.example/tcp/4001/p2p/{PEER}/p2p-circuit", peer)
    assert check_address(f"/ip6/::1/tcp/4001/p2p/{peer}") == ("::1", 4001)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_closed_port_is_told_from_a_name_that_does_not_resolve() -> None:
    closed = asyncio.run(why_unreachable(f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{PEER}"))
    assert isinstance(closed, ClosedPort)
    assert "nothing listens on port" in str(closed)
    unknown = asyncio.run(why_unreachable(f"/dns4/no-such-host.invalid/tcp/31337/p2p/{PEER}"))
    assert isinstance(unknown, UnknownName)
    assert "cannot be resolved" in str(unknown)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert asyncio.run(why_unreachable(f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{PEER}")) is None
