"""One round as its coordinator runs it, against members that are played by the test."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import torch

from swarmkit.optim.collective import RoundKey
from swarmkit.peers.layout import Schema
from swarmkit.peers.session import Arrival, Decision, Report, Session
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.wire import Message

ONE = Schema.of([torch.zeros(4)])
OTHER = Schema.of([torch.zeros(5)])
OK = Report(True, "", "")


@dataclass
class FakeRoster:
    """Knows who is active and who is alive, without a network."""

    members: list[str]
    dead: set[str] = field(default_factory=set)
    unheard: set[str] = field(default_factory=set)

    def active(self) -> list[str]:
        return [peer for peer in self.members if peer not in self.dead]

    def silent(self) -> set[str]:
        return self.unheard

    async def is_alive(self, peer_id: str) -> bool:
        return peer_id not in self.dead

    def suspect(self, peer_id: str) -> None:
        self.dead.add(peer_id)


class FakeRpc:
    """Takes calls and does nothing; remembers whom it told to abort."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    async def call(self, peer_id: str, method: str, message: Message, *, timeout: float) -> Message:
        assert method == "abort"
        self.aborted.append(peer_id)
        return {}


class Round:
    """A session and the members that talk to it."""

    def __init__(self, members: list[str], *, operation: str = "reduce", timeout: float = 5.0) -> None:
        self.roster = FakeRoster(members)
        self.rpc = FakeRpc()
        key = RoundKey("test", 0)
        self.elsewhere: Decision | None = None
        settings = NetworkSettings()
        self.session = Session(key, operation, timeout, self.roster, self.rpc, settings, self.ask)  # type: ignore[arg-type]
        self.decision = asyncio.ensure_future(self.session.run())

    async def ask(self, key: RoundKey, peers: set[str], patient: bool) -> Decision | None:
        return self.elsewhere

    def meet(self, peer: str, weight: float = 1.0, schema: Schema = ONE, lineage: str = "") -> "asyncio.Task[Message]":
        arrival = Arrival(weight, schema, (0.0, peer), asyncio.get_running_loop().create_future(), lineage)
        return asyncio.ensure_future(self.session.meet(peer, arrival))

    def report(self, peer: str, begin: Message, report: Report = OK) -> "asyncio.Task[Message]":
        return asyncio.ensure_future(self.session.report(peer, str(begin["attempt"]), report))


def in_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))  # type: ignore[arg-type]


async def finish(begins: dict[str, Message], round: Round) -> dict[str, Message]:
    reports = {peer: round.report(peer, begin) for peer, begin in begins.items()}
    return {peer: await task for peer, task in reports.items()}


def test_all_members_hear_the_same_members_weights_and_attempt() -> None:
    async def scenario() -> None:
        round = Round(["a", "b", "c"])
        meets = {peer: round.meet(peer, weight) for peer, weight in (("c", 3.0), ("a", 1.0), ("b", 2.0))}
        begins = {peer: await task for peer, task in meets.items()}
        assert len({str(begin) for begin in begins.values()}) == 1
        assert begins["a"]["members"] == ["a", "b", "c"]
        assert begins["a"]["weights"] == [1.0, 2.0, 3.0]
        answers = await finish(begins, round)
        assert {answer["outcome"] for answer in answers.values()} == {"commit"}
        assert (await round.decision).members == ("a", "b", "c")

    in_loop(scenario)


def test_a_round_does_not_wait_for_a_member_that_is_dead() -> None:
    async def scenario() -> None:
        round = Round(["a", "b", "c"], timeout=60.0)
        meets = {peer: round.meet(peer) for peer in ("a", "b")}
        round.roster.dead.add("c")
        begins = {peer: await task for peer, task in meets.items()}
        assert begins["a"]["members"] == ["a", "b"]
        await finish(begins, round)

    in_loop(scenario)


def test_a_round_closes_without_a_member_that_is_alive_but_does_not_come_and_tells_it_so() -> None:
    async def scenario() -> None:
        round = Round(["a", "b"], timeout=2.0)
        begins = {"a": await round.meet("a")}
        late = await round.meet("b")
        assert (late["outcome"], late["missed"]) == ("failed", True)
        await finish(begins, round)
        assert (await round.decision).members == ("a",)

    in_loop(scenario)


def test_a_round_that_closed_at_another_coordinator_is_not_closed_again() -> None:
    async def scenario() -> None:
        round = Round(["a", "b"], timeout=1.0)
        round.elsewhere = Decision("there", ("b",), (1.0,))
        answer = await round.meet("a")
        assert (answer["outcome"], answer["missed"]) == ("failed", True)
        assert await round.decision == round.elsewhere

    in_loop(scenario)


def test_a_member_that_dies_in_the_exchange_is_dropped_and_the_others_begin_again() -> None:
    async def scenario() -> None:
        round = Round(["a", "b", "c"])
        meets = {peer: round.meet(peer) for peer in ("a", "b", "c")}
        first = {peer: await task for peer, task in meets.items()}
        round.roster.dead.add("c")
        broken = round.report("a", first["a"], Report(False, "c", "stream broke"))
        again = round.report("b", first["b"])
        second = {"a": await broken, "b": await again}
        assert second["a"]["outcome"] == "begin"
        assert second["a"]["attempt"] != first["a"]["attempt"]
        assert second["a"]["members"] == ["a", "b"]
        answers = await finish(second, round)
        assert {answer["outcome"] for answer in answers.values()} == {"commit"}

    in_loop(scenario)


def test_a_member_that_still_exchanges_is_told_to_abort_and_joins_the_next_attempt() -> None:
    async def scenario() -> None:
        round = Round(["a", "b", "c"])
        meets = {peer: round.meet(peer) for peer in ("a", "b", "c")}
        first = {peer: await task for peer, task in meets.items()}
        round.roster.dead.add("c")
        broken = await round.report("a", first["a"], Report(False, "c", "stream broke"))
        assert "b" in round.rpc.aborted
        resumed = await round.report("b", first["b"], Report(False, "", "aborted"))
        assert resumed == broken

    in_loop(scenario)


def test_a_member_that_sends_bad_data_is_excluded_and_told_why() -> None:
    async def scenario() -> None:
        round = Round(["a", "b", "c"])
        meets = {peer: round.meet(peer) for peer in ("a", "b", "c")}
        begins = {peer: await task for peer, task in meets.items()}
        bad = Report(False, "c", "c sent NaN", is_link=False)
        reports = {peer: round.report(peer, begins[peer], bad) for peer in "abc"}
        begins = {peer: await task for peer, task in reports.items()}
        assert begins["a"]["members"] == ["a", "b"]
        assert begins["c"]["outcome"] == "failed"
        assert "c sent NaN" in str(begins["c"]["reason"])
        await finish({peer: begins[peer] for peer in "ab"}, round)

    in_loop(scenario)


@pytest.mark.parametrize("blamed", [("a", "b"), ("a", "a")])
def test_a_peer_whose_own_uplink_fails_cannot_talk_the_others_out_of_the_round(blamed: tuple[str, str]) -> None:
    async def scenario() -> None:
        round = Round(["a", "b", "c"])
        meets = {peer: round.meet(peer) for peer in ("a", "b", "c")}
        begins = {peer: await task for peer, task in meets.items()}
        for victim in blamed:
            complaint = Report(False, victim, "stream broke")
            aborted = Report(False, "", "aborted")
            reports = {"c": round.report("c", begins["c"], complaint)}
            await asyncio.sleep(0.05)
            reports |= {peer: round.report(peer, begins[peer], aborted) for peer in "ab"}
            begins = {peer: await task for peer, task in reports.items()}
        assert begins["a"]["members"] == ["a", "b"]
        assert (begins["c"]["outcome"], begins["c"]["missed"]) == ("failed", True)
        await finish({peer: begins[peer] for peer in "ab"}, round)

    in_loop(scenario)


def test_who_ends_its_attempt_because_of_another_is_not_taken_for_the_cause() -> None:
    """c's streams fail; a notices and ends its attempt, so that b's stream to a ends too and b hears nothing of c."""

    async def scenario() -> None:
        round = Round(["a", "b", "c"])
        meets = {peer: round.meet(peer) for peer in "abc"}
        begins = {peer: await task for peer, task in meets.items()}
        for _ in range(2):
            echo = Report(False, "a", "a ended its attempt", is_echo=True)
            reports = {"b": round.report("b", begins["b"], echo)}
            await asyncio.sleep(0)
            reports["c"] = round.report("c", begins["c"], Report(False, "a", "stream broke"))
            reports["a"] = round.report("a", begins["a"], Report(False, "", "aborted"))
            begins = {peer: await task for peer, task in reports.items()}
        assert begins["a"]["members"] == ["a", "b"]
        assert begins["c"]["reason"] == "stream broke"
        await finish({peer: begins[peer] for peer in "ab"}, round)

    in_loop(scenario)


def test_who_ends_every_attempt_without_a_cause_has_to_go() -> None:
    async def scenario() -> None:
        round = Round(["a", "b", "c"])
        meets = {peer: round.meet(peer) for peer in "abc"}
        begins = {peer: await task for peer, task in meets.items()}
        for _ in range(2):
            echo = Report(False, "c", "c ended its attempt", is_echo=True)
            reports = {peer: round.report(peer, begins[peer], echo) for peer in "ab"}
            reports["c"] = round.report("c", begins["c"], Report(True, "", ""))
            begins = {peer: await task for peer, task in reports.items()}
        assert begins["a"]["members"] == ["a", "b"]
        assert begins["c"]["outcome"] == "failed"
        await finish({peer: begins[peer] for peer in "ab"}, round)

    in_loop(scenario)


def test_a_member_that_comes_from_another_round_than_the_majority_has_to_fetch_the_state() -> None:
    async def scenario() -> None:
        round = Round(["a", "b", "c", "new"])
        pasts = {"a": "other", "b": "same", "c": "same", "new": ""}
        meets = {peer: round.meet(peer, lineage=past) for peer, past in pasts.items()}
        begins = {peer: await task for peer, task in meets.items()}
        assert (begins["a"]["outcome"], begins["a"]["missed"]) == ("failed", True)
        assert begins["b"]["members"] == ["b", "c", "new"]
        await finish({peer: begins[peer] for peer in ("b", "c", "new")}, round)

    in_loop(scenario)


def test_of_two_members_with_different_pasts_the_one_that_joined_first_goes_on() -> None:
    async def scenario() -> None:
        round = Round(["a", "b"])
        meets = {"b": round.meet("b", lineage="y"), "a": round.meet("a", lineage="x")}
        begins = {peer: await task for peer, task in meets.items()}
        assert begins["a"]["members"] == ["a"]
        assert begins["b"]["missed"] is True
        await finish({"a": begins["a"]}, round)

    in_loop(scenario)


def test_a_joiner_that_comes_early_does_not_start_the_clock_of_the_others() -> None:
    async def scenario() -> None:
        round = Round(["a", "b"], timeout=1.0)
        joiner = round.meet("joiner", 0.0)
        await asyncio.sleep(1.2)
        assert not joiner.done()
        meets = {peer: round.meet(peer) for peer in ("a", "b")}
        begins = {peer: await task for peer, task in meets.items()} | {"joiner": await joiner}
        assert set(begins["joiner"]["members"]) == {"a", "b", "joiner"}  # type: ignore[call-overload]
        await finish(begins, round)

    in_loop(scenario)


def test_a_coordinator_that_leaves_sends_those_who_wait_to_the_next() -> None:
    async def scenario() -> None:
        round = Round(["a", "b"])
        waiting = round.meet("b")
        await asyncio.sleep(0)
        round.session.hand_over("b")
        assert await waiting == {"outcome": "redirect", "to": "b"}
        round.decision.cancel()

    in_loop(scenario)


def test_the_minority_with_other_shapes_fails_at_once_with_both_shapes_and_the_majority_goes_on() -> None:
    async def scenario() -> None:
        round = Round(["a", "b", "c"])
        meets = {peer: round.meet(peer, schema=OTHER if peer == "b" else ONE) for peer in ("a", "b", "c")}
        begins = {peer: await task for peer, task in meets.items()}
        assert begins["b"]["outcome"] == "failed"
        assert "float32[4]" in str(begins["b"]["reason"])
        assert "float32[5]" in str(begins["b"]["reason"])
        assert begins["a"]["members"] == ["a", "c"]
        await finish({peer: begins[peer] for peer in "ac"}, round)

    in_loop(scenario)


def test_two_members_with_different_shapes_both_fail_and_neither_has_missed_anything() -> None:
    async def scenario() -> None:
        round = Round(["a", "b"])
        answers = [await task for task in (round.meet("a", schema=ONE), round.meet("b", schema=OTHER))]
        assert [(answer["outcome"], answer["missed"]) for answer in answers] == [("failed", False)] * 2
        assert not (await round.decision).attempt

    in_loop(scenario)


def test_a_round_in_which_nobody_has_weight_fails() -> None:
    async def scenario() -> None:
        round = Round(["a", "b"])
        answers = [await task for task in (round.meet("a", 0.0), round.meet("b", 0.0))]
        assert all("every weight is 0" in str(answer["reason"]) for answer in answers)

    in_loop(scenario)


def test_a_member_that_withdraws_before_the_round_begins_is_not_in_it() -> None:
    async def scenario() -> None:
        round = Round(["a", "b", "c"])
        gone = round.meet("b")
        await asyncio.sleep(0)
        gone.cancel()
        round.roster.members.remove("b")
        meets = {peer: round.meet(peer) for peer in ("a", "c")}
        begins = {peer: await task for peer, task in meets.items()}
        assert begins["a"]["members"] == ["a", "c"]
        await finish(begins, round)

    in_loop(scenario)


def test_a_round_that_a_joiner_holds_waits_for_it() -> None:
    async def scenario() -> None:
        round = Round(["a"])
        round.session.expected.add("joiner")
        first = round.meet("a")
        await asyncio.sleep(0)
        assert not first.done()
        joiner = round.meet("joiner", 0.0)
        begins = {"a": await first, "joiner": await joiner}
        assert begins["a"]["weights"] == [1.0, 0.0]
        await finish(begins, round)

    in_loop(scenario)


def test_a_silent_exchange_fails_for_all_alike_when_the_time_is_up() -> None:
    async def scenario() -> None:
        round = Round(["a", "b"], timeout=1.5)
        meets = {peer: round.meet(peer) for peer in ("a", "b")}
        begins = {peer: await task for peer, task in meets.items()}
        answer = await round.report("a", begins["a"])
        assert answer["outcome"] == "failed"
        assert "no report from b" in str(answer["reason"])

    in_loop(scenario)


def test_a_gathering_tells_every_member_everyones_schema() -> None:
    async def scenario() -> None:
        round = Round(["a", "b"], operation="gather")
        meets = {"a": round.meet("a", schema=ONE), "b": round.meet("b", schema=OTHER)}
        begins = {peer: await task for peer, task in meets.items()}
        assert begins["a"]["schemas"] == [ONE.to_message(), OTHER.to_message()]
        await finish(begins, round)

    in_loop(scenario)


@pytest.mark.parametrize(("peer", "outcome", "missed"), [("a", "commit", None), ("z", "failed", True)])
def test_whoever_asks_late_hears_the_decision_that_was_made(peer: str, outcome: str, missed: bool | None) -> None:
    answer = Decision("attempt", ("a", "b"), (1.0, 1.0)).for_member(peer)
    assert (answer["outcome"], answer.get("missed")) == (outcome, missed)


@pytest.mark.parametrize(("unheard", "closes"), [(0, True), (1, True), (2, False)])
def test_a_minority_of_those_who_were_here_does_not_close_a_round_alone(unheard: int, closes: bool) -> None:
    """They are silent, not seen to have ended: they may well meet somewhere else."""

    async def scenario() -> None:
        round = Round(["a", "b", "c"])
        away = {"b", "c"}
        round.roster.dead = set(away)
        round.roster.unheard = set(sorted(away)[:unheard])
        met = round.meet("a")
        if closes:
            begin = await met
            assert begin["members"] == ["a"]
            await finish({"a": begin}, round)
        assert bool((await round.decision).attempt) == closes

    in_loop(scenario)


def test_backup_workers_let_a_round_begin_without_the_slowest() -> None:
    async def scenario() -> None:
        round = Round(["a", "b", "c"])
        round.session._patience = lambda members: (2, 0.3)
        started = asyncio.get_running_loop().time()
        begins = {peer: await met for peer, met in {peer: round.meet(peer) for peer in "ab"}.items()}
        assert 0.25 < asyncio.get_running_loop().time() - started < 3
        assert begins["a"]["members"] == ["a", "b"]
        late = await round.meet("c")
        assert late["missed"]
        await finish(begins, round)

    in_loop(scenario)


def test_backup_workers_do_not_leave_out_a_joiner() -> None:
    async def scenario() -> None:
        round = Round(["a", "b"])
        round.session._patience = lambda members: (2, 0.0)
        round.session.expected = {"c"}
        met = {peer: round.meet(peer) for peer in "ab"}
        done, _ = await asyncio.wait(met.values(), timeout=0.7)
        assert not done
        met["c"] = round.meet("c", weight=0.0)
        begins = {peer: await task for peer, task in met.items()}
        assert len(begins["a"]["members"]) == 3
        await finish(begins, round)

    in_loop(scenario)
