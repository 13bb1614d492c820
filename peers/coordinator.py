"""Coordinates rounds: one member collects who is there, tells all alike who is in, and commits or retries for all."""

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass

from swarmkit.optim.collective import RoundKey

from .errors import PeerUnreachable, ProtocolError
from .layout import Schema
from .roster import Roster
from .rpc import Rpc
from .settings import NetworkSettings
from .wire import Message, field, finite

REMEMBERED_ROUNDS = 256
# The share of round_timeout_s that a round waits for slow members; the rest is for the exchange.
PATIENCE = 0.8
TICK_S = 0.5
MAX_ATTEMPTS = 8
MAX_TIMEOUT_S = 24 * 3600.0


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


def parse_key(message: Message) -> RoundKey:
    """Read a round's key; raises ProtocolError."""
    name = field(message, "round", str, lambda text: 0 < len(text) <= 128)
    return RoundKey(name, field(message, "index", int, lambda index: index >= 0))


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

    # -- what members call -----------------------------------------------------------------------------------------

    async def meet(self, peer_id: str, arrival: Arrival) -> Message:
        """Wait with a member until the round begins; a member that comes when it has begun missed it."""
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

    # -- what the coordinator does -----------------------------------------------------------------------------------

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
        return {
            peer for peer in self.expected | set(self._roster.active()) if peer not in self._arrivals and peer not in self.gone
        }

    def _left(self) -> float:
        return self._opened + self._timeout - time.monotonic()

    async def _gather_members(self) -> None:
        last_call = self._opened + PATIENCE * self._timeout
        while self._absent() and time.monotonic() < last_call:
            await self._wait_change()
            await self._drop_dead(self._absent())

    async def _wait_change(self) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), TICK_S)
        except TimeoutError:
            pass
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
            if not await self._drop_dead(set(members)) and broken.blame in members:
                # Alive, but what it sends breaks the round.
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
            await self._wait_change()
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


class Coordinator:
    """Answers members' calls; every peer has one, and the active peer that joined first is asked."""

    def __init__(self, roster: Roster, rpc: Rpc, settings: NetworkSettings) -> None:
        self._roster = roster
        self._rpc = rpc
        self._settings = settings
        self._sessions: dict[RoundKey, tuple[Session, asyncio.Task[Decision]]] = {}
        self._decisions: OrderedDict[RoundKey, Decision] = OrderedDict()
        self._latest: dict[str, int] = {}  # round name -> highest index that was decided
        self._standing: dict[RoundKey, str] = {}  # rounds that this peer is in under another coordinator
        self._holds: dict[str, float] = {}  # joiner -> monotonic time until which rounds wait for it
        rpc.handle("meet", self._on_meet)
        rpc.handle("report", self._on_report)
        rpc.handle("outcome", self._on_outcome)
        rpc.handle("hold", self._on_hold)
        roster.on_leave.append(self._on_leave)

    def remember(self, key: RoundKey, decision: Decision) -> None:
        """Keep how a round ended, for members that lost the coordinator before it could tell them."""
        self._decisions[key] = decision
        self._latest[key.name] = max(key.index, self._latest.get(key.name, -1))
        while len(self._decisions) > REMEMBERED_ROUNDS:
            self._decisions.popitem(last=False)

    def note(self, key: RoundKey, standing: str | None) -> None:
        """Note this member's standing in a round under another coordinator.

        "pending" while it may still hear a decision, "abandoned" once it has given that coordinator up (it will not
        act on its decision any more), None when the round has ended for it.
        """
        if standing is None:
            self._standing.pop(key, None)
        else:
            self._standing[key] = standing

    async def close(self) -> None:
        """Stop coordinating; members hear that the coordinator left."""
        tasks = [task for _, task in self._sessions.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2)

    async def _on_meet(self, caller: str, message: Message) -> Message:
        key = parse_key(message)
        operation = field(message, "operation", str, lambda name: name in ("reduce", "gather"))
        arrival = Arrival(
            weight=field(message, "weight", float, finite),
            schema=Schema.from_message(message, max_bytes=self._settings.max_round_bytes),
            order=(field(message, "joined_at", float, finite), caller),
            answer=asyncio.get_running_loop().create_future(),
        )
        self._roster.heard_from(caller)
        self._holds.pop(caller, None)
        decided = self._decisions.get(key)
        if decided is not None:
            return decided.for_member(caller)
        if key.index < self._latest.get(key.name, -1):
            return {"outcome": "failed", "reason": "the round closed without this peer", "missed": True}
        if key not in self._sessions:
            redirect = await self._redirect(caller)
            if redirect is not None:
                return redirect
            known = await self._learn_outcome(key)
            if known is not None:
                return known.for_member(caller)
        # The first member to come sets how long the round may take.
        session = self._session(key, operation, field(message, "timeout", float, lambda s: 0 < s <= MAX_TIMEOUT_S))
        if session.operation != operation:
            raise ProtocolError(f"round {key} is a {session.operation}, not a {operation}")
        return await session.meet(caller, arrival)

    def _session(self, key: RoundKey, operation: str, timeout: float) -> Session:
        if key not in self._sessions:
            session = Session(key, operation, timeout, self._roster, self._rpc, self._settings)
            now = time.monotonic()
            session.expected |= {peer for peer, until in self._holds.items() if until > now}
            task = asyncio.ensure_future(session.run())
            task.add_done_callback(lambda done: self._on_decided(key, done))
            self._sessions[key] = (session, task)
        return self._sessions[key][0]

    def _on_decided(self, key: RoundKey, task: "asyncio.Task[Decision]") -> None:
        self._sessions.pop(key, None)
        if not task.cancelled() and task.exception() is None:
            self.remember(key, task.result())

    async def _redirect(self, caller: str) -> Message | None:
        """Send a caller to the peer that should coordinate, unless that one is dead."""
        while True:
            coordinator = self._roster.coordinator()
            if coordinator == self._roster.mine.peer_id:
                return None
            if coordinator != caller and await self._roster.is_alive(coordinator):
                return {"outcome": "redirect", "to": coordinator}
            if coordinator == caller:
                # It thinks us first in line: our table is ahead of its, or the other way round.
                return {"outcome": "redirect", "to": caller}
            self._roster.suspect(coordinator)

    async def _learn_outcome(self, key: RoundKey) -> Decision | None:
        """Ask others how a round ended before opening it: its coordinator may have died having told only some.

        Only needed when this peer was in the round under somebody else.
        """
        if key not in self._standing:
            return None
        deadline = time.monotonic() + self._settings.silence_s
        others = [peer for peer in self._roster.active() if peer != self._roster.mine.peer_id]
        while time.monotonic() < deadline:
            answers = await asyncio.gather(*(self._ask_outcome(peer, key) for peer in others))
            for answer in answers:
                if answer is not None and answer.get("state") == "committed":
                    return _read_decision(answer)
            if not any(answer is not None and answer.get("state") == "pending" for answer in answers):
                return None
            await asyncio.sleep(TICK_S / 2)
        return None

    async def _ask_outcome(self, peer_id: str, key: RoundKey) -> Message | None:
        try:
            message: Message = {"round": key.name, "index": key.index}
            return await self._rpc.call(peer_id, "outcome", message, timeout=self._settings.silence_s / 2)
        except (PeerUnreachable, ProtocolError):
            return None

    async def _on_outcome(self, caller: str, message: Message) -> Message:
        key = parse_key(message)
        decision = self._decisions.get(key)
        if decision is not None and decision.attempt:
            return {**decision.for_member(decision.members[0]), "state": "committed"}
        return {"state": self._standing.get(key, "unknown")}

    async def _on_report(self, caller: str, message: Message) -> Message:
        key = parse_key(message)
        attempt = field(message, "attempt", str)
        report = Report(
            ok=field(message, "ok", bool), blame=field(message, "blame", str), reason=field(message, "reason", str)[:500]
        )
        self._roster.heard_from(caller)
        if key in self._sessions:
            return await self._sessions[key][0].report(caller, attempt, report)
        decided = self._decisions.get(key)
        if decided is not None:
            return decided.for_member(caller)
        return {"outcome": "failed", "reason": "this peer does not coordinate that round", "missed": False}

    async def _on_hold(self, caller: str, message: Message) -> Message:
        """Wait for a joiner: rounds that have not begun stay open until it has come, at most for a round's timeout."""
        redirect = await self._redirect(caller)
        if redirect is not None:
            return redirect
        self._holds[caller] = time.monotonic() + self._settings.round_timeout_s
        for session, _ in self._sessions.values():
            session.expected.add(caller)
        return {"outcome": "held"}

    def _on_leave(self, peer_id: str) -> None:
        self._holds.pop(peer_id, None)
        for session, _ in self._sessions.values():
            session.withdraw(peer_id)


def _read_decision(message: Message) -> Decision:
    members = field(message, "members", list)
    weights = field(message, "weights", list)
    if not all(isinstance(m, str) for m in members) or not all(isinstance(w, float) for w in weights):
        raise ProtocolError("members must be peer ids and weights numbers")
    return Decision(field(message, "attempt", str), tuple(members), tuple(weights))
