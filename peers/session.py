"""One round as its coordinator runs it: gather members, begin alike for all, retry without the dead, decide once."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from swarmkit.optim.collective import RoundKey
from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.layout import Schema
from swarmkit.peers.reduction import find_diverged, major_lineage
from swarmkit.peers.roster import Roster
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.rules import median_norm
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.timings import Measured, RoundTimings, combine
from swarmkit.peers.wire import Message

logger = logging.getLogger(__name__)
# The share of round_timeout_s that a round waits for slow members; the rest is for the exchange.
PATIENCE = 0.8
TICK_S = 0.5
EMPTY_S = 5.0
MAX_ATTEMPTS = 8


@dataclass(slots=True)
class Arrival:
    """A member that has come to a round, and the call of it that waits for an answer."""

    weight: float
    schema: Schema
    order: tuple[float, str]
    answer: asyncio.Future[Message]
    lineage: str = ""  # what its contribution starts from; empty: fits all
    config: str = ""  # hash of the run's configuration as the member has it; empty: fits all
    rules: str = ""  # how it averages
    norm: float = 0.0  # of its contribution, as it says itself
    at: float = field(default_factory=time.monotonic)
    digest: str = ""  # of the anchor that it starts from; empty: not known


# Asks peers about a round: how it ended elsewhere, or, unless `patient`, that they still meet elsewhere; else None.
Elsewhere = Callable[[RoundKey, set[str], bool], Awaitable["Decision | None"]]


# Of these members, how many a round needs, and how many seconds after the first it may then begin.
Patience = Callable[[Sequence[str]], tuple[int, float]]


def wait_for_all(members: Sequence[str]) -> tuple[int, float]:
    """The patience of rounds without backup workers."""
    return len(members), inf


@dataclass(slots=True)
class Report:
    """How an attempt went for one member."""

    ok: bool
    blame: str  # the member that this one takes for the cause; empty: nobody in particular
    reason: str
    is_link: bool = True  # a stream broke, which says as much of the reporter as of the blamed; else bad data came
    measured: Measured | None = None
    is_echo: bool = False  # the blamed had ended its own attempt: a consequence, not the cause


@dataclass(frozen=True, slots=True)
class Decision:
    """How a round ended, for all alike; `attempt` is empty when it failed."""

    attempt: str
    members: tuple[str, ...]
    weights: tuple[float, ...]
    reason: str = ""
    missed: bool = False  # it failed here because the others met elsewhere
    timings: RoundTimings | None = None

    def for_member(self, peer_id: str) -> Message:
        """The answer to a member, or to someone who was not one."""
        if not self.attempt:
            return {"outcome": "failed", "reason": self.reason, "missed": self.missed}
        if peer_id not in self.members:
            return {"outcome": "failed", "reason": "the round closed without this peer", "missed": True}
        return {
            "outcome": "commit",
            "attempt": self.attempt,
            "members": list(self.members),
            "weights": list(self.weights),
            "timings": None if self.timings is None else self.timings.to_message(),
        }


class Session:
    """One round as its coordinator sees it."""

    def __init__(
        self,
        key: RoundKey,
        operation: str,
        timeout: float,
        roster: Roster,
        rpc: Rpc,
        settings: NetworkSettings,
        elsewhere: Elsewhere,
        patience: Patience = wait_for_all,
    ) -> None:
        """Open a round.

        `elsewhere` tells what living peers that did not come know of it, `patience` how many of its members it needs.
        """
        self.key = key
        self.opener = ""  # the peer that came first
        self.is_contested = False  # opened by a member that had given another coordinator up
        self._elsewhere, self._patience = elsewhere, patience
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
        self._has_contributors = False
        self._broken_links: dict[str, set[str]] = {}  # member -> members at the other end of streams that broke

    @property
    def has_begun(self) -> bool:
        """True once members were told to exchange."""
        return bool(self._attempt)

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
        if peer_id in self._arrivals:
            # An earlier call of the same member, whose link broke under it.
            self._answer(peer_id, {"outcome": "failed", "reason": "this peer came once more", "missed": True})
        if arrival.weight > 0 and not self._has_contributors:
            # A joiner that only looks on may come long before the others: the round's time starts with them.
            self._has_contributors = True
            self._opened = time.monotonic()
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

    def hand_over(self, to: str) -> None:
        """Send those who wait to another coordinator: this one leaves."""
        for peer_id in self._arrivals:
            self._answer(peer_id, {"outcome": "redirect", "to": to})

    # -- what the coordinator does -------------------------------------------------------------------------------------

    async def run(self) -> Decision:
        """Gather members, run attempts, decide; always ends within the round's timeout."""
        try:
            self.decision = await self._gather_members() or await self._attempts()
        except asyncio.CancelledError:
            self.decision = Decision("", (), (), "the coordinator left")
            raise
        except Exception as error:  # the members wait for an answer, whatever went wrong here
            logger.exception("round %s: the coordinator failed", self.key)
            self.decision = Decision("", (), (), f"the coordinator failed: {error!r}")
        finally:
            for peer_id, arrival in self._arrivals.items():
                if not arrival.answer.done() and self.decision is not None:
                    arrival.answer.set_result(self.decision.for_member(peer_id))
        return self.decision

    def _absent(self) -> set[str]:
        return (self.expected | set(self._roster.active())) - set(self._arrivals) - self.gone

    def _left(self) -> float:
        return self._opened + self._timeout - time.monotonic()

    async def _gather_members(self) -> Decision | None:
        """Wait for all that are expected; a decision when they turn out to have met without this coordinator.

        Two coordinators of one round would let it close twice. So nobody closes it without peers that live before
        these have said that they are in no such round.
        """
        while self._absent():
            left = self._opened + PATIENCE * self._timeout - time.monotonic()
            if not self._arrivals and time.monotonic() - self._opened > EMPTY_S:
                raise asyncio.CancelledError  # all have withdrawn: it is as if nobody had come
            if self._has_contributors and left <= 0:
                return await self._elsewhere(self.key, self._absent(), False)
            patience = self._left_for_slow_members()
            if patience <= 0:
                return await self._elsewhere(self.key, self._absent(), False)
            await self._wait_change(min(TICK_S, max(0.05, left), patience))
            await self._drop_dead(self._absent())
            if self.is_contested and (found := await self._elsewhere(self.key, self._absent(), True)):
                return found
        return None

    def _left_for_slow_members(self) -> float:
        """Seconds until the round begins without its slowest members; infinite while too few are here."""
        if not self._has_contributors or self.expected - set(self._arrivals) - self.gone:
            return inf  # joiners are waited for
        members = sorted(set(self._arrivals) | self._absent())
        count, limit = self._patience(members)
        return self._opened + limit - time.monotonic() if len(self._arrivals) >= count else inf

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
        self._refuse_others(excluded, "config", "runs by another configuration than the others")
        self._refuse_others(excluded, "rules", "has other network.trim and network.max_norm_ratio than the others")
        self._refuse_diverged(excluded)
        refused = set(excluded)
        reason = "no member is left"
        for number in range(MAX_ATTEMPTS):
            self._refuse_mismatched(excluded)
            members = sorted(
                (peer for peer in self._arrivals if peer not in self.gone and peer not in excluded),
                key=lambda peer: self._arrivals[peer].order,
            )
            if not members:
                return Decision("", (), (), reason)
            if 2 * len(members) < len(set(self._arrivals) - self.gone - refused):
                return Decision("", (), (), f"more than half of the living members cannot take part: {reason}")
            if 2 * len(members) < len(set(members) | self._roster.silent()):
                # They may well meet without this peer. Those who have ended are forgotten soon, and then it goes on.
                return Decision("", (), (), "more than half of the members cannot be heard from here")
            if self._left() <= 0:
                return Decision("", (), (), f"no result within {self._timeout} s: {reason}")
            if sum(self._arrivals[peer].weight for peer in members) <= 0:
                return Decision("", (), (), "every weight is 0: nobody contributed")
            self._begin(members)
            trouble = await self._await_reports()
            if trouble is None:
                weights = tuple(self._arrivals[peer].weight for peer in members)
                arrived = {peer: self._arrivals[peer].at for peer in members}
                measured = {peer: report.measured for peer, report in self._reports.items()}
                timings = combine(members, weights, arrived, measured)
                return Decision(self._attempt, tuple(members), weights, timings=timings)
            reporter, broken = trouble
            if self._left() <= 0:
                return Decision("", (), (), f"no result within {self._timeout} s: {broken.reason}")
            await self._hear_out(broken)
            reporter, broken = self._find_cause(reporter, broken)
            reason = broken.reason
            await self._abort(members)
            if not await self._drop_dead(set(members)):
                culprit = self._find_culprit(reporter, broken, may_exclude=number > 0)
                if culprit in members:
                    excluded[culprit] = broken.reason
                    self._answer(culprit, {"outcome": "failed", "reason": broken.reason, "missed": True})
        return Decision("", (), (), f"{MAX_ATTEMPTS} attempts broke; the last: {reason}")

    async def _hear_out(self, broken: Report) -> None:
        """Give the other ends of broken streams a moment to tell of theirs: one end alone could accuse either."""
        if not (broken.is_link and broken.blame):
            return
        deadline = min(time.monotonic() + TICK_S, self._opened + self._timeout)
        while (left := deadline - time.monotonic()) > 0:
            blamed = {report.blame for report in self._reports.values()}  # they may be dead
            if not set(self._members) - set(self._reports) - blamed:
                return
            await self._wait_change(left)

    def _find_cause(self, reporter: str, broken: Report) -> tuple[str, Report]:
        """The first trouble that is no consequence of another's; if all say that they are, the given one counts."""
        if not broken.is_echo:
            return reporter, broken
        bad = ((peer, report) for peer, report in self._reports.items() if not report.ok and report.blame)
        return next(((peer, report) for peer, report in bad if not report.is_echo), (reporter, broken))

    def _find_culprit(self, reporter: str, broken: Report, *, may_exclude: bool) -> str:
        """Who has to leave so that the others can finish, all being alive; empty: nobody, try once more.

        Bad data speak against who sent them. A broken stream has two ends: once it has happened again, the member at
        most of the broken ones goes, and the reporter when that is no one in particular: a peer whose own uplink
        fails must not talk the others out of the round one by one.
        """
        if not broken.blame:
            return ""
        if not broken.is_link:
            return broken.blame
        for member, report in [(reporter, broken), *self._reports.items()]:
            if report.is_echo and not broken.is_echo:
                continue
            if not report.ok and report.is_link and report.blame in self._members and member in self._members:
                self._broken_links.setdefault(member, set()).add(report.blame)
                self._broken_links.setdefault(report.blame, set()).add(member)
        if not may_exclude:
            return ""
        most = max(len(others) for others in self._broken_links.values())
        worst = [member for member, others in self._broken_links.items() if len(others) == most]
        return reporter if reporter in worst else worst[0]

    def _refuse_others(self, excluded: dict[str, str], what: str, reason: str) -> None:
        """Members must agree in an attribute of their arrivals; the majority's counts, on a tie the first's."""
        known = sorted((a.order, peer, str(getattr(a, what))) for peer, a in self._arrivals.items())
        known = [(order, peer, said) for order, peer, said in known if said and peer not in excluded]
        major = major_lineage(said for _, _, said in known)
        for _, peer, said in known:
            if said != major:
                excluded[peer] = f"this peer {reason}"
                self._answer(peer, {"outcome": "failed", "reason": excluded[peer], "missed": False})

    def _refuse_diverged(self, excluded: dict[str, str]) -> None:
        """Members must start from the same anchor; who does not misses the round and fetches the state.

        This is what turns every divergence, however it came about, into a state transfer.
        """
        known = [(a.order, peer, a.lineage, a.digest) for peer, a in self._arrivals.items() if peer not in excluded]
        for peer, refused in find_diverged([member[1:] for member in sorted(known)]).items():
            if refused.diverged:
                logger.warning("round %s: %s", self.key, refused.reason)
            excluded[peer] = refused.reason
            answer: Message = {"outcome": "failed", "reason": refused.reason, "missed": True}
            self._answer(peer, {**answer, "diverged": refused.diverged})

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
            "norm": median_norm([arrival.norm for arrival in arrivals if arrival.weight > 0]),
            "schemas": [] if self.operation == "reduce" else schemas,
        }

    async def _await_reports(self) -> tuple[str, Report] | None:
        """Wait until all members report success (None) or one reports trouble, dies, or the time is up."""
        last_ping = time.monotonic()
        while True:
            bad = next(((peer, report) for peer, report in self._reports.items() if not report.ok), None)
            if bad is not None:
                return bad
            missing = set(self._members) - set(self._reports)
            if not missing:
                return None
            if self._left() <= 0:
                names = ", ".join(peer[-8:] for peer in sorted(missing))
                return "", Report(False, "", f"no report from {names}")
            await self._wait_change(min(TICK_S, self._left()))
            if time.monotonic() - last_ping > TICK_S:
                last_ping = time.monotonic()
                dead = await self._drop_dead(set(self._members) - set(self._reports))
                if dead:
                    names = ", ".join(peer[-8:] for peer in sorted(dead))
                    return "", Report(False, "", f"{names} died in the round")

    async def _abort(self, members: list[str]) -> None:
        """Have members that still exchange stop and report, so that all can begin anew."""
        attempt = self._attempt
        await asyncio.gather(*(self._send_abort(peer, attempt) for peer in members if peer not in self._reports))

    async def _send_abort(self, peer_id: str, attempt: str) -> None:
        try:
            await self._rpc.call(peer_id, "abort", {"attempt": attempt}, timeout=self._settings.silence_s / 2)
        except (PeerUnreachable, ProtocolError):
            return  # dead or deaf: the pings that follow decide
