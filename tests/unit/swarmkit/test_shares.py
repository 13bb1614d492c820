"""Lost and doubled samples are counted exactly, whoever comes, goes, dies or holds a share twice."""

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkit.data.ledger import Ledger
from swarmkit.events import PeerEvents
from swarmkit.optim.round_report import RoundReport
from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.shares import MAX_RANGES, Coverage, Range, Shares, SharesExchange, cover
from swarmkit.report import _data
from swarmkit.shares import read_data
from swarmkit.strategy import DeMoConfig, DiLoCoConfig, SyncConfig
from swarmkit.taken import samples_taken
from tests.unit.swarmkit.harness_replicas import small_config

SLOTS = 3


@dataclass
class Peer:
    name: str
    slot: int
    ledger: Ledger = field(default_factory=Ledger)


class Membership:
    """Peers of which every sample that a round took is kept in a set, beside what the product's records say of it."""

    def __init__(self) -> None:
        self.alive: dict[str, Peer] = {}
        self.learnt: Counter[tuple[int, int]] = Counter()
        self.extra = self.redrawn = 0
        self.heard = Shares()  # what the others know from heartbeats
        self.records: dict[str, PeerEvents] = {}
        self.rounds = self.names = 0
        self.time = 0.0

    def emit(self, peer: Peer, kind: str, **fields: Any) -> None:
        self.time += 1
        record = self.records.setdefault(peer.name, PeerEvents(peer.name))
        record.by_kind[kind].append({"kind": kind, "peer": peer.name, "time": self.time, **fields})

    def join(self, slot: int | None) -> None:
        """Into the lowest free slot, or into one whose holder this peer has not heard of."""
        taken = {peer.slot for peer in self.alive.values()}
        if slot is None:
            slot = next(number for number in range(len(taken) + 1) if number not in taken)
        self.names += 1
        peer = Peer(f"peer-{self.names}", slot)
        peer.ledger.begin(self.heard.mark(slot) or 0)
        self.alive[peer.name] = peer
        self.emit(peer, "run_start", slot=slot, slots=SLOTS, data_from=peer.ledger.first)
        self.beat(peer)

    def beat(self, peer: Peer) -> None:
        self.heard.note(peer.name, Range(peer.slot, peer.ledger.first, peer.ledger.mark))

    def close_round(self, failed: bool, dying: Peer | None) -> None:
        """All meet; one may die after the round has closed and before it has written anything of it."""
        if dying is not None and len(self.alive) < 2:
            dying = None  # nobody would be left who had its result
        members = list(self.alive)
        weights = [peer.ledger.position - peer.ledger.mark for peer in self.alive.values()]
        for peer, weight in zip(list(self.alive.values()), weights, strict=True):
            if not failed:
                start = peer.ledger.mark
                self.extra += weight * (peer.slot >= SLOTS)
                self.learnt.update((peer.slot, start + k) for k in range(weight) if peer.slot < SLOTS)
            if peer is dying:
                continue
            peer.ledger.learn(0 if failed else weight)
            self.emit(
                peer, "round", round=self.rounds, failed="why" if failed else None, members=members, weights=weights,
                samples_per_weight=1, data_from=peer.ledger.first, data_to=peer.ledger.mark,
            )  # fmt: skip
        self.rounds += 1
        if dying is not None:
            del self.alive[dying.name]

    def leave(self, peer: Peer) -> None:
        self.beat(peer)
        self.emit(peer, "done", redrawn=peer.ledger.redrawn)
        self.redrawn += peer.ledger.redrawn
        del self.alive[peer.name]

    def expected(self) -> Coverage:
        of_slot = defaultdict(set)
        for slot, position in self.learnt:
            of_slot[slot].add(position)
        lost = sum(max(found) + 1 - min(found) - len(found) for found in of_slot.values())
        return Coverage(len(self.learnt), lost, sum(self.learnt.values()) - len(self.learnt))


HAPPENINGS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from([None, None, 0, 1, SLOTS])),
        st.tuples(st.just("draw"), st.integers(0, 12)),
        st.tuples(st.just("round"), st.sampled_from(["ok", "ok", "ok", "failed", "death"])),
        st.tuples(st.sampled_from(["beat", "die", "leave", "fall behind"]), st.integers(0, 5)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(HAPPENINGS)
def test_the_records_count_what_was_learnt_whatever_happens(happenings: list[tuple[str, Any]]) -> None:
    swarm = Membership()
    swarm.join(None)
    for kind, value in happenings:
        alive = list(swarm.alive.values())
        chosen = alive[value % len(alive)] if alive and isinstance(value, int) else None
        if kind == "join":
            swarm.join(value)
        elif kind == "draw":
            for number, peer in enumerate(alive):
                peer.ledger.draw(value * (1 + number))
        elif kind == "round":
            swarm.close_round(value == "failed", alive[0] if value == "death" and alive else None)
        elif chosen is None:
            continue
        elif kind == "beat":
            swarm.beat(chosen)
        elif kind == "die":
            del swarm.alive[chosen.name]
        elif kind == "leave":
            swarm.leave(chosen)
        else:
            chosen.ledger.give_up()
    for peer in list(swarm.alive.values()):
        swarm.leave(peer)
    found = read_data(list(swarm.records.values()))
    assert found.total == swarm.expected()
    assert found.extra == swarm.extra
    assert found.redrawn == swarm.redrawn
    # Shares are handed over at a mark that was heard: what is later than that is doubled, never lost.
    assert found.total.lost == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["ok", "failed", "leave", "fall behind"])), max_size=40))
def test_who_leaves_in_order_neither_loses_nor_doubles_a_sample(happenings: list[tuple[int, str]]) -> None:
    swarm = Membership()
    for _ in range(SLOTS):
        swarm.join(None)
    for amount, kind in happenings:
        for peer in swarm.alive.values():
            peer.ledger.draw(amount)
        first = next(iter(swarm.alive.values()))
        if kind == "leave":
            swarm.leave(first)
            swarm.join(None)
        elif kind == "fall behind":
            first.ledger.give_up()
        else:
            swarm.close_round(kind == "failed", None)
    total = read_data(list(swarm.records.values())).total
    assert (total.lost, total.doubled) == (0, 0)
    assert total == swarm.expected()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 12)), max_size=30))
def test_coverage_is_that_of_sets(ranges: list[tuple[int, int, int]]) -> None:
    found = cover(Range(slot, start, start + length) for slot, start, length in ranges)
    for slot in range(3):
        counted = Counter(p for s, start, length in ranges if s == slot for p in range(start, start + length))
        if not counted:
            assert slot not in found
            continue
        holes = max(counted) + 1 - min(counted) - len(counted)
        assert found[slot] == Coverage(len(counted), holes, sum(counted.values()) - len(counted))


def test_a_gap_is_lost_and_the_report_says_so() -> None:
    swarm = Membership()
    swarm.join(None)
    [one] = swarm.alive.values()
    one.ledger.draw(10)
    swarm.close_round(False, None)
    swarm.leave(one)
    swarm.join(0)
    [two] = swarm.alive.values()
    two.ledger.begin(25)  # nobody could tell it the mark
    swarm.emit(two, "run_start", slot=0, slots=SLOTS, data_from=25)
    two.ledger.draw(5)
    swarm.close_round(False, None)
    two.ledger.draw(3)
    two.ledger.give_up()
    swarm.leave(two)
    text = "\n".join(_data(list(swarm.records.values())))
    assert "15 samples learnt, 15 lost, 0 doubled; 3 drawn in vain and drawn again." in text
    assert "| 15 | 15 | 0 |" in text
    assert _data([PeerEvents("peer-0")]) == []


def test_a_ledger_refuses_positions_that_cannot_be() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="position=-1"):
        ledger.begin(-1)
    with pytest.raises(ValueError, match="mark=5, position=4"):
        ledger.resume(5, 4)
    ledger.resume(4, 9)
    ledger.learn(100)
    assert (ledger.first, ledger.mark) == (4, 9)
    ledger.draw(3)
    assert ledger.give_up() == ledger.position == 9
    assert ledger.redrawn == 3


@pytest.mark.parametrize(
    ("strategy", "round", "window", "weight", "failed", "mine", "per_weight"),
    [
        (DiLoCoConfig(), 3, 4, 32.0, None, 32, 1),
        (DiLoCoConfig(), 3, 4, 32.0, "why", 0, 1),
        (DiLoCoConfig(), 3, 4, 0.0, None, 0, 1),  # it only watched
        (DiLoCoConfig(), 3, 4, 90.0, None, 40, 1),  # of an account that began later
        (DiLoCoConfig(fragments=2, sync=SyncConfig(h=4)), 4, 4, 32.0, None, 32, 1),
        (DiLoCoConfig(fragments=2, sync=SyncConfig(h=4)), 5, 4, 32.0, None, 0, 0),  # the second fragment's
        (DeMoConfig(), 3, 4, 8.0, None, 32, 4),  # its weights are samples a step
    ],
)  # fmt: skip
def test_what_a_round_takes(
    strategy: Any, round: int, window: int, weight: float, failed: str | None, mine: int, per_weight: int
) -> None:
    report = RoundReport(round=round, step=12, window=window, weight=weight, failed=failed)
    taken = samples_taken(replace(small_config(), strategy=strategy), report, me="a", pending=40)
    assert (taken.mine, taken.per_weight) == (mine, per_weight)


def test_a_contribution_that_a_round_left_out_is_not_learnt_from() -> None:
    report = RoundReport(round=3, step=12, window=4, weight=32.0, members=("a", "b"), weights=(0.0, 16.0))
    assert samples_taken(small_config(), report, me="a", pending=40).mine == 0
    assert samples_taken(small_config(), report, me="b", pending=40).mine == 16


class FakeRpc:
    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def handle(self, method: str, handler: object, *, onlookers: bool) -> None:
        assert onlookers, "status asks too"

    async def call(self, peer_id: str, method: str, message: object, *, timeout: float) -> dict[str, object]:
        self.asked.append(peer_id)
        return {"shares": self.answer}


@pytest.mark.parametrize(
    "answer",
    ["x", [1], [["a", 0, 0]], [["a", -1, 0, 1]], [["a", 0, 5, 4]], [["a", 0, 0, 1 << 60]], [["a", True, 0, 1]]],
)  # fmt: skip
def test_what_strangers_say_of_shares_is_checked(answer: object) -> None:
    exchange = SharesExchange(FakeRpc(answer))  # type: ignore[arg-type]
    asyncio.run(exchange.ask(["p", "q", "r", "s"]))
    assert exchange.of_peer == {}
    with pytest.raises(ProtocolError):
        Range.checked(0, 1, "2")


def test_memory_of_shares_is_bounded_and_newest_words_count() -> None:
    shares = Shares()
    shares.note("a", Range(0, 5, 9))
    shares.note("a", Range(0, 5, 7))  # came late
    assert shares.mark(0) == 9
    assert shares.mark(1) is None
    for number in range(MAX_RANGES + 10):
        shares.note(str(number), Range(1, 0, number))
    assert len(shares.of_peer) == MAX_RANGES
    assert shares.mark(0) is None
