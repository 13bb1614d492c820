"""Coordinates rounds: the active peer that joined first collects who is there and decides alike for all members."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence

from swarmkit.optim.collective import RoundKey
from swarmkit.peers.backup import Arrivals
from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.layout import Schema
from swarmkit.peers.roster import Roster
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.session import TICK_S, Arrival, Decision, Report, Session, wait_for_all
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.timings import Measured
from swarmkit.peers.wire import Message, field, finite, is_weight

REMEMBERED_ROUNDS = 256
MAX_OPEN_ROUNDS = 64  # by one peer: fragments in flight, and none of a stranger who opens rounds without end
UNREACHABLE = "the others meet at a coordinator that this peer cannot reach"
HOLD_S = 5.0  # that a joiner waits for rounds that have begun; it may miss them after all
MAX_NAMES = 64  # of rounds whose members' arrivals are remembered
MAX_TIMEOUT_S = 24 * 3600.0


def parse_key(message: Message) -> RoundKey:
    """Read a round's key; raises ProtocolError."""
    name = field(message, "round", str, lambda text: 0 < len(text) <= 128)
    return RoundKey(name, field(message, "index", int, lambda index: index >= 0))


class Coordinator:
    """Answers members' calls; every peer has one, and the active peer that joined first is asked."""

    def __init__(self, roster: Roster, rpc: Rpc, settings: NetworkSettings) -> None:
        self._roster = roster
        self._rpc = rpc
        self._settings = settings
        self._sessions: dict[RoundKey, tuple[Session, asyncio.Task[Decision]]] = {}
        self._decisions: OrderedDict[RoundKey, Decision] = OrderedDict()
        self._latest: dict[str, int] = {}  # round name -> highest index that was decided
        self._standing: dict[RoundKey, tuple[str, str]] = {}  # rounds that this peer is in: state and coordinator
        self._history: dict[str, Arrivals] = {}  # round name -> when members came
        self._holds: dict[str, float] = {}  # joiner -> monotonic time until which rounds wait for it
        rpc.handle("meet", self._on_meet)
        rpc.handle("report", self._on_report)
        rpc.handle("outcome", self._on_outcome)
        rpc.handle("hold", self._on_hold)
        roster.on_leave.append(self._on_leave)

    def remember(self, key: RoundKey, decision: Decision) -> None:
        """Keep how a round ended, for members that lost the coordinator before it could tell them."""
        self._decisions[key] = decision
        if self._roster.mine.peer_id in decision.members:
            # Only of rounds that this peer was in: a stranger may close one of any number with himself.
            self._latest[key.name] = max(key.index, self._latest.get(key.name, -1))
        while len(self._decisions) > REMEMBERED_ROUNDS:
            self._decisions.popitem(last=False)

    def note(self, key: RoundKey, standing: str | None, coordinator: str = "") -> None:
        """Note this member's standing in a round.

        "pending" while it may still hear a decision, "abandoned" once it has given that coordinator up (it will not
        act on its decision any more), None when the round has ended for it.
        """
        if standing is None:
            self._standing.pop(key, None)
        else:
            self._standing[key] = (standing, coordinator)

    def hand_over(self) -> None:
        """Send members of rounds that have not begun to the next coordinator; those that have begun are finished."""
        heir = self._roster.coordinator()
        if heir == self._roster.mine.peer_id:
            return
        for session, task in list(self._sessions.values()):
            if not session.has_begun:
                session.hand_over(heir)
                task.cancel()

    async def close(self, *, seconds: float = 5.0) -> None:
        """Stop coordinating: hand over what has not begun, finish what has, within a few seconds."""
        self.hand_over()
        tasks = [task for _, task in self._sessions.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()

    async def _on_meet(self, caller: str, message: Message) -> Message:
        key = parse_key(message)
        operation = field(message, "operation", str, lambda name: name in ("reduce", "gather"))
        arrival = Arrival(
            weight=field(message, "weight", float, is_weight),
            schema=Schema.from_message(message, max_bytes=self._settings.max_round_bytes),
            order=(field(message, "joined_at", float, finite), caller),
            answer=asyncio.get_running_loop().create_future(),
            lineage=field(message, "lineage", str, lambda text: len(text) <= 64),
            config=field(message, "config", str, lambda text: len(text) <= 64),
            rules=field(message, "rules", str, lambda text: len(text) <= 64),
            norm=field(message, "norm", float, finite),
            digest=field({"digest": "", **message}, "digest", str, lambda text: len(text) <= 64),
        )
        self._roster.heard_from(caller)
        self._holds.pop(caller, None)
        if self._settings.backup_workers and arrival.weight > 0:
            self._note_arrival(key, caller)
        decided = self._decisions.get(key)
        if decided is not None:
            return decided.for_member(caller)
        if key.index < self._latest.get(key.name, -1):
            return {"outcome": "failed", "reason": "the round closed without this peer", "missed": True}
        if key not in self._sessions:
            redirect = await self._redirect(caller)
            if redirect is not None:
                return redirect
            if field(message, "gave_up", bool):
                known = await self._learn_outcome(key, caller)
                if known is not None:
                    return known
        # The first member to come sets how long the round may take.
        timeout = field(message, "timeout", float, lambda s: 0 < s <= MAX_TIMEOUT_S)
        session = self._session(key, caller, operation, timeout)
        if session.operation != operation:
            raise ProtocolError(f"round {key} is a {session.operation}, not a {operation}")
        session.is_contested = session.is_contested or field(message, "gave_up", bool)
        return await session.meet(caller, arrival)

    def _note_arrival(self, key: RoundKey, caller: str) -> None:
        if key.name not in self._history:
            if len(self._history) >= MAX_NAMES:
                return
            self._history[key.name] = Arrivals()
        self._history[key.name].note(key.index, caller, time.monotonic())

    def _session(self, key: RoundKey, caller: str, operation: str, timeout: float) -> Session:
        if key not in self._sessions:
            if sum(session.opener == caller for session, _ in self._sessions.values()) >= MAX_OPEN_ROUNDS:
                raise ProtocolError(f"{MAX_OPEN_ROUNDS} rounds that this peer opened are still open")
            patience = self._history[key.name].patience if key.name in self._history else wait_for_all
            session = Session(
                key, operation, timeout, self._roster, self._rpc, self._settings, self._find_elsewhere, patience
            )
            now = time.monotonic()
            session.opener = caller
            session.expected |= {
                peer for peer, until in self._holds.items() if until > now and not self._roster.is_suspect(peer)
            }
            task = asyncio.ensure_future(session.run())
            task.add_done_callback(lambda done: self._on_decided(key, done))
            self._sessions[key] = (session, task)
        return self._sessions[key][0]

    def _on_decided(self, key: RoundKey, task: "asyncio.Task[Decision]") -> None:
        self._sessions.pop(key, None)
        if task.cancelled() or task.exception() is not None:
            return
        decision = task.result()
        self.remember(key, decision)
        # A joiner that has watched this round comes to the next, which may open before it has told that it trains.
        active = set(self._roster.active())
        for peer_id in decision.members:
            if peer_id not in active and not self._roster.has_left(peer_id):
                self._hold(peer_id)

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

    async def _learn_outcome(self, key: RoundKey, caller: str) -> Message | None:
        """Ask the others about a round whose coordinator a member has given up, before opening it anew.

        That coordinator may have died having told only some how it ended; or it lives, and only the caller cannot
        reach it: then the others are still with it, and the caller has missed the round. None: open it here.
        """
        deadline = time.monotonic() + 2 * self._settings.silence_s
        me = self._roster.mine.peer_id
        while key not in self._sessions:
            others = [peer for peer in self._roster.active() if peer not in (me, caller)]
            decision, meeting = await self._ask_around(key, others)
            if decision is not None:
                return decision.for_member(caller)
            standing, coordinator = self._standing.get(key, ("", ""))
            if standing == "pending":
                meeting.append(coordinator)
            if all(at in (me, caller) for at in meeting):
                return None
            if time.monotonic() > deadline:
                return {"outcome": "failed", "reason": UNREACHABLE, "missed": True}
            await asyncio.sleep(TICK_S / 2)
        return None

    async def _find_elsewhere(self, key: RoundKey, peers: set[str], patient: bool) -> Decision | None:
        """What living peers that have not come to a round here know of it; see Elsewhere.

        Of two coordinators that both wait, the one that joined first goes on and the other gives way.
        """
        mine = self._roster.order(self._roster.mine.peer_id)
        decision, meeting = await self._ask_around(key, sorted(peers))
        if decision is None and not patient and any(self._roster.order(at) < mine for at in meeting):
            return Decision("", (), (), UNREACHABLE, missed=True)
        return decision

    async def _ask_around(self, key: RoundKey, peers: Sequence[str]) -> tuple[Decision | None, list[str]]:
        """How a round ended, if any of these peers knows, and at whom those meet that wait for its end."""
        answers = await asyncio.gather(*(self._ask_outcome(peer, key) for peer in peers))
        found = [answer for answer in answers if answer is not None]
        committed = next((answer for answer in found if answer.get("state") == "committed"), None)
        meeting = [str(answer.get("at")) for answer in found if answer.get("state") == "pending"]
        return (None if committed is None else _read_decision(committed)), meeting

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
        state, coordinator = self._standing.get(key, ("unknown", ""))
        return {"state": state, "at": coordinator}

    async def _on_report(self, caller: str, message: Message) -> Message:
        key = parse_key(message)
        attempt = field(message, "attempt", str)
        report = Report(
            ok=field(message, "ok", bool),
            blame=field(message, "blame", str),
            reason=field(message, "reason", str)[:500],
            is_link=field(message, "is_link", bool),
            is_echo=field(message, "is_echo", bool),
            measured=Measured.from_message(message.get("measured")),
        )
        self._roster.heard_from(caller)
        if key in self._sessions:
            return await self._sessions[key][0].report(caller, attempt, report)
        decided = self._decisions.get(key)
        if decided is not None:
            return decided.for_member(caller)
        return {"outcome": "failed", "reason": "this peer does not coordinate that round", "missed": True}

    async def _on_hold(self, caller: str, message: Message) -> Message:
        """Wait for a joiner: rounds that have not begun stay open until it has come, at most for a round's timeout.

        Answered once those that have begun are over: a state from before their end would lack them.
        """
        redirect = await self._redirect(caller)
        if redirect is not None:
            return redirect
        self._hold(caller)
        begun = [task for session, task in self._sessions.values() if session.has_begun]
        if begun:
            await asyncio.wait(begun, timeout=HOLD_S)
        return {"outcome": "held"}

    def _hold(self, peer_id: str) -> None:
        self._holds[peer_id] = time.monotonic() + self._settings.round_timeout_s
        for session, _ in self._sessions.values():
            session.expected.add(peer_id)

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
