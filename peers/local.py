"""LocalSwarm: replicas as threads of one process, for tests and simulations; deterministic, and it can lose members."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from torch import Tensor

from swarmkit.optim.collective import Gathered, Reduced, RoundKey
from swarmkit.optim.errors import KeyTaken, RoundFailed
from swarmkit.optim.mean import weighted_mean
from swarmkit.optim.norms import is_finite
from swarmkit.optim.shards import Shards, Wire
from swarmkit.peers.layout import Schema
from swarmkit.peers.reduction import Refused, check_payload, check_wired, find_diverged

T = TypeVar("T")
Operation = Literal["reduce", "gather", "shard"]


@dataclass(slots=True)
class _Arrival:
    tensors: list[Tensor]
    weight: float
    future: Future[Any]
    started: float
    lineage: str
    wire: Wire | None
    digest: str


@dataclass(slots=True)
class _Round:
    key: RoundKey
    operation: Operation
    timer: threading.Timer
    arrivals: dict[str, _Arrival] = field(default_factory=dict)
    last_arrival: float = 0.0
    # Who does not start from what the majority starts from, and why.
    diverged: list[tuple[_Arrival, Refused]] = field(default_factory=list)


class LocalSwarm:
    """`size` members that meet in this process; a round closes when all who live have come, or in `round_timeout`.

    Results are what the members of a network would compute, bit for bit; the counted bytes are what a butterfly
    all-reduce and a full exchange would send.
    """

    def __init__(self, size: int, *, round_timeout: float = 30.0) -> None:
        if size < 1:
            raise ValueError(f"size={size}: a swarm needs at least one member")
        self._timeout = round_timeout
        self._lock = threading.Lock()
        self._rounds: dict[RoundKey, _Round] = {}
        self._closed: dict[str, int] = {}  # round name -> highest index that closed
        self._alive = [f"local{rank}" for rank in range(size)]
        self._order = list(self._alive)
        self.collectives = [LocalCollective(self, peer_id) for peer_id in self._order]

    def run(self, task: Callable[["LocalCollective", int], T], timeout: float = 120.0) -> list[T]:
        """Run `task(collective, rank)` for each living member in a thread of its own; raises the first error.

        A member whose task fails leaves, so that the others do not wait for it.
        """
        members = [(rank, c) for rank, c in enumerate(self.collectives) if c.peer_id in self._alive]
        with ThreadPoolExecutor(len(members), thread_name_prefix="member") as pool:
            futures = [pool.submit(self._run_one, task, collective, rank) for rank, collective in members]
            return [future.result(timeout) for future in futures]

    def _run_one(self, task: Callable[["LocalCollective", int], T], collective: "LocalCollective", rank: int) -> T:
        try:
            return task(collective, rank)
        except BaseException:
            self.kill(collective.peer_id)
            raise

    def kill(self, peer_id: str, reason: str = "the member was lost") -> None:
        """Lose a member as by kill -9: what it offered is void and nobody waits for it any more."""
        with self._lock:
            if peer_id not in self._alive:
                return
            self._alive.remove(peer_id)
            lost = [arrival for round in self._rounds.values() if (arrival := round.arrivals.pop(peer_id, None))]
            lost = [arrival for arrival in lost if arrival.future.set_running_or_notify_cancel()]
            complete = [self._close(key) for key in list(self._rounds) if self._is_complete(key)]
        for arrival in lost:
            arrival.future.set_exception(RoundFailed(f"{peer_id}: {reason}"))
        for closed in complete:
            _settle(closed)

    def revive(self, peer_id: str) -> "LocalCollective":
        """Let a member come back, or a new one join; rounds wait for it from now on."""
        with self._lock:
            if peer_id not in self._order:
                self._order.append(peer_id)
            if peer_id not in self._alive:
                self._alive.append(peer_id)
            collective = LocalCollective(self, peer_id)
            self.collectives = [c for c in self.collectives if c.peer_id != peer_id] + [collective]
            return collective

    def offer(
        self,
        peer_id: str,
        operation: Operation,
        tensors: list[Tensor],
        key: RoundKey,
        weight: float,
        wire: Wire | None = None,
    ) -> Future[Any]:
        """Bring a member's contribution to a round."""
        future: Future[Any] = Future()
        now = time.monotonic()
        complete: _Round | None = None
        with self._lock:
            if peer_id not in self._alive:
                future.set_exception(RoundFailed(f"{peer_id} was lost or closed"))
                return future
            if key.index <= self._closed.get(key.name, -1) and key not in self._rounds:
                future.set_exception(RoundFailed(f"round {key} closed without this peer", missed=True))
                return future
            if key not in self._rounds:
                timer = threading.Timer(self._timeout, self._expire, (key,))
                timer.daemon = True
                self._rounds[key] = _Round(key, operation, timer)
                timer.start()
            round = self._rounds[key]
            if peer_id in round.arrivals or operation != round.operation:
                raise KeyTaken(f"round {key}: a key is used once, for one operation")
            round.arrivals[peer_id] = _Arrival(tensors, weight, future, now, key.lineage, wire, key.digest)
            round.last_arrival = now
            future.add_done_callback(lambda done: self._withdraw(key, peer_id) if done.cancelled() else None)
            if self._is_complete(key):
                complete = self._close(key)
        if complete is not None:
            _settle(complete)
        return future

    def _withdraw(self, key: RoundKey, peer_id: str) -> None:
        with self._lock:
            if key in self._rounds:
                self._rounds[key].arrivals.pop(peer_id, None)

    def _expire(self, key: RoundKey) -> None:
        with self._lock:
            if key not in self._rounds:
                return
            closed = self._close(key)
        _settle(closed)

    def _is_complete(self, key: RoundKey) -> bool:
        return set(self._alive) <= set(self._rounds[key].arrivals)

    def _close(self, key: RoundKey) -> _Round:
        """Decide who is in a round, under the lock; what follows from it needs no lock."""
        round = self._rounds.pop(key)
        round.timer.cancel()
        self._closed[key.name] = max(key.index, self._closed.get(key.name, -1))
        arrived = ((peer, round.arrivals[peer]) for peer in self._order if peer in round.arrivals)
        round.arrivals = {peer: a for peer, a in arrived if a.future.set_running_or_notify_cancel()}
        others = find_diverged([(peer, a.lineage, a.digest) for peer, a in round.arrivals.items()])
        round.diverged = [(round.arrivals.pop(peer), refused) for peer, refused in others.items()]
        return round


def _settle(round: _Round) -> None:
    """Give the members their results, outside the lock: whoever waits for one may offer to the next round at once."""
    for arrival, refused in round.diverged:
        reason = f"round {round.key}: {refused.reason}"
        arrival.future.set_exception(RoundFailed(reason, missed=True, diverged=refused.diverged))
    try:
        results = _OPERATIONS[round.operation](round)
    except (ValueError, OverflowError) as error:
        for arrival in round.arrivals.values():
            arrival.future.set_exception(RoundFailed(f"round {round.key}: {error}"))
        return
    arrivals = list(round.arrivals.values())
    for arrival, result, sent, received in results:
        stats: dict[str, Any] = {
            "id": str(round.key),
            "members": tuple(round.arrivals),
            "weights": tuple(a.weight for a in arrivals),
            "bytes_sent": sent,
            "bytes_received": received,
            "seconds": time.monotonic() - arrival.started,
            "waited": round.last_arrival - arrival.started,
        }
        arrival.future.set_result(
            Gathered(payloads=result["payloads"], **stats)
            if round.operation == "gather"
            else Reduced(tensors=result["tensors"], wired=result.get("wired"), **stats)
        )


_Result = tuple[_Arrival, dict[str, Any], int, int]


def _check_alike(arrivals: list[_Arrival]) -> tuple[list[float], list[Schema]]:
    """Weights and schemas; raises ValueError when there is no mean of these."""
    schemas = [Schema.of(arrival.tensors, arrival.wire) for arrival in arrivals]
    for schema in schemas[1:]:
        if schema != schemas[0]:
            raise ValueError(f"tensors differ between members: {schemas[0]} and {schema}")
    weights = [arrival.weight for arrival in arrivals]
    if arrivals and sum(weights) <= 0:
        raise ValueError("every weight is 0: nobody contributed")
    return weights, schemas


def _reduce(round: _Round) -> list[_Result]:
    arrivals = list(round.arrivals.values())
    weights, schemas = _check_alike(arrivals)
    means = [weighted_mean(parts, weights) for parts in zip(*(a.tensors for a in arrivals), strict=True)]
    if not all(is_finite(mean) for mean in means):
        raise ValueError("the mean overflows its dtype")
    count = len(arrivals)
    moved = [2 * (count - 1) * schema.num_bytes // count for schema in schemas]
    return [
        (a, {"tensors": [mean.clone() for mean in means]}, sent, sent) for a, sent in zip(arrivals, moved, strict=True)
    ]


def _gather(round: _Round) -> list[_Result]:
    arrivals = list(round.arrivals.values())
    sizes = [Schema.of(arrival.tensors).num_bytes for arrival in arrivals]
    return [
        (
            a,
            {"payloads": [[t.detach().clone() for t in b.tensors] for b in arrivals]},
            (len(sizes) - 1) * size,
            sum(sizes) - size,
        )
        for a, size in zip(arrivals, sizes, strict=True)
    ]


class _Garbled(Exception):
    """A member's message is none."""

    def __init__(self, member: int, reason: str) -> None:
        super().__init__(reason)
        self.member = member


def _shard(round: _Round) -> list[_Result]:
    """Reduce through wires; who sends what is no message loses the round, and the others begin anew."""
    while True:
        arrivals = list(round.arrivals.values())
        try:
            return _shard_once(arrivals)
        except _Garbled as error:
            culprit = list(round.arrivals)[error.member]
            arrival = round.arrivals.pop(culprit)
            reason = f"round {round.key}: {culprit} sent {error}"
            arrival.future.set_exception(RoundFailed(reason, missed=True))


def _shard_once(arrivals: list[_Arrival]) -> list[_Result]:
    weights, _ = _check_alike(arrivals)
    shards = [Shards(a.wire, a.tensors, weights, i) for i, a in enumerate(arrivals) if a.wire is not None]
    sent, received = [0] * len(shards), [0] * len(shards)

    def move(source: int, target: int, message: Tensor, take: Callable[[int, Tensor], None]) -> None:
        try:
            take(source, message)
        except ValueError as error:
            raise _Garbled(source, str(error)) from error
        if source != target:
            sent[source] += message.numel()
            received[target] += message.numel()

    for owner, own in enumerate(shards):
        for sender in own.contributors:
            move(sender, owner, shards[sender].outgoing(owner), own.accept)
        mean = own.mean()
        for member, shard in enumerate(shards):
            if member != owner:
                move(owner, member, mean, shard.adopt)
    results = [dict(zip(("tensors", "wired"), shard.result(), strict=True)) for shard in shards]
    return list(zip(arrivals, results, sent, received, strict=True))


_OPERATIONS: dict[Operation, Callable[[_Round], list[_Result]]] = {
    "reduce": _reduce,
    "gather": _gather,
    "shard": _shard,
}


class LocalCollective:
    """One member of a LocalSwarm; see Collective."""

    def __init__(self, swarm: LocalSwarm, peer_id: str) -> None:
        self.peer_id = peer_id
        self._swarm = swarm

    def all_reduce(
        self, tensors: Sequence[Tensor], *, round: RoundKey, weight: float, wire: Wire | None = None
    ) -> Future[Reduced]:
        """See Collective.all_reduce."""
        check_wired(tensors, weight, wire)
        operation: Operation = "reduce" if wire is None else "shard"
        return self._swarm.offer(self.peer_id, operation, list(tensors), round, float(weight), wire)

    def all_gather(self, payload: Sequence[Tensor], *, round: RoundKey, weight: float) -> Future[Gathered]:
        """See Collective.all_gather."""
        check_payload(payload, weight)
        return self._swarm.offer(self.peer_id, "gather", list(payload), round, float(weight))

    def close(self) -> None:
        """Leave the swarm."""
        self._swarm.kill(self.peer_id, "the collective was closed")
