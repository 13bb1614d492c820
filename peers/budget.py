"""Budgets that refill: how much of something a stranger may have of this peer in a while."""

import time
from collections.abc import Callable

MAX_CALLERS = 256


class Budget:
    """A token bucket of `capacity` that fills up again within `refill_s` seconds."""

    def __init__(self, capacity: float, refill_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity, self._rate = capacity, capacity / refill_s
        self._clock = clock
        self._left, self._at = capacity, clock()

    def has(self, amount: float) -> bool:
        """True when so much is left."""
        now = self._clock()
        self._left = min(self._capacity, self._left + (now - self._at) * self._rate)
        self._at = now
        return self._left >= amount

    def spend(self, amount: float) -> None:
        """Take what `has` has said is there."""
        self._left -= amount


class SharedBudget:
    """A budget for each caller below one for all: new peer ids cost nothing, so the second is what protects."""

    def __init__(
        self, each: float, together: float, refill_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._each, self._refill_s, self._clock = each, refill_s, clock
        self._together = Budget(together, refill_s, clock=clock)
        self._callers: dict[str, Budget] = {}

    def take(self, caller: str, amount: float) -> bool:
        """Take from both budgets, or from none and say so."""
        if caller not in self._callers and len(self._callers) >= MAX_CALLERS:
            self._callers.pop(next(iter(self._callers)))
        own = self._callers.setdefault(caller, Budget(self._each, self._refill_s, clock=self._clock))
        if not own.has(amount) or not self._together.has(amount):
            return False
        own.spend(amount)
        self._together.spend(amount)
        return True
