"""Who is taken for dead, and on what evidence."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from swarmkit.peers.access import Access
from swarmkit.peers.errors import PeerUnreachable
from swarmkit.peers.identity import Identity
from swarmkit.peers.roster import PeerRecord, Roster
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.wire import Message

pytestmark = pytest.mark.timeout(30)
ME, OTHER = (
    "12D3KooWJ838ZD7oYTQa4ijtbPJH9RP1Yh4VSMPVpvCoQN1H67iF",
    "12D3KooWAAwZomSdg5PTD5et8M6UdsLA6Pn6tenGfow4uc3sYcCi",
)
SETTINGS = NetworkSettings(silence_s=0.4, round_timeout_s=8)


class FakeRpc:
    """Fails as it is told to."""

    def __init__(self, fail: Callable[[], Awaitable[None]]) -> None:
        self.fail = fail
        self.calls = 0
        self.access = Access(Identity.generate(), None)

    def handle(self, method: str, handler: object, *, onlookers: bool = False) -> None:
        pass

    async def call(self, peer_id: str, method: str, message: Message, *, timeout: float) -> Message:
        self.calls += 1
        await self.fail()
        return {}


def roster(fail: Callable[[], Awaitable[None]], address: str) -> Roster:
    mine = PeerRecord(peer_id=ME, state="training")
    made = Roster(None, FakeRpc(fail), "run", SETTINGS, mine)  # type: ignore[arg-type]
    made._table[OTHER] = PeerRecord(peer_id=OTHER, state="training", address=address)
    made._arrived[OTHER] = time.monotonic()
    return made


async def at_once() -> None:
    raise PeerUnreachable("all dials failed: dial backoff")


def in_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))  # type: ignore[arg-type]


def test_a_peer_whose_port_is_closed_is_dead_at_once() -> None:
    async def scenario() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            made = roster(at_once, f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/{OTHER}")
            assert await made.is_alive(OTHER)
            assert not await made.is_alive(OTHER)
            made.suspect(OTHER)
            assert made.silent() == set()

    in_loop(scenario)


@pytest.mark.parametrize("circuit", ["", "/p2p-circuit"])
def test_a_dial_that_libp2p_refuses_says_nothing_of_the_peer(circuit: str) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            made = roster(at_once, f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{OTHER}{circuit}")
            started = time.monotonic()
            while await made.is_alive(OTHER):
                assert time.monotonic() - started < 10
                await asyncio.sleep(0)
            # Not its word, but its silence.
            assert time.monotonic() - started >= SETTINGS.silence_s
            made.suspect(OTHER)
            assert made.silent() == {OTHER}

    in_loop(scenario)


def test_a_process_that_stood_still_takes_nobody_for_dead() -> None:
    async def asleep() -> None:
        time.sleep(3 * SETTINGS.silence_s)  # the whole loop, as when a laptop sleeps
        raise PeerUnreachable("no answer in time")

    async def scenario() -> None:
        made = roster(asleep, "")
        assert await made.is_alive(OTHER)
        assert await made.is_alive(OTHER)

        async def unheard() -> None:
            await asyncio.sleep(SETTINGS.silence_s / 2)
            raise PeerUnreachable("no answer in time")

        made._rpc.fail = unheard  # type: ignore[attr-defined]
        assert await made.is_alive(OTHER)
        while await made.is_alive(OTHER):
            pass

    in_loop(scenario)


def test_a_peer_that_answers_again_starts_from_nothing() -> None:
    async def scenario() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            made = roster(at_once, f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/{OTHER}")
            assert await made.is_alive(OTHER)
            made.heard_from(OTHER)
            assert await made.is_alive(OTHER)

    in_loop(scenario)


def test_who_closes_the_rounds_hears_last_who_leaves() -> None:
    """Or a round could close without the one that leaves before the others know why."""
    told: list[str] = []

    async def scenario() -> None:
        made = roster(at_once, "")
        third = Identity.generate().peer_id
        made._table[third] = PeerRecord(peer_id=third, state="training", joined_at=1.0)
        assert made.coordinator() == OTHER

        async def nothing() -> None:
            pass

        async def tell(peer_id: str) -> None:
            for _ in range(20 if peer_id == third else 0):
                await asyncio.sleep(0)
            told.append(peer_id)

        made.refresh, made.beat, made._tell = nothing, nothing, tell  # type: ignore[method-assign]
        await made.announce("evaluating")
        assert told == [OTHER, third]
        told.clear()
        await made.announce("draining")
        assert told == [third, OTHER]

    in_loop(scenario)
