"""What strangers may ask of a peer for their check-up is little, and never to dial anybody but themselves."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmkit.peers import checkup
from swarmkit.peers.budget import MAX_CALLERS, Budget, SharedBudget
from swarmkit.peers.checkup import BYTES_EACH, DIALS_EACH, MAX_CHUNK_BYTES, Checkup, dial, observed_hosts
from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.examination import MAX_BYTES, examine, measure_rate
from swarmkit.peers.node import Node
from swarmkit.peers.rpc import Handler
from swarmkit.peers.settings import NetworkSettings

from .test_preflight import free_port


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class FakeRpc:
    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    def handle(self, method: str, handler: Handler, *, onlookers: bool = False) -> None:
        self.handlers[method] = handler

    def ask(self, caller: str, method: str, **message: object) -> dict[str, Any]:
        return asyncio.run(self.handlers[f"checkup.{method}"](caller, message))  # type: ignore[arg-type]


class FakeP2P:
    """p2pd's list of connections."""

    def __init__(self, **addresses: list[str]) -> None:
        self.addresses = addresses

    async def list_peers(self) -> list[Any]:
        return [
            SimpleNamespace(peer_id=SimpleNamespace(to_base58=lambda name=name: name), addrs=found)
            for name, found in self.addresses.items()
        ]


def serve(clock: Clock | None = None, **addresses: list[str]) -> FakeRpc:
    rpc = FakeRpc()
    Checkup(rpc, FakeP2P(**addresses), clock=clock or Clock())  # type: ignore[arg-type]
    return rpc


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 200)), max_size=60))
def test_a_budget_never_gives_more_than_its_capacity_and_what_has_come_in(asks: list[tuple[float, float]]) -> None:
    clock = Clock()
    budget = Budget(100.0, 60.0, clock=clock)
    began, taken = clock.now, 0.0
    for pause, amount in asks:
        clock.now += pause
        if budget.has(amount):
            budget.spend(amount)
            taken += amount
        assert taken <= 100.0 + (clock.now - began) * 100.0 / 60.0 + 1e-6


def test_many_callers_together_have_a_limit_too() -> None:
    clock = Clock()
    budget = SharedBudget(10, 25, 60.0, clock=clock)
    assert budget.take("a", 10)
    assert not budget.take("a", 1)
    assert budget.take("b", 10)
    assert not budget.take("c", 10)
    assert budget.take("c", 5)
    clock.now += 60
    assert budget.take("a", 10)
    for number in range(3 * MAX_CALLERS):
        budget.take(str(number), 0)
    assert len(budget._callers) <= MAX_CALLERS


def test_bytes_are_rationed_in_both_directions() -> None:
    clock = Clock()
    rpc = serve(clock)
    assert rpc.ask("a", "upload", payload=bytes(1000)) == {"size": 1000}
    assert len(rpc.ask("a", "download", size=MAX_CHUNK_BYTES)["payload"]) == MAX_CHUNK_BYTES
    for _ in range(BYTES_EACH // MAX_CHUNK_BYTES - 2):
        rpc.ask("a", "download", size=MAX_CHUNK_BYTES)
    with pytest.raises(ProtocolError, match="enough bytes for this minute"):
        rpc.ask("a", "download", size=MAX_CHUNK_BYTES)
    assert rpc.ask("b", "upload", payload=b"x") == {"size": 1}
    clock.now += 60
    assert rpc.ask("a", "upload", payload=b"x") == {"size": 1}
    # An honest examination needs no more than a caller has.
    assert 2 * (MAX_BYTES + (32 << 10)) < BYTES_EACH


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("upload", {"payload": bytes(MAX_CHUNK_BYTES + 1)}),
        ("upload", {"payload": "text"}),
        ("upload", {}),
        ("download", {"size": MAX_CHUNK_BYTES + 1}),
        ("download", {"size": -1}),
        ("download", {"size": 10.5}),
        ("dial", {"port": 0}),
        ("dial", {"port": 70_000}),
        ("dial", {"port": "22"}),
    ],
)
def test_what_is_out_of_range_is_refused(method: str, message: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        serve(a=["/ip4/127.0.0.1/tcp/9"]).ask("a", method, **message)


def test_only_the_callers_own_direct_addresses_are_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[tuple[str, int]] = []

    async def note(host: str, port: int) -> str:
        dialled.append((host, port))
        return "open"

    monkeypatch.setattr(checkup, "dial", note)
    rpc = serve(
        caller=[
            "/ip4/198.51.100.7/tcp/5001",
            "/ip4/198.51.100.7/tcp/5002",
            "/ip4/203.0.113.1/tcp/4001/p2p/QmRelay/p2p-circuit",
        ],
        other=["/ip4/192.0.2.9/tcp/31337"],
        relayed=["/ip4/203.0.113.1/tcp/4001/p2p/QmRelay/p2p-circuit"],
    )
    # Whatever else the message says.
    wanted = {"host": "192.0.2.9", "address": "/ip4/192.0.2.9/tcp/22", "outcomes": {}}
    assert rpc.ask("caller", "dial", port=31337, **wanted) == {"outcomes": {"198.51.100.7": "open"}}
    assert dialled == [("198.51.100.7", 31337)]
    assert rpc.ask("relayed", "dial", port=22) == {"outcomes": {}}
    assert rpc.ask("unknown", "dial", port=22) == {"outcomes": {}}
    assert len(dialled) == 1
    for port in range(1, DIALS_EACH):
        rpc.ask("caller", "dial", port=port)
    with pytest.raises(ProtocolError, match="enough dials"):
        rpc.ask("caller", "dial", port=80)
    assert len(dialled) == DIALS_EACH


@given(st.lists(st.text(alphabet="/ip46dns.:tcp1270-circut", max_size=40), max_size=5))
def test_odd_addresses_are_left_out(addresses: list[str]) -> None:
    for host in observed_hosts(addresses):
        assert socket.getaddrinfo(host, 1, flags=socket.AI_NUMERICHOST)


def test_addresses_that_name_many_hosts_are_left_out() -> None:
    odd = ["/dns4/example.org/tcp/1", "/ip4/0.0.0.0/tcp/1", "/ip4/224.0.0.1/tcp/1", "/ip4", "", "/ip6/::1/tcp/1"]
    assert observed_hosts(odd) == ["::1"]


def test_a_port_is_told_open_closed_or_other() -> None:
    node = Node.start("dial")
    try:
        port = int(node.addresses[0].split("/tcp/")[1].split("/")[0])
        assert asyncio.run(dial("127.0.0.1", port)) == "open"
        assert asyncio.run(dial("127.0.0.1", free_port())) == "closed"
    finally:
        node.close()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        assert asyncio.run(dial("127.0.0.1", server.getsockname()[1])) == "other"
        thread.join()


@pytest.mark.parametrize(("bytes_per_s", "at_least"), [(2e5, False), (1e9, True)])
def test_a_measured_rate_is_that_of_the_link_and_its_bytes_are_bounded(bytes_per_s: float, at_least: bool) -> None:
    moved, free_at = 0, 0.0

    async def move(size: int) -> None:
        nonlocal moved, free_at
        moved += size
        loop = asyncio.get_running_loop()
        free_at = max(free_at, loop.time()) + size / bytes_per_s
        await asyncio.sleep(free_at - loop.time())

    started = time.monotonic()
    rate = asyncio.run(measure_rate(move))
    assert time.monotonic() - started < 4
    assert moved <= MAX_BYTES + (512 << 10)
    assert rate.at_least is at_least
    if not at_least:
        assert 0.7 * bytes_per_s < rate.bytes_per_s < 1.1 * bytes_per_s


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    first = Node.start("examined", settings=NetworkSettings(heartbeat_s=0.5))
    try:
        second = Node.start(initial_peers=first.addresses, role="observer")
        try:
            yield first, second
        finally:
            second.close()
    finally:
        first.close()


def test_an_examination_of_two_real_peers(pair: tuple[Node, Node]) -> None:
    helper, patient = pair
    port = int(patient.addresses[0].split("/tcp/")[1].split("/")[0])
    closed = free_port()
    found = examine(patient, [port, closed], timeout=15)
    assert found.problems == {}
    assert found.peer_id == helper.peer_id
    assert found.rtt_s is not None
    assert 0 < found.rtt_s < 1
    assert found.skew_s is not None
    assert abs(found.skew_s) <= found.rtt_s
    assert found.upload is not None
    assert found.download is not None
    assert min(found.upload.bytes_per_s, found.download.bytes_per_s) > 1e5
    assert found.dials == {port: {"127.0.0.1": "open"}, closed: {"127.0.0.1": "closed"}}


def test_a_peer_that_helps_nobody_is_said_to(pair: tuple[Node, Node]) -> None:
    helper, patient = pair
    helper._rpc._handlers.clear()
    found = examine(patient, [1], timeout=10)
    assert found.peer_id == ""
    assert "unknown method" in found.problems["help"]
