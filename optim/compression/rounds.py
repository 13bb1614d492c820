"""Rounds of compressed payloads: one gather, one sharded reduction, or a chain of reductions that goes on by itself."""

import hashlib
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim.collective import Collective, Gathered, Reduced, RoundKey, RoundStats
from swarmkit.optim.compression.codec import Exchanged
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.shards import Wire, Wired


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round came to, before anything of it is committed."""

    stats: dict[str, Any]  # of RoundStats
    mean: Tensor  # flat
    exact: list[Tensor]
    sent: Tensor | None  # flat: what of this member is in the mean; None when nothing is
    state: list[Tensor] = field(default_factory=list)
    wired: Wired | None = None  # of a sharded reduction


Read = Callable[[Gathered], Outcome]
Exchange = Generator[list[Tensor], list[Tensor], Exchanged]


class Round:
    """A round under way whose result is worked out in the background: `outcome` then has it."""

    def __init__(self) -> None:
        self.outcome: Future[Outcome] = Future()
        self.route = ""  # see RoundStats
        self._lock = threading.Lock()
        self._current: Future[Any] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Give the round up, wherever it is."""
        with self._lock:
            self._cancelled = True
            current = self._current
        if current is not None:
            current.cancel()

    def _await(self, future: Future[Any], then: Callable[[Any], None]) -> None:
        """Call `then` with the future's result, in a thread of its own: the network's has other things to do."""
        with self._lock:
            self._current = future
            if self._cancelled:
                future.cancel()

        def work() -> None:
            try:
                if future.cancelled():
                    self.outcome.cancel()
                    return
                with torch.no_grad():
                    then(future.result())
            except Exception as error:  # noqa: BLE001 - whoever waits for the outcome must hear of it
                self.outcome.set_exception(error)

        def begin(_: Future[Any]) -> None:
            if future.cancelled() or future.exception() is not None:
                work()
            else:
                threading.Thread(target=work, name="compressed-round").start()

        future.add_done_callback(begin)


class GatherRound(Round):
    """One all-gather, read by `read`."""

    def __init__(
        self, collective: Collective, payload: Sequence[Tensor], read: Read, *, round: RoundKey, weight: float
    ) -> None:
        super().__init__()
        future = collective.all_gather(payload, round=round, weight=weight)
        self._await(future, lambda gathered: self.outcome.set_result(read(gathered)))


class ShardedRound(Round):
    """One all-reduce through a wire."""

    def __init__(
        self,
        collective: Collective,
        flat: Tensor,
        wire: Wire,
        exact: Sequence[Tensor],
        *,
        round: RoundKey,
        weight: float,
        keep_sent: bool,
    ) -> None:
        super().__init__()
        self._keep_sent = keep_sent and weight > 0
        future = collective.all_reduce([flat, *exact], round=round, weight=weight, wire=wire)
        self._await(future, self._take)

    def _take(self, reduced: Reduced) -> None:
        mean, *exact = reduced.tensors
        assert reduced.wired is not None
        sent = reduced.wired.sent() if self._keep_sent else None
        self.outcome.set_result(Outcome(joined([reduced]), mean, exact, sent, wired=reduced.wired))


class LinearRound(Round):
    """An all-reduce for each stage of an exchange; what is exact rides in the last.

    Only members of one stage meet in the next: its key has the stage's id as lineage.
    """

    def __init__(
        self,
        collective: Collective,
        exchange: Exchange,
        stages: Sequence[str],
        exact: Sequence[Tensor],
        *,
        round: RoundKey,
        weight: float,
        keep_sent: bool,
    ) -> None:
        super().__init__()
        self._collective = collective
        self._keep_sent = keep_sent and weight > 0
        self._exchange = exchange
        self._stages = stages
        self._exact = exact
        self._key = round
        self._weight = weight
        self._closed: list[Reduced] = []
        self._offer(next(exchange))

    def _offer(self, tensors: list[Tensor]) -> None:
        stage = len(self._closed)
        lineage = self._closed[-1].id if self._closed else self._key.lineage
        # Past the first stage the members are known to agree.
        digest = "" if self._closed else self._key.digest
        key = RoundKey(self._key.name + self._stages[stage], self._key.index, _short(lineage), digest)
        exact = self._exact if stage == len(self._stages) - 1 else ()
        future = self._collective.all_reduce([*tensors, *exact], round=key, weight=self._weight)
        self._await(future, lambda reduced: self._take(reduced, len(tensors)))

    def _take(self, reduced: Reduced, count: int) -> None:
        self._closed.append(reduced)
        try:
            offered = self._exchange.send(reduced.tensors[:count])
        except StopIteration as stop:
            found: Exchanged = stop.value
            self.outcome.set_result(
                Outcome(
                    stats=joined(self._closed),
                    mean=found.mean,
                    exact=reduced.tensors[count:],
                    sent=found.sent() if self._keep_sent else None,
                    state=found.state,
                )
            )
            return
        try:
            self._offer(offered)
        except ValueError as error:
            raise RoundFailed(f"round {self._key}: {error}") from error


def joined(rounds: Sequence[RoundStats]) -> dict[str, Any]:
    """The stats of a chain: members, weights and id of the last round, costs of all."""
    last = rounds[-1]
    return {
        "members": last.members,
        "weights": last.weights,
        "id": last.id,
        "bytes_sent": sum(r.bytes_sent for r in rounds),
        "bytes_received": sum(r.bytes_received for r in rounds),
        "seconds": sum(r.seconds for r in rounds),
        "waited": sum(r.waited for r in rounds),
    }


def _short(lineage: str) -> str:
    """A lineage of the length that the network takes."""
    return lineage if len(lineage) <= 64 else hashlib.blake2b(lineage.encode(), digest_size=16).hexdigest()
