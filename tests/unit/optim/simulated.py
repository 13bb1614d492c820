"""A collective in simulated time: rounds take as long as they are told to, and nothing sleeps."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from swarmkit.optim import Reduced, RoundFailed, RoundKey


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Arriving(Future[Reduced]):
    """A future whose result is there at a time, and waiting for it lets the time pass."""

    def __init__(self, clock: Clock, at: float) -> None:
        super().__init__()
        self._clock, self._at = clock, at

    def done(self) -> bool:
        return self._clock.now >= self._at

    def result(self, timeout: float | None = None) -> Reduced:
        self._clock.now = max(self._clock.now, self._at)
        return super().result(timeout)


class SimulatedCollective:
    """One peer among `members` that all contribute the same; each round takes `seconds`, some fail."""

    def __init__(
        self, clock: Clock, seconds: float, *, members: int = 1, failing: Sequence[int] = (), missed: bool = False
    ) -> None:
        self.peer_id = "peer0"
        self.clock, self.seconds, self.members = clock, seconds, members
        self.failing, self.missed = set(failing), missed
        self.offered: list[tuple[RoundKey, float, list[Tensor]]] = []
        self.most_at_once = 0
        self._busy: list[float] = []

    def all_reduce(self, tensors: Sequence[Tensor], *, round: RoundKey, weight: float) -> Future[Reduced]:
        self.offered.append((round, weight, [tensor.clone() for tensor in tensors]))
        self._busy = [end for end in self._busy if end > self.clock.now] + [self.clock.now + self.seconds]
        self.most_at_once = max(self.most_at_once, len(self._busy))
        future = _Arriving(self.clock, self.clock.now + self.seconds)
        if round.index in self.failing:
            future.set_exception(RoundFailed("the line was cut", missed=self.missed))
            return future
        names = tuple(f"peer{i}" for i in range(self.members))
        future.set_result(
            Reduced(
                tensors=[tensor.clone() for tensor in tensors],
                members=names,
                weights=(weight,) * self.members,
                bytes_sent=0,
                bytes_received=0,
                seconds=self.seconds,
                id=str(round),
            )
        )
        return future

    def all_gather(self, payload: Sequence[Tensor], *, round: RoundKey, weight: float) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass
