"""The peer cache: whole files, bounded, nothing that has expired, one run not taken for another."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmkit.peers import peer_cache
from swarmkit.peers.peer_cache import EXPIRE_S, MAX_PEERS, MAX_RUNS, PeerCache, Remembered
from swarmkit.peers.roster import PeerRecord

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def peer_id(number: int) -> str:
    """A well-formed peer id: the base58 of a sha2-256 multihash."""
    value, text = int.from_bytes(b"\x12\x20" + number.to_bytes(32, "big"), "big"), ""
    while value:
        value, digit = divmod(value, 58)
        text = BASE58[digit] + text
    return text


def address(number: int) -> str:
    return f"/ip4/10.0.{number // 250}.{number % 250 + 1}/tcp/31337/p2p/{peer_id(number)}"


def record(number: int) -> PeerRecord:
    return PeerRecord(peer_id=peer_id(number), address=address(number))


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def make(folder: Path, clock: Clock | None = None) -> PeerCache:
    return PeerCache(folder / "cache", clock=clock or Clock())


def test_a_run_is_recalled_by_any_address_that_it_was_ever_joined_or_seen_at(tmp_path: Path) -> None:
    cache = make(tmp_path)
    cache.note("mine", [address(0)], [record(1), record(2)])
    expected = Remembered(run="mine", addresses=[address(1), address(2)])
    assert cache.recall(None, [address(0)]) == expected
    assert cache.recall("mine", [address(9), address(2)]) == expected
    assert cache.recall("other", [address(0)]) == Remembered()
    assert cache.recall(None, [address(9)]) == Remembered()
    assert cache.recall("mine", []) == Remembered()


def test_who_was_seen_last_comes_first_and_the_expired_are_gone(tmp_path: Path) -> None:
    clock = Clock()
    cache = make(tmp_path, clock)
    cache.note("mine", [address(0)], [record(1)])
    clock.now += EXPIRE_S / 2
    cache.note("mine", [address(0)], [record(2)])
    assert cache.recall("mine", [address(0)]).addresses == [address(2), address(1)]
    clock.now += EXPIRE_S * 0.6
    assert cache.recall("mine", [address(0)]).addresses == [address(2)]
    clock.now += EXPIRE_S
    assert cache.recall("mine", [address(0)]).addresses == []


def test_a_new_run_of_an_old_name_inherits_nothing(tmp_path: Path) -> None:
    cache = make(tmp_path)
    cache.note("demo", [address(0)], [record(1)])
    cache.note("demo", [], [record(2)])
    assert cache.recall("demo", [address(2)]).addresses == [address(2)]
    assert cache.recall("demo", [address(1)]) == Remembered()
    # The same run is recognised by a single peer of before.
    cache.note("demo", [address(5)], [record(2), record(3)])
    assert set(cache.recall("demo", [address(5)]).addresses) == {address(2), address(3)}


def test_addresses_that_strangers_made_up_are_not_kept(tmp_path: Path) -> None:
    cache = make(tmp_path)
    bad = [
        PeerRecord(peer_id=peer_id(1), address=address(2)),  # another's
        PeerRecord(peer_id=peer_id(3), address=""),
        PeerRecord(peer_id=peer_id(3), address="/ip4/10.0.0.1/tcp/0/p2p/" + peer_id(3)),
        PeerRecord(peer_id=peer_id(3), address=f"/dns4/{'a' * 300}/tcp/1/p2p/{peer_id(3)}"),
    ]
    cache.note("mine", [address(0)], [*bad, record(4)])
    assert cache.recall("mine", [address(0)]).addresses == [address(4)]


def test_it_is_bounded_in_peers_and_runs(tmp_path: Path) -> None:
    cache = make(tmp_path)
    for first in range(0, 1000, 100):
        cache.note("big", [address(0)], [record(number) for number in range(first, first + 100)])
    assert len(cache.recall("big", [address(0)]).addresses) == MAX_PEERS
    [path] = (tmp_path / "cache").iterdir()
    assert path.stat().st_size < peer_cache.MAX_FILE_BYTES
    for number in range(MAX_RUNS + 5):
        cache.note(f"run/{number}", [address(0)], [record(1)])
    assert len(list((tmp_path / "cache").iterdir())) == MAX_RUNS


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=st.one_of(st.binary(max_size=200), st.recursive(
    st.none() | st.integers() | st.text(max_size=8) | st.sampled_from(["run", "seen", "known"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["run", "seen", "known", "x"]), inner),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode())))  # fmt: skip
def test_a_damaged_file_is_no_cache_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    cache = make(tmp_path)
    cache.note("mine", [address(0)], [record(1)])
    [path] = (tmp_path / "cache").glob("mine-*.json")
    path.write_bytes(content)
    assert cache.recall("mine", [address(0)]) == Remembered()
    cache.note("mine", [address(0)], [record(1)])
    assert cache.recall("mine", [address(0)]).addresses == [address(1)]
    assert not list((tmp_path / "cache").glob(".*"))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(tmp_path)
    cache.note("mine", [address(0)], [record(1)])

    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        cache.note("mine", [address(0)], [record(2)])
    assert cache.recall("mine", [address(0)]).addresses == [address(1)]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    make(tmp_path).note("mine", [address(0)], [record(1)])
    [path] = (tmp_path / "cache").iterdir()
    assert path.stat().st_mode & 0o077 == 0
