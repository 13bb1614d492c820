"""SwarmCollective: rounds among peers that find each other on a hivemind DHT, come, go and die."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypedDict, TypeVar

from torch import Tensor

from swarmkit.optim.collective import Gathered, Reduced, RoundKey
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.shards import Wire
from swarmkit.peers.blame import Blame
from swarmkit.peers.coordinator import Coordinator
from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.exchange import Agreement, Gathering, Reduction
from swarmkit.peers.layout import Schema
from swarmkit.peers.loop import NetworkThread
from swarmkit.peers.reduction import check_payload, check_wired
from swarmkit.peers.roster import Roster
from swarmkit.peers.round_watch import RoundWatch
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.rules import Rules
from swarmkit.peers.session import Decision
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.sharding import ShardedReduction
from swarmkit.peers.timings import Measured
from swarmkit.peers.transport import Bulk, Traffic
from swarmkit.peers.wire import MAX_WEIGHT, Message, field, finite, is_weight

Operation = Literal["reduce", "gather"]
# A coordinator answers within the round's timeout, plus the pings under way and what its answer takes to arrive.
GRACE_S = 3.0
LAST_S = 1.0  # then whatever still goes on is ended
MIN_ROUND_S = 0.5
RETRY_S = 0.1  # after a call whose stream broke
REMEMBERED_ATTEMPTS = 256
T = TypeVar("T")
Exchange = Reduction | ShardedReduction | Gathering
Result = Any  # of an exchange's `run`


class _Stats(TypedDict):
    id: str
    members: tuple[str, ...]
    weights: tuple[float, ...]
    bytes_sent: int
    bytes_received: int
    seconds: float
    waited: float


class SwarmCollective:
    """The Collective of a node; see `Node.collective`.

    Protocol of a round: every member calls `meet` at the coordinator, the active peer that joined first, and hears who
    is in. Members exchange data among themselves into fresh buffers, `report`, and hear `commit`, a new attempt without
    those who died, or `failed`. When the coordinator dies, the next peer in join order asks the others how the
    round ended before it opens it again, so that nobody commits what another has not.
    """

    def __init__(
        self,
        thread: NetworkThread,
        rpc: Rpc,
        bulk: Bulk,
        roster: Roster,
        coordinator: Coordinator,
        settings: NetworkSettings,
        round_timeout: float | None = None,
        rules: Rules | None = None,
    ) -> None:
        self.peer_id = rpc.peer_id
        self._thread = thread
        self._rpc = rpc
        self._bulk = bulk
        self._roster = roster
        self._coordinator = coordinator
        self._settings = settings
        self._rules = Rules.of(settings) if rules is None else rules
        self._timeout = settings.round_timeout_s if round_timeout is None else round_timeout
        self._attempts: dict[str, asyncio.Future[Exchange]] = {}
        self._running: dict[str, asyncio.Task[Any]] = {}  # attempt -> the exchange, for `abort`
        self._aborted: deque[str] = deque(maxlen=REMEMBERED_ATTEMPTS)  # an abort may overtake what it aborts
        self._rounds: set[asyncio.Task[Any]] = set()
        self._closed = ""  # why no round can be had any more
        self.watch = RoundWatch(roster, settings.heartbeat_s)
        rpc.handle("abort", self._on_abort)
        bulk.handle("reduce", self._serve)
        bulk.handle("gather", self._serve)

    # -- the Collective protocol ---------------------------------------------------------------------------------------

    def all_reduce(
        self, tensors: Sequence[Tensor], *, round: RoundKey, weight: float, wire: Wire | None = None
    ) -> Future[Reduced]:
        """See Collective.all_reduce."""
        check_wired(tensors, weight, wire)
        return self._thread.submit(self._track(self._all_reduce(list(tensors), round, float(weight), wire)))

    def all_gather(self, payload: Sequence[Tensor], *, round: RoundKey, weight: float) -> Future[Gathered]:
        """See Collective.all_gather."""
        check_payload(payload, weight)
        return self._thread.submit(self._track(self._all_gather(list(payload), round, float(weight))))

    def close(self, reason: str = "the collective was closed") -> None:
        """Leave; rounds in flight end in RoundFailed."""
        self._closed = self._closed or reason
        self._thread.loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._rounds])

    async def _track(self, round: Coroutine[None, None, T]) -> T:
        task = asyncio.ensure_future(round)
        self._rounds.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise RoundFailed(self._closed) from None
            raise
        finally:
            task.cancel()
            self._rounds.discard(task)

    # -- one round -----------------------------------------------------------------------------------------------------

    async def _all_reduce(self, tensors: list[Tensor], key: RoundKey, weight: float, wire: Wire | None) -> Reduced:
        member = _Member(self, "reduce", tensors, key, weight, wire)
        result, decision = await member.take_part()
        means, wired = (result, None) if wire is None else result
        return Reduced(tensors=means, wired=wired, **member.stats(decision))

    async def _all_gather(self, payload: list[Tensor], key: RoundKey, weight: float) -> Gathered:
        member = _Member(self, "gather", payload, key, weight)
        result, decision = await member.take_part()
        return Gathered(payloads=result, **member.stats(decision))

    async def _serve(self, sender: str, header: Message, incoming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        attempt = field(header, "attempt", str, lambda text: len(text) <= 64)
        exchange = await asyncio.wait_for(asyncio.shield(self._slot(attempt)), self._settings.stall_s)
        async for chunk in exchange.serve(sender, incoming):
            yield chunk

    def _slot(self, attempt: str) -> "asyncio.Future[Exchange]":
        """Where an attempt's exchange will be: streams of faster members come before we have begun."""
        if attempt not in self._attempts:
            while len(self._attempts) >= 64:
                self._attempts.pop(next(iter(self._attempts)))
            self._attempts[attempt] = asyncio.get_running_loop().create_future()
        return self._attempts[attempt]

    async def _on_abort(self, caller: str, message: Message) -> Message:
        attempt = field(message, "attempt", str, lambda text: len(text) <= 64)
        self._aborted.append(attempt)
        task = self._running.get(attempt)
        if task is not None:
            task.cancel()
        return {}


class _Member:
    """This peer's part in one round."""

    def __init__(
        self,
        owner: SwarmCollective,
        operation: Operation,
        tensors: list[Tensor],
        key: RoundKey,
        weight: float,
        wire: Wire | None = None,
    ) -> None:
        self._c = owner
        self._operation = operation
        self._tensors = tensors
        self._key = key
        self._weight = weight
        self._wire = wire
        self._started = time.monotonic()
        self._ends = self._started + owner._timeout  # of the round, whoever coordinates it
        self._deadline = self._ends + GRACE_S
        self._gave_up = False  # a coordinator
        self._begun_attempts: list[str] = []
        self._begun = self._started
        self._traffic = Traffic()
        self._attempt = ""  # the attempt whose complete result we hold
        self._measured: Measured | None = None  # in that attempt
        self._result: Result = None

    def stats(self, decision: Decision) -> _Stats:
        """What a result tells about its round."""
        return {
            "id": decision.attempt,
            "members": decision.members,
            "weights": decision.weights,
            "bytes_sent": self._traffic.sent,
            "bytes_received": self._traffic.received,
            "seconds": time.monotonic() - self._started,
            "waited": self._begun - self._started,
        }

    async def take_part(self) -> tuple[Result, Decision]:
        """Meet, exchange, report, until the round is decided; raises RoundFailed."""
        if self._c._closed:
            raise RoundFailed(self._c._closed)
        try:
            async with asyncio.timeout(self._left() + LAST_S):
                answer = await self._meet()
                while field(answer, "outcome", str) == "begin":
                    answer = await self._attempt_once(answer)
                return self._conclude(answer)
        except TimeoutError as error:
            raise RoundFailed(f"round {self._key}: nothing was decided in time", missed=True) from error
        except (ProtocolError, PeerUnreachable, ValueError, KeyError, OSError) as error:
            # Whatever a peer or the network did, the trainer hears of a failed round and goes on.
            raise RoundFailed(f"round {self._key}: {error!r}", missed=bool(self._attempt)) from error
        finally:
            self._c._coordinator.note(self._key, None)
            for attempt in self._begun_attempts:
                # All members that could still read from us have reported by now.
                self._c._attempts.pop(attempt, None)

    async def _norm(self) -> float:
        """What this member says of its contribution's norm, worked out beside the network's thread."""
        if not self._c._rules.max_norm_ratio or self._operation != "reduce" or self._weight == 0:
            return 0.0
        return await asyncio.to_thread(self._c._rules.norm_of, self._tensors)

    async def _meet(self) -> Message:
        """Come to the round at whoever coordinates it, following redirects and replacing the dead."""
        message: Message = {
            "round": self._key.name,
            "index": self._key.index,
            "operation": self._operation,
            "weight": self._weight,
            "schema": Schema.of(self._tensors).to_message(),
            "form": "" if self._wire is None else self._wire.form,
            "lineage": self._key.lineage,
            "config": self._c._roster.mine.config,
            "rules": str(self._c._rules),
            "norm": await self._norm(),
            "digest": self._key.digest,
            "joined_at": self._c._roster.mine.joined_at,
        }
        target = self._c._roster.coordinator()
        redirects = 0
        while self._left() > 0:
            self._coordinator = target
            self._c._coordinator.note(self._key, "pending", target)
            # A coordinator that comes late to it has what is left of the round.
            left = max(MIN_ROUND_S, self._ends - time.monotonic())
            answer = await self._ask("meet", {**message, "gave_up": self._gave_up, "timeout": left})
            if answer is None:
                target = self._c._roster.coordinator()
            elif answer.get("outcome") == "redirect":
                target = field(answer, "to", str, lambda text: 0 < len(text) <= 128)
                redirects += 1
                if redirects > 1:
                    # Two tables that do not agree yet: give them a moment.
                    await asyncio.sleep(0.1)
            else:
                return answer
        raise RoundFailed(f"no coordinator answered within {self._c._timeout} s", missed=bool(self._attempt))

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    async def _ask(self, method: str, message: Message) -> Message | None:
        """Call the coordinator and watch that it lives; None when it does not.

        A call whose stream breaks while it lives is repeated: to give it up is to tear the round apart.
        """
        is_alive = True
        while is_alive and self._left() > 0:
            call = asyncio.ensure_future(
                self._c._rpc.call(self._coordinator, method, message, timeout=max(0.1, self._left()))
            )
            try:
                if await self._while_coordinator_lives(call):
                    return call.result()
                break
            except PeerUnreachable:
                is_alive = await self._c._roster.is_alive(self._coordinator)
                await asyncio.sleep(RETRY_S)
            finally:
                call.cancel()
        self._c._coordinator.note(self._key, "abandoned", self._coordinator)
        self._gave_up = True
        if self._left() > 0:
            self._c._roster.suspect(self._coordinator)
        return None

    async def _while_coordinator_lives(self, task: asyncio.Future[Any]) -> bool:
        """Wait for a task; False when the coordinator died or the time was up before it was done."""
        while self._left() > 0:
            await asyncio.wait([task], timeout=min(1.0, self._left()))
            if task.done():
                return True
            if not await self._c._roster.is_alive(self._coordinator):
                return False
        return False

    async def _attempt_once(self, begin: Message) -> Message:
        """Exchange data once and report; returns the coordinator's answer."""
        agreement = self._read_agreement(begin)
        if agreement.attempt and not self._attempt:
            self._begun = time.monotonic()
        self._attempt = ""
        report: Message = {
            "round": self._key.name,
            "index": self._key.index,
            "attempt": agreement.attempt,
            "ok": True,
            "blame": "",
            "reason": "",
            "is_link": True,
            "is_echo": False,
        }
        try:
            self._result = await self._exchange(agreement)
            self._attempt = agreement.attempt
            report["measured"] = None if self._measured is None else self._measured.to_message()
        except Blame as blame:
            report |= {"ok": False, "blame": blame.peer_id or "", "reason": blame.reason[:400]}
            report |= {"is_link": blame.is_link, "is_echo": blame.is_echo}
        answer = await self._ask("report", report)
        if answer is None:
            # The coordinator died. What we hold counts only if somebody heard it commit.
            answer = await self._meet()
        return answer

    async def _exchange(self, agreement: Agreement) -> Result:
        exchange = self._make_exchange(agreement)
        self._begun_attempts.append(agreement.attempt)
        if agreement.attempt in self._c._aborted:
            raise Blame(None, "the coordinator aborted the attempt")
        slot = self._c._slot(agreement.attempt)
        if not slot.done():
            slot.set_result(exchange)
        task: asyncio.Task[Any] = asyncio.ensure_future(exchange.run(self._c._bulk))
        self._c._running[agreement.attempt] = task
        try:
            if not await self._while_coordinator_lives(task):
                raise Blame(None, "the exchange outlasted the round, or its coordinator")
            if task.cancelled():
                raise Blame(None, "the coordinator aborted the attempt")
            self._measured = exchange.measured
            return task.result()
        finally:
            task.cancel()
            self._c._running.pop(agreement.attempt, None)

    def _make_exchange(self, agreement: Agreement) -> Exchange:
        rest = agreement, self._c.peer_id, self._tensors
        traffic, chunk_bytes = self._traffic, self._c._settings.chunk_bytes
        if self._operation == "gather":
            return Gathering(*rest, traffic, chunk_bytes)
        if self._wire is None:
            return Reduction(*rest, traffic, chunk_bytes, self._c._rules)
        return ShardedReduction(*rest, self._wire, traffic, chunk_bytes)

    def _read_agreement(self, begin: Message) -> Agreement:
        members = field(begin, "members", list)
        weights = [float(weight) for weight in field(begin, "weights", list) if isinstance(weight, int | float)]
        if not all(isinstance(peer, str) for peer in members) or len(weights) != len(members):
            raise ProtocolError("members and weights do not match")
        if self._c.peer_id not in members or len(set(members)) != len(members):
            raise ProtocolError("the list of members is not one that we can be in")
        if not all(map(is_weight, weights)):
            raise ProtocolError(f"weights must be between 0 and {MAX_WEIGHT:.0e}")
        limit = self._c._settings.max_round_bytes
        schemas = [Schema.from_message({"schema": entry}, max_bytes=limit) for entry in field(begin, "schemas", list)]
        if self._operation == "gather" and (
            len(schemas) != len(members) or schemas[members.index(self._c.peer_id)] != Schema.of(self._tensors)
        ):
            raise ProtocolError("the list of payloads does not match the members")
        attempt = field(begin, "attempt", str, lambda text: 0 < len(text) <= 64)
        norm = field(begin, "norm", float, finite)
        return Agreement(attempt, tuple(members), tuple(weights), tuple(schemas), norm)

    def _conclude(self, answer: Message) -> tuple[Result, Decision]:
        if field(answer, "outcome", str) != "commit":
            reason = field(answer, "reason", str)[:500]
            missed, diverged = field(answer, "missed", bool), answer.get("diverged") is True
            raise RoundFailed(f"round {self._key}: {reason}", missed=missed, diverged=diverged)
        attempt = field(answer, "attempt", str)
        members = tuple(str(member) for member in field(answer, "members", list))
        weights = tuple(float(weight) for weight in field(answer, "weights", list))
        if attempt != self._attempt:
            raise RoundFailed(f"round {self._key} was committed with a result that this peer lost", missed=True)
        decision = Decision(attempt, members, weights)
        self._c._coordinator.remember(self._key, decision)
        self._c.watch.closed(self._key, members, answer.get("timings"))
        return self._result, decision
