"""A peer gets in through any address that works, and hears of every other one why it does not."""

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swarmkit.peers.entry import _Target, explain_dial
from swarmkit.peers.errors import (
    ClosedPort,
    DaemonFailed,
    JoinFailed,
    NoAnswer,
    NotAPeer,
    OtherVersion,
    UnknownName,
    UnknownRun,
    WrongPeerId,
)
from swarmkit.peers.node import Node
from swarmkit.peers.settings import NetworkSettings

from .test_preflight import free_port

STRANGER = "12D3KooWB89EF4eK5Cp2C1HTsx7LPxVCCiMB3zU4WghNzpGsEouY"
RELAYED = "/ip4/127.0.0.1/tcp/4001/p2p/QmTTSmGoWvbDzYNU4GSLsPUw8sk6xRZBN71BrEkQ2HxvVc/p2p-circuit"
BOUND_S = 15.0


@pytest.fixture(scope="module")
def first() -> Iterator[Node]:
    node = Node.start("entry", settings=NetworkSettings(heartbeat_s=0.5))
    yield node
    node.close()


def settings(folder: Path, **values: object) -> NetworkSettings:
    return replace(NetworkSettings(peer_cache=str(folder), heartbeat_s=0.5), **values)


def at(port: int, peer: str = STRANGER) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"


def refused(*addresses: str, **options: object) -> JoinFailed:
    """The error of a join, which must come in time."""
    started = time.monotonic()
    with pytest.raises(JoinFailed) as told:
        Node.start("entry", initial_peers=addresses, **options)  # type: ignore[arg-type]
    assert time.monotonic() - started < BOUND_S
    return told.value


def test_another_peer_at_the_address_is_named_with_the_line_to_use_instead(first: Node) -> None:
    right = first.addresses[0]
    wrong = right.replace(first.peer_id, STRANGER)
    error = refused(wrong)
    assert type(error) is WrongPeerId
    assert f"the host answers as {first.peer_id}, expected {STRANGER}" in str(error)
    assert str(error).endswith(f"use {right}")


def test_what_is_no_libp2p_host_is_said_to_be_no_peer() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        server.RequestHandlerClass.log_message = lambda *args: None  # type: ignore[method-assign]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        error = refused(at(server.server_port))
        server.shutdown()
    assert type(error) is NotAPeer
    assert "does not speak libp2p" in str(error)


def test_what_accepts_and_says_nothing_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = refused(at(silent.getsockname()[1]))
    assert type(error) is NotAPeer
    assert "says nothing" in str(error)


def test_different_causes_are_all_told() -> None:
    closed, unknown = at(free_port()), f"/dns4/no-such-host.invalid/tcp/1/p2p/{STRANGER}"
    error = refused(closed, unknown)
    assert type(error) is JoinFailed
    assert f"{closed}: 127.0.0.1 is up but nothing listens" in str(error)
    assert f"{unknown}: the name no-such-host.invalid cannot be resolved" in str(error)
    assert type(refused(closed, at(free_port()))) is ClosedPort


def test_one_live_address_among_dead_ones_is_enough_and_the_dead_ones_are_told(first: Node) -> None:
    dead = [at(free_port()), first.addresses[0].replace(first.peer_id, STRANGER)]
    started = time.monotonic()
    second = Node.start("entry", initial_peers=[*dead, first.addresses[0]])
    try:
        assert time.monotonic() - started < 20
        assert second.entry.live == [first.addresses[0]]
        assert sorted(type(failure).__name__ for failure in second.entry.dead) == ["ClosedPort", "WrongPeerId"]
        assert len(second.entry.notes) == 2
        assert first.peer_id in {record.peer_id for record in second.refresh()}
    finally:
        second.close()


def wait_until_remembered(folder: Path, *nodes: Node) -> None:
    deadline = time.monotonic() + 20
    while True:
        text = "".join(path.read_text() for path in folder.glob("*.json"))
        if all(node.peer_id in text for node in nodes):
            return
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def test_when_all_given_addresses_are_dead_a_peer_seen_before_lets_it_in(tmp_path: Path) -> None:
    gone = Node.start("cached", settings=NetworkSettings(heartbeat_s=0.5))
    stays = Node.start("cached", initial_peers=gone.addresses, settings=NetworkSettings(heartbeat_s=0.5))
    try:
        visitor = Node.start(initial_peers=gone.addresses, settings=settings(tmp_path))
        wait_until_remembered(tmp_path, gone, stays)
        visitor.close()
        given = gone.addresses
        gone.close()
        with pytest.raises(ClosedPort):
            Node.start(initial_peers=given, existing=True)
        back = Node.start(initial_peers=given, settings=settings(tmp_path), existing=True)
        try:
            assert back.run == "cached"
            assert back.entry.live == stays.addresses
            assert "seen in it before" in back.entry.notes[-1]
            assert stays.peer_id in {record.peer_id for record in back.refresh()}
        finally:
            back.close()
        # The cache is for the run that these addresses were of, not for any.
        with pytest.raises(ClosedPort):
            Node.start(initial_peers=[at(free_port())], settings=settings(tmp_path), existing=True)
    finally:
        gone.close()
        stays.close()


def test_a_second_peer_with_the_same_identity_file_is_refused(first: Node, tmp_path: Path) -> None:
    mine = settings(tmp_path / "cache", identity=str(tmp_path / "key"))
    original = Node.start("entry", initial_peers=first.addresses, settings=mine)
    peer_id = original.peer_id
    try:
        error = refused(*first.addresses, settings=mine)
        assert type(error) is DaemonFailed
        assert f"network.identity={tmp_path / 'key'}: a peer with this identity ({peer_id}) is up already" in str(error)
    finally:
        original.close()
    again = Node.start("entry", initial_peers=first.addresses, settings=mine)
    assert again.peer_id == peer_id
    again.close()


def test_other_causes_have_kinds_of_their_own(first: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    lobby = Node.start("lobby", role="bootstrap")
    try:
        assert type(refused(*lobby.addresses, existing=True)) is UnknownRun
    finally:
        lobby.close()
    first.announce("training")
    from swarmkit.peers import directory

    first._thread.run(directory.announce_run(first._dht, "entry", first._access.identity), timeout=10)
    monkeypatch.setattr(directory, "PROTOCOL", directory.PROTOCOL + 1)
    assert type(refused(*first.addresses, existing=True)) is OtherVersion


def test_a_relay_that_does_not_know_the_peer_is_named(first: Node) -> None:
    error = refused(f"{first.addresses[0]}/p2p-circuit/p2p/{STRANGER}")
    assert type(error) is NoAnswer
    assert "the relay does not lead to that peer" in str(error)


def test_a_relay_is_encoded_as_go_libp2p_reads_it() -> None:
    # /ip4 127.0.0.1 /tcp 4001 /p2p <34 bytes: a multihash> /p2p-circuit; the codes are those of multiformats' table.
    encoded = _Target(RELAYED).to_bytes()
    assert encoded[:8] == bytes.fromhex("047f000001060fa1")
    assert encoded[8:11] == bytes.fromhex("a50322")
    assert encoded[11:13] == bytes.fromhex("1220")
    assert encoded[45:] == bytes.fromhex("a202")


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ("all dials failed\n * [/ip4/1.2.3.4/tcp/5] dial tcp4 1.2.3.4:5: connect: connection refused", ClosedPort),
        ("all dials failed\n * [/ip4/1.2.3.4/tcp/5] dial tcp4 1.2.3.4:5: i/o timeout", NoAnswer),
        ("all dials failed\n * [/ip4/1.2.3.4/tcp/5] dial tcp4: connect: network is unreachable", NoAnswer),
        ("failed to dial X: no good addresses", UnknownName),
        ("all dials failed\n * [/ip4/1.2.3.4/tcp/5] failed to negotiate security protocol: EOF", NotAPeer),
        ("something new", JoinFailed),
    ],
)
def test_every_text_of_p2pd_has_a_kind(told: str, kind: type[JoinFailed]) -> None:
    error = explain_dial(at(5), f"Connect failed. msg=failed to dial: {told}")
    assert type(error) is kind
    assert at(5) in str(error)
