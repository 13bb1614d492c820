"""What a peer decides from the table of the others: when to go on, which data to draw, when to join, when to leave."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from swarmkit.config import Config
from swarmkit.neighbours import Neighbours
from swarmkit.network_config import NetworkConfig
from swarmkit.optim.synced import RoundReport
from swarmkit.peers.node import Node
from swarmkit.peers.roster import PeerRecord
from swarmkit.peers.transfer import Progress, Transfer
from tests.unit.swarmkit.harness_replicas import Recorder, small_config


class FakeNode:
    """A node whose table is what a test says; `script` is called before every look at it."""

    peer_id = "me"
    bytes_sent = 10
    bytes_received = 20

    def __init__(self, *others: PeerRecord) -> None:
        self.mine = PeerRecord(peer_id="me", joined_at=100.0, state="joining")
        self.others = list(others)
        self.said: list[dict[str, Any]] = []
        self.script: Callable[[], None] = lambda: None

    def table(self) -> list[PeerRecord]:
        self.script()
        return sorted([self.mine, *self.others], key=lambda record: record.joined_at)

    refresh = table

    def heartbeat(self, **values: Any) -> None:
        self.said.append(values)
        self.mine = replace(self.mine, **values)

    def check_invited(self) -> None:
        pass

    def announce(self, state: str, *, wait: bool = True) -> None:
        self.mine = replace(self.mine, state=state)

    def wait_for_peers(self, count: int, *, timeout: float) -> bool:
        return len([record for record in self.table() if record.is_active]) >= count


class Clock:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float | None = None) -> bool:
        self.now += seconds or 0.0
        return False


@pytest.fixture
def clock() -> Clock:
    return Clock()


def other(name: str, *, joined_at: float = 1.0, state: str = "training", **values: Any) -> PeerRecord:
    return PeerRecord(peer_id=name, joined_at=joined_at, state=state, **values)


def around(node: FakeNode, clock: Clock, said: list[str] | None = None, **network: Any) -> Neighbours:
    config: Config = small_config(peers=4, network=NetworkConfig(**network))
    stop = threading.Event()
    stop.wait = clock.wait  # type: ignore[method-assign]
    lines = said if said is not None else []
    return Neighbours(
        cast(Node, node), config, events=cast(Any, Recorder()), stop=stop, say=lines.append, clock=clock.monotonic
    )


def test_a_joiner_takes_the_lowest_slot_that_nobody_has(clock: Clock) -> None:
    node = FakeNode(other("a", slot=0), other("b", slot=2), other("c", slot=1, state="gone"))
    assert around(node, clock).claim_slot() == 3
    node.others = [other("a", slot=0), other("b", slot=2)]
    assert around(node, clock).claim_slot() == 1


def test_of_two_who_want_a_slot_the_earlier_keeps_it(clock: Clock) -> None:
    node = FakeNode(other("a", slot=0))
    calls = 0

    def rival() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            # Its claim of the same slot is only heard after ours.
            node.others.append(other("earlier", joined_at=99.0, slot=1))

    node.script = rival
    assert around(node, clock).claim_slot() == 2
    node.script = lambda: None
    node.others = [other("a", slot=0), other("later", joined_at=101.0, slot=-1)]
    peer = around(node, clock)
    assert peer.claim_slot() == 1


def test_waiting_says_who_is_missing_and_ends_in_time(clock: Clock) -> None:
    node, said = FakeNode(other("abcdefghij", state="downloading 40 %")), list[str]()
    node.announce("waiting")
    node.script = lambda: clock.wait(0.5) and None
    peer = around(node, clock, said, max_wait_s=100.0)
    assert not peer.wait_for(2)
    assert peer.gave_up
    assert "waiting: 1 of 2 replicas are here (cdefghij is downloading 40 %); giving up in" in said[0]
    assert said[-1].startswith("gave up: 1 of 2 replicas")
    assert len(said) == 3  # a first word, one reminder a minute later, the end


def test_waiting_ends_when_the_supervisor_expects_fewer(clock: Clock) -> None:
    node = FakeNode(other("a"))
    node.announce("waiting")
    answers = iter([4, 4, 2])
    assert around(node, clock).wait_for(4, lambda count: next(answers))


@pytest.mark.parametrize(
    ("members", "minimum", "present", "goes_on"), [(2, 2, 1, True), (1, 2, 2, True), (1, 2, 1, False)]
)
def test_too_few_members_pause_training(members: int, minimum: int, present: int, goes_on: bool, clock: Clock) -> None:
    node = FakeNode(*[other(str(number)) for number in range(present - 1)])
    node.announce("training")
    node.script = lambda: clock.wait(1.0) and None
    peer = around(node, clock, min_peers=minimum, max_wait_s=20.0)
    report = RoundReport(round=3, step=12, window=4, members=tuple("abcd"[:members]))
    assert peer.may_go_on(report) is goes_on
    assert peer.gave_up is not goes_on


def test_a_joiner_comes_to_the_round_shortly_before_the_others(clock: Clock) -> None:
    # 1000 steps of 100 tokens at 200 tokens/s: 500 s to go, of which 12 (0.4 * 30) may be waited in the round.
    node = FakeNode(other("a", round=5, step=9000, tokens_per_s=200.0))
    began = clock.now
    around(node, clock).await_round(5, step=10_000, tokens_per_step=100)
    assert 485 <= clock.now - began <= 489
    assert node.said[0] == {"state": "joining in 500 s"}


def test_a_joiner_does_not_wait_for_short_windows_or_rounds_that_closed(clock: Clock) -> None:
    began = clock.now
    for record in (
        other("a", round=5, step=95, tokens_per_s=1000.0),  # half a second to go
        other("a", round=6, step=0, tokens_per_s=0.1),  # the round has closed: it has to fetch again
        other("a", round=5, step=0, tokens_per_s=0.0),  # nothing is known
    ):
        around(FakeNode(record), clock).await_round(5, step=100, tokens_per_step=100)
    around(FakeNode(), clock).await_round(5, step=100, tokens_per_step=100)
    assert clock.now == began


def test_who_finished_stays_until_the_others_have_too(clock: Clock) -> None:
    node = FakeNode(other("a", step=15))
    began = clock.now

    def finish() -> None:
        if clock.now > began + 3:
            node.others = [other("a", step=16)]

    node.script = finish
    around(node, clock).linger()
    assert 3 < clock.now - began < 4
    node.script = lambda: None
    node.others = [other("stuck", step=2)]
    around(node, clock).linger()
    assert clock.now - began < 15


def test_the_others_hear_of_a_download(clock: Clock) -> None:
    node = FakeNode()

    def fetch(progress: Progress) -> tuple[dict[str, Any], dict[str, Any]]:
        for done in range(0, 1001):
            progress(Transfer(done=done, total=1000, rate=100.0, eta_s=1.0, donors=("a",)))
        return {}, {}

    node.fetch_state = fetch  # type: ignore[attr-defined]
    said: list[str] = []
    around(node, clock, said).fetch_state()
    assert {"state": "downloading 40 %"} in node.said
    assert len(node.said) == 21


def test_a_report_carries_the_traffic(clock: Clock) -> None:
    node = FakeNode()
    around(node, clock).report(step=3)
    assert node.said == [{"step": 3, "bytes_sent": 10, "bytes_received": 20}]
