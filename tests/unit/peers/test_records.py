"""Signed records: nobody stores anything in another's name, and an old record is not taken twice."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict

import msgpack
import pytest

from swarmkit.peers import roster as roster_module
from swarmkit.peers.access import Access
from swarmkit.peers.engine import DHTID, DHTRecord
from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.identity import Identity
from swarmkit.peers.records import MAX_LIFETIME_S, Guard, seal, unseal
from swarmkit.peers.roster import PURPOSE, PeerRecord, Roster, peers_key
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.wire import encode

ME, OTHER = Identity.generate(), Identity.generate()


def test_a_record_is_of_who_signed_it_for_its_purpose_and_run() -> None:
    data = seal(ME, "heartbeat", "run", b"body")
    assert unseal(ME.peer_id, "heartbeat", "run", data) == (b"body", b"")
    for peer_id, purpose, run in (
        (OTHER.peer_id, "heartbeat", "run"),
        (ME.peer_id, "configuration", "run"),
        (ME.peer_id, "heartbeat", "other"),
    ):
        with pytest.raises(ProtocolError, match="has not signed"):
            unseal(peer_id, purpose, run, data)
    for rubbish in (None, b"", b"\xff" * 50, encode({"body": b"x"}), "text"):
        with pytest.raises(ProtocolError):
            unseal(ME.peer_id, "heartbeat", "run", rubbish)


def entry(subkey: object, value: object, *, key: str = "run.peers", expires: float = 60.0) -> DHTRecord:
    return DHTRecord(DHTID.generate(key).to_bytes(), msgpack.packb(subkey), msgpack.packb(value), expires)


def test_the_dht_keeps_only_what_its_owner_signed() -> None:
    guard = Guard({"run.peers": ("heartbeat", "run")}, lambda: 0.0)
    mine = seal(ME, "heartbeat", "run", b"body")
    assert guard.validate(entry(ME.peer_id, mine))
    assert guard.validate(entry(f"{ME.peer_id}/more", mine))
    # In another's name, rubbish, a plain value that would take everybody's place, one that expires too late.
    assert not guard.validate(entry(OTHER.peer_id, mine))
    assert not guard.validate(entry(ME.peer_id, b"rubbish"))
    assert not guard.validate(entry(None, mine))
    assert not guard.validate(entry(ME.peer_id, mine, expires=MAX_LIFETIME_S + 1))
    assert not guard.validate(entry(ME.peer_id, mine, expires=float("inf")))
    # What lies under keys of others is theirs, as long as it is small.
    assert guard.validate(entry("anything", b"x", key="elsewhere"))
    assert not guard.validate(entry("anything", b"x" * 400_000, key="elsewhere"))


class FakeRpc:
    def __init__(self) -> None:
        self.access = Access(ME, None)
        self.peer_id = ME.peer_id

    def handle(self, method: str, handler: object, *, onlookers: bool = False) -> None:
        pass


def in_loop(scenario: Callable[[], None]) -> None:
    async def run() -> None:
        scenario()

    asyncio.run(run())


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def at(seconds: float) -> None:
        monkeypatch.setattr(roster_module, "get_dht_time", lambda: seconds)
        monkeypatch.setattr(roster_module.time, "monotonic", lambda: seconds)

    return at


def test_an_old_record_is_not_taken_again_even_when_its_peer_was_forgotten(now: Callable[[float], None]) -> None:
    def scenario() -> None:
        now(1000.0)
        settings = NetworkSettings(heartbeat_s=1.0, silence_s=1.0)
        roster = Roster(None, FakeRpc(), "run", settings, PeerRecord(peer_id=ME.peer_id))  # type: ignore[arg-type]

        def beat(at: float, **values: object) -> bytes:
            record = PeerRecord(peer_id=OTHER.peer_id, state="training", updated_at=at, **values)  # type: ignore[arg-type]
            return seal(OTHER, PURPOSE, "run", encode(asdict(record)))

        def there() -> list[str]:
            return [record.peer_id for record in roster.table() if record.peer_id != ME.peer_id]

        old, new = beat(1000.0), beat(1001.0, step=5)
        for data in (old, new, old):
            roster._accept(OTHER.peer_id, data)
        assert [record.step for record in roster.table() if record.peer_id == OTHER.peer_id] == [5]
        now(1020.0)
        roster._forget_expired()
        assert there() == []
        for data in (old, new):
            roster._accept(OTHER.peer_id, data)
        assert there() == [], "a replay brings nobody back"
        roster._accept(OTHER.peer_id, beat(1019.0))
        assert there() == [OTHER.peer_id]
        # Whoever has never heard of the peer refuses what is old as well.
        fresh = Roster(None, FakeRpc(), "run", settings, PeerRecord(peer_id=ME.peer_id))  # type: ignore[arg-type]
        now(1200.0)
        fresh._accept(OTHER.peer_id, beat(1019.0))
        assert len(fresh.table()) == 1

    in_loop(scenario)


def test_a_peer_cannot_speak_for_another(now: Callable[[float], None]) -> None:
    def scenario() -> None:
        now(1000.0)
        roster = Roster(None, FakeRpc(), "run", NetworkSettings(), PeerRecord(peer_id=ME.peer_id))  # type: ignore[arg-type]
        record = PeerRecord(peer_id=OTHER.peer_id, state="gone", updated_at=1000.0)
        liar = Identity.generate()
        roster._accept(OTHER.peer_id, seal(liar, PURPOSE, "run", encode(asdict(record))))
        roster._accept(liar.peer_id, seal(liar, PURPOSE, "run", encode(asdict(record))))
        roster._accept(OTHER.peer_id, encode(asdict(record)))
        assert len(roster.table()) == 1
        assert peers_key("run") == "run.peers"

    in_loop(scenario)
