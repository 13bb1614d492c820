"""Fetching a state from donors that die, lie, disagree, are slow or are busy; no sockets."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmkit.peers.donors import rank_donors
from swarmkit.peers.download import Download
from swarmkit.peers.errors import JoinFailed
from swarmkit.peers.manifest import PIECE_BYTES, Snapshot
from swarmkit.peers.roster import PeerRecord
from swarmkit.peers.transfer import Transfer

from .harness_transfers import SETTINGS, Net, a_state, with_own

pytestmark = pytest.mark.timeout(30)
SLOW = replace(SETTINGS, state_mbit=8 * PIECE_BYTES * 40 / 1e6)  # forty pieces a second


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 25))


def assert_same(found: Snapshot, wanted: Snapshot) -> None:
    assert found[0].keys() == wanted[0].keys()
    assert all(torch.equal(found[0][name], wanted[0][name]) for name in wanted[0])
    assert found[1] == wanted[1]


def test_a_state_arrives_whole_and_every_byte_once() -> None:
    async def scene() -> None:
        net, state = Net(), with_own(a_state(pieces=8.5), seed=1)
        net.donor("a", state)
        download = await net.peer("me").fetch(["a"])
        assert_same(download.snapshot(), state)
        assert download.received == download.size == sum(t.numel() * 4 for t in state[0].values())

    play(scene)


def test_two_donors_of_one_state_share_the_work() -> None:
    async def scene() -> None:
        net, state = Net(), a_state(pieces=60)
        donors = [net.donor(name, state, SLOW) for name in ("a", "b")]
        download = await net.peer("me").fetch(["a", "b"])
        assert_same(download.snapshot(), state)
        assert download.received == download.size
        assert all(donor.sent > download.size / 4 for donor in donors)

    play(scene)


@pytest.mark.parametrize("others", [1, 2])
def test_what_is_here_stays_when_a_donor_dies(others: int) -> None:
    async def scene() -> None:
        net, state = Net(), a_state(pieces=60)
        names = ["a", "b", "c"][: others + 1]
        for name in names:
            net.donor(name, state, SLOW)

        def kill(at: Transfer) -> None:
            if at.done > at.total / 2:
                net.peers["a"].dead.set()
            notes.append(at.note)

        notes: list[str] = []
        download = await net.peer("me").fetch(names, progress=kill)
        assert_same(download.snapshot(), state)
        assert download.received == download.size
        assert any("lost a donor" in note for note in notes)

    play(scene)


def test_of_a_dead_donors_own_state_what_is_whole_stays() -> None:
    async def scene() -> None:
        net, shared = Net(), a_state(pieces=20)
        states = {name: with_own(shared, seed=seed, parameters=20) for name, seed in (("a", 1), ("b", 2))}
        for name, state in states.items():
            net.donor(name, state, SLOW)

        def kill(at: Transfer) -> None:
            if at.done > at.total / 2:
                net.peers["a"].dead.set()

        download = await net.peer("me").fetch(["a", "b"], progress=kill)
        tensors, _ = download.snapshot()
        assert torch.equal(tensors["anchor/w"], shared[0]["anchor/w"])
        from_a = 0
        for i in range(20):
            # Both moments of a parameter are of one donor: a step made of two could be of any length.
            of = [
                next(name for name, (state, _) in states.items() if torch.equal(tensors[key], state[key]))
                for key in (f"inner/p{i}/exp_avg", f"inner/p{i}/exp_avg_sq")
            ]
            assert of[0] == of[1]
            from_a += of[0] == "a"
        assert 0 < from_a < 20
        # Two parameters' own state at most: one that was half here, and what came of the next.
        assert download.received - download.size <= 2 * 1.5 * PIECE_BYTES

    play(scene)


def test_a_state_of_another_round_starts_over_and_that_is_said() -> None:
    async def scene() -> None:
        net, old, new = Net(), a_state(1, pieces=40), a_state(2, pieces=40, round=4)
        net.donor("a", old, SLOW)
        me = net.peer("me")
        net.donor("b", new, SLOW)
        notes: list[str] = []

        def kill(at: Transfer) -> None:
            if at.done > at.total / 2:
                net.peers["a"].dead.set()
            notes.append(at.note)

        download = await me.fetch(["a", "b"], progress=kill)
        assert_same(download.snapshot(), new)
        assert any("another state" in note and "start over" in note for note in notes)

    play(scene)


def test_a_newer_state_is_taken_before_much_of_an_older_one_has_come() -> None:
    async def scene() -> None:
        net, old, new = Net(), a_state(1, pieces=40), a_state(2, pieces=40, round=4)
        net.donor("a", old, SLOW)
        net.donor("b", new, SLOW)
        download = await net.peer("me").fetch(["a", "b"])
        assert_same(download.snapshot(), new)
        assert download.received < 1.3 * download.size

    play(scene)


def test_a_damaged_piece_speaks_against_its_donor_and_another_is_used() -> None:
    async def scene() -> None:
        net, state = Net(), a_state(pieces=30)
        liar = net.donor("a", state, SLOW)
        net.donor("b", state, SLOW)
        liar.spoil = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        notes: list[str] = []
        download = await net.peer("me").fetch(["a", "b"], progress=lambda at: notes.append(at.note))
        assert_same(download.snapshot(), state)
        assert any("a: piece" in note and "damaged" in note for note in notes)
        assert download.received <= download.size + PIECE_BYTES

    play(scene)


def test_a_damaged_piece_of_the_only_donor_is_no_state() -> None:
    async def scene() -> None:
        net = Net()
        net.donor("a", a_state()).spoil = lambda data: b"\0" * len(data)
        with pytest.raises(JoinFailed, match="a: piece .* is damaged"):
            await net.peer("me").fetch(["a"])

    play(scene)


def test_the_majority_decides_between_states_of_one_round() -> None:
    async def scene() -> None:
        net, right = Net(), a_state(1)
        net.donor("liar", a_state(2))
        for name in ("a", "b"):
            net.donor(name, right)
        notes: list[str] = []
        download = await net.peer("me").fetch(["liar", "a", "b"], progress=lambda at: notes.append(at.note))
        assert_same(download.snapshot(), right)
        assert any("liar holds another state" in note for note in notes)

    play(scene)


def test_of_two_donors_that_differ_neither_is_used() -> None:
    async def scene() -> None:
        net = Net()
        net.donor("a", a_state(1))
        net.donor("b", a_state(2))
        with pytest.raises(JoinFailed, match="different states of the same round"):
            await net.peer("me").fetch(["a", "b"])

    play(scene)


def test_a_donor_that_hangs_gives_its_pieces_to_the_others() -> None:
    async def scene() -> None:
        net, state = Net(), a_state(pieces=30)
        net.donor("a", state, SLOW).hang = True
        net.donor("b", state, SLOW)
        started = asyncio.get_running_loop().time()
        download = await net.peer("me", replace(SETTINGS, stall_s=60.0)).fetch(["a", "b"])
        assert_same(download.snapshot(), state)
        assert asyncio.get_running_loop().time() - started < 8  # not the minute that a stalled stream may take

    play(scene)


def test_a_donor_that_hangs_alone_is_given_up_with_a_reason() -> None:
    async def scene() -> None:
        net = Net()
        net.donor("a", a_state()).hang = True
        with pytest.raises(JoinFailed, match="a sent nothing for"):
            await net.peer("me", replace(SETTINGS, stall_s=0.2)).fetch(["a"])

    play(scene)


def test_what_a_failed_fetch_has_left_is_not_fetched_again() -> None:
    async def scene() -> None:
        net, state = Net(), a_state(pieces=40)
        net.donor("a", state, SLOW)
        me, download = net.peer("me"), Download()

        def kill(at: Transfer) -> None:
            if at.done > at.total / 2:
                net.peers["a"].dead.set()

        with pytest.raises(JoinFailed, match="a is dead"):
            await me.fetch(["a"], download, kill)
        assert download.size / 2 < download.done < download.size
        net.donor("b", state, SLOW)
        await me.fetch(["b"], download)
        assert_same(download.snapshot(), state)
        assert download.received == download.size

    play(scene)


def test_sixteen_joiners_spread_over_four_donors() -> None:
    async def scene() -> None:
        net, state, names = Net(), a_state(pieces=8), ["a", "b", "c", "d"]
        fast = replace(SLOW, state_mbit=4 * SLOW.state_mbit)
        donors = [net.donor(name, state, fast) for name in names]
        joiners = [net.peer(f"joiner{i}") for i in range(16)]
        started = asyncio.get_running_loop().time()
        records = [PeerRecord(peer_id=name, state="training") for name in names]
        ranked = [rank_donors(records, joiner.peer_id) for joiner in joiners]
        downloads = await asyncio.gather(*(j.fetch(order) for j, order in zip(joiners, ranked, strict=True)))
        seconds = asyncio.get_running_loop().time() - started
        for download in downloads:
            assert_same(download.snapshot(), state)
            assert download.received == download.size
        assert max(donor.most_joiners for donor in donors) <= 6
        assert all(donor.sent > 0 for donor in donors)
        # A donor's share at its full rate is 4 states of 8 pieces at 160 a second.
        assert seconds < 2 * 4 * 8 / 160 + 1.5

    play(scene)


def test_joiners_that_all_ask_the_same_donor_first_go_on_to_the_next() -> None:
    async def scene() -> None:
        net, state, names = Net(), a_state(pieces=2), ["a", "b", "c"]
        donors = [net.donor(name, state, replace(SLOW, max_downloads=3)) for name in names]
        downloads = await asyncio.gather(*(net.peer(f"joiner{i}").fetch(names) for i in range(12)))
        assert all(download.is_complete for download in downloads)
        assert [donor.most_joiners for donor in donors] == [3, 3, 3]

    play(scene)


def test_donors_left_behind_are_asked_last() -> None:
    records = [
        PeerRecord(peer_id="behind", state="training", round=4),
        PeerRecord(peer_id="away", state="downloading 5 %", round=12),
        *(PeerRecord(peer_id=name, state="training", round=round) for name, round in (("x", 10), ("y", 9), ("me", 10))),
    ]
    for me in ("me", "me2"):
        assert rank_donors(records, me)[-1] == "behind"
    assert set(rank_donors(records, "me")) == {"x", "y", "behind"}


def test_who_finds_every_donor_busy_waits_for_a_place() -> None:
    async def scene() -> None:
        net, state = Net(), a_state(pieces=10)
        donor = net.donor("a", state, replace(SLOW, max_downloads=1))
        notes: list[str] = []
        downloads = await asyncio.gather(
            *(net.peer(f"joiner{i}").fetch(["a"], progress=lambda at: notes.append(at.note)) for i in range(3))
        )
        assert all(download.is_complete for download in downloads)
        assert donor.most_joiners == 1
        assert any("busy with other joiners" in note for note in notes)

    play(scene)


def test_a_download_tells_its_rate_and_what_is_left() -> None:
    async def scene() -> None:
        net = Net()
        net.donor("a", a_state(pieces=40), SLOW)
        seen: list[Transfer] = []
        await net.peer("me").fetch(["a"], progress=seen.append)
        assert [at.done for at in seen] == sorted(at.done for at in seen)
        assert seen[-1].done == seen[-1].total
        middle = seen[len(seen) // 2]
        assert middle.rate == pytest.approx(40 * PIECE_BYTES, rel=0.35)
        assert middle.eta_s == pytest.approx((middle.total - middle.done) / middle.rate)
        assert middle.donors == ("a",)

    play(scene)


def test_a_round_comes_before_a_download() -> None:
    async def scene() -> None:
        net, state = Net(), a_state(pieces=60)
        donor = net.donor("a", state, replace(SLOW, state_share=0.1))
        loop = asyncio.get_running_loop()
        times: dict[bool, list[float]] = {False: [], True: []}

        def watch(at: Transfer) -> None:
            times[donor.in_round].append(loop.time())
            donor.in_round = 0.6 < at.done / at.total < 0.7

        await net.peer("me").fetch(["a"], progress=watch)
        in_round = times[True][-1] - times[True][1]
        pieces = len(times[True]) - 2
        assert in_round / pieces > 5 / 40  # at least five times slower than outside

    play(scene)
