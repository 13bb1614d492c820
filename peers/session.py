"""One round as its coordinator runs it: gather members, begin alike for all, retry without the dead, decide once."""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from dataclasses import dataclass

from swarmkit.optim.collective import RoundKey
from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.layout import Schema
from swarmkit.peers.roster import Roster
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.wire import Message

# The share of round_timeout_s that a round waits for slow members; the rest is for the exchange.
PATIENCE = 0.8
TICK_S = 0.5
MAX_ATTEMPTS = 8


@dataclass(slots=True)
class Arrival:
    """A member that has come to a round, and the call of it that waits for an answer."""

    weight: float
    schema: Schema
    order: tuple[float, str]
    answer: asyncio.Future[Message]


@dataclass(slots=True)
class Report:
    """How an attempt went for one member."""

    ok: bool
    blame: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """How a round ended, for all alike; `attempt` is empty when it failed."""

    attempt: str
    members: tuple[str, ...]
    weights: tuple[float, ...]
    reason: str = ""

    def for_member(self, peer_id: str) -> Message:
        """The answer to a member, or to someone who was not one."""
        if not self.attempt:
            return {"outcome": "failed", "reason": self.reason, "missed": False}
        if peer_id not in self.members:
            return {"outcome": "failed", "reason": "the round closed without this peer", "missed": True}
        return {
            "outcome": "commit",
            "attempt": self.attempt,
            "members": list(self.members),
            "weights": list(self.weights),
        }


class Session:
    """One round as its coordinator sees it."""

    def __init__(
        self, key: RoundKey, operation: str, timeout: float, roster: Roster, rpc: Rpc, settings: NetworkSettings
    ) -> None:
        self.key = key
        self._timeout = timeout
        self.operation = operation
        self.decision: Decision | None = None
        self.expected: set[str] = set()
        self.gone: set[str] = set()
        self._roster = roster
        self._rpc = rpc
        self._settings = settings
        self._opened = time.monotonic()
        self._arrivals: dict[str, Arrival] = {}
        self._reports: dict[str, Report] = {}
        self._attempt = ""
        self._members: tuple[str, ...] = ()
        self._changed = asyncio.Event()

    # -- what members call ---------------------------------------------------------------------------------------------

    async def meet(self, peer_id: str, arrival: Arrival) -> Message:
        """Wait with a member until the round begins; a member that comes when it has begun missed it."""
        if self.decision is not None:
            return self.decision.for_member(peer_id)
        if self._attempt and peer_id not in self._members:
            return {"outcome": "failed", "reason": "the round began without this peer", "missed": True}
        if self._attempt:
            # A member that lost its call to us: what it had received is lost too, so the attempt is.
            self._reports[peer_id] = Report(False, "", f"{peer_id[-8:]} came back in the middle of the attempt")
        self._arrivals[peer_id] = arrival
        self.gone.discard(peer_id)
        self._changed.set()
        try:
            return await arrival.answer
        except asyncio.CancelledError:
            # The caller withdrew or lost its link before the round began: it is not in it.
            if not self._attempt and self._arrivals.get(peer_id) is arrival:
                del self._arrivals[peer_id]
                self._changed.set()
            raise

    async def report(self, peer_id: str, attempt: str, report: Report) -> Message:
        """Take a member's report and wait with it for the decision."""
        if self.decision is not None:
            return self.decision.for_member(peer_id)
        arrival = self._arrivals.get(peer_id)
        if arrival is None or peer_id not in self._members:
            return {"outcome": "failed", "reason": report.reason or "dropped from the round", "missed": True}
        arrival.answer = asyncio.get_running_loop().create_future()
        if attempt == self._attempt:
            self._reports[peer_id] = report
            self._changed.set()
        else:
            # It worked on an attempt that is over: give it the running one.
            arrival.answer.set_result(self._begin_message())
        return await arrival.answer

    def withdraw(self, peer_id: str) -> None:
        """A peer said that it leaves: do not wait for it."""
        self.expected.discard(peer_id)
        self._changed.set()

    # -- what the coordinator does -------------------------------------------------------------------------------------

    async def run(self) -> Decision:
        """Gather members, run attempts, decide; always ends within the round's timeout."""
        try:
            await self._gather_members()
            self.decision = await self._attempts()
        except asyncio.CancelledError:
            self.decision = Decision("", (), (), "the coordinator left")
            raise
        finally:
            for peer_id, arrival in self._arrivals.items():
                if not arrival.answer.done() and self.decision is not None:
                    arrival.answer.set_result(self.decision.for_member(peer_id))
        return self.decision

    def _absent(self) -> set[str]:
        return (self.expected | set(self._roster.active())) - set(self._arrivals) - self.gone

    def _left(self) -> float:
        return self._opened + self._timeout - time.monotonic()

    async def _gather_members(self) -> None:
        last_call = self._opened + PATIENCE * self._timeout
        while self._absent() and time.monotonic() < last_call:
            await self._wait_change(min(TICK_S, last_call - time.monotonic()))
            await self._drop_dead(self._absent())

    async def _wait_change(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)
        self._changed.clear()

    async def _drop_dead(self, peers: set[str]) -> set[str]:
        suspects = sorted(peers)
        alive = await asyncio.gather(*(self._roster.is_alive(peer) for peer in suspects))
        dead = {peer for peer, is_alive in zip(suspects, alive, strict=True) if not is_alive}
        for peer in dead:
            self._roster.suspect(peer)
        self.gone |= dead
        self.expected -= dead
        return dead

    async def _attempts(self) -> Decision:
        excluded: dict[str, str] = {}
        strikes: Counter[str] = Counter()
        reason = "no member is left"
        for _ in range(MAX_ATTEMPTS):
            self._refuse_mismatched(excluded)
            members = sorted(
                (peer for peer in self._arrivals if peer not in self.gone and peer not in excluded),
                key=lambda peer: self._arrivals[peer].order,
            )
            if not members:
                return Decision("", (), (), reason)
            if sum(self._arrivals[peer].weight for peer in members) <= 0:
                return Decision("", (), (), "every weight is 0: nobody contributed")
            self._begin(members)
            broken = await self._await_reports()
            if broken is None:
                weights = tuple(self._arrivals[peer].weight for peer in members)
                return Decision(self._attempt, tuple(members), weights)
            reason = broken.reason
            if self._left() <= 0:
                return Decision("", (), (), f"no result within {self._timeout} s: {reason}")
            await self._abort(members)
            strikes[broken.blame] += 1
            if not await self._drop_dead(set(members)) and broken.blame in members and strikes[broken.blame] > 1:
                # Alive, but what it sends, or its link, breaks the round again and again.
                excluded[broken.blame] = broken.reason
                self._answer(broken.blame, {"outcome": "failed", "reason": broken.reason, "missed": True})
        return Decision("", (), (), f"{MAX_ATTEMPTS} attempts broke; the last: {reason}")

    def _refuse_mismatched(self, excluded: dict[str, str]) -> None:
        """Members must bring equal schemas to a reduction; the majority's counts, and a tie fails the round for all."""
        present = {peer: arrival for peer, arrival in self._arrivals.items() if peer not in excluded}
        if self.operation != "reduce" or not present:
            return
        counts = Counter(arrival.schema for arrival in present.values()).most_common(2)
        if len(counts) == 1:
            return
        (major, first), (other, second) = counts
        for peer, arrival in present.items():
            if arrival.schema != major or first == second:
                theirs = other if arrival.schema == major else major
                excluded[peer] = f"tensors differ between members: {arrival.schema} here, {theirs} elsewhere"
                self._answer(peer, {"outcome": "failed", "reason": excluded[peer], "missed": first != second})

    def _answer(self, peer_id: str, message: Message) -> None:
        answer = self._arrivals[peer_id].answer
        if not answer.done():
            answer.set_result(message)

    def _begin(self, members: list[str]) -> None:
        self._attempt = secrets.token_hex(8)
        self._members = tuple(members)
        self._reports = {}
        message = self._begin_message()
        for peer in members:
            self._answer(peer, message)

    def _begin_message(self) -> Message:
        arrivals = [self._arrivals[peer] for peer in self._members]
        schemas = [arrival.schema.to_message() for arrival in arrivals]
        return {
            "outcome": "begin",
            "attempt": self._attempt,
            "members": list(self._members),
            "weights": [arrival.weight for arrival in arrivals],
            "schemas": [] if self.operation == "reduce" else schemas,
        }

    async def _await_reports(self) -> Report | None:
        """Wait until all members report success (None) or one reports trouble, dies, or the time is up."""
        last_ping = time.monotonic()
        while True:
            bad = next((report for report in self._reports.values() if not report.ok), None)
            if bad is not None:
                return bad
            missing = set(self._members) - set(self._reports)
            if not missing:
                return None
            if self._left() <= 0:
                names = ", ".join(peer[-8:] for peer in sorted(missing))
                return Report(False, "", f"no report from {names}")
            await self._wait_change(min(TICK_S, self._left()))
            if time.monotonic() - last_ping > TICK_S:
                last_ping = time.monotonic()
                dead = await self._drop_dead(set(self._members) - set(self._reports))
                if dead:
                    return Report(False, "", f"{', '.join(peer[-8:] for peer in sorted(dead))} died in the round")

    async def _abort(self, members: list[str]) -> None:
        """Have members that still exchange stop and report, so that all can begin anew."""
        attempt = self._attempt
        await asyncio.gather(*(self._send_abort(peer, attempt) for peer in members if peer not in self._reports))

    async def _send_abort(self, peer_id: str, attempt: str) -> None:
        try:
            await self._rpc.call(peer_id, "abort", {"attempt": attempt}, timeout=self._settings.silence_s / 2)
        except (PeerUnreachable, ProtocolError):
            return  # dead or deaf: the pings that follow decide
