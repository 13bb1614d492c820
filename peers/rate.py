"""Rates of bytes: a token bucket that keeps below one, and a meter that tells one."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

BURST_S = 0.1  # what may go at once after a pause, in seconds of the rate


class TokenBucket:
    """Makes its callers wait until their bytes may go, in the order in which they ask; the rate may change any time."""

    def __init__(
        self,
        rate: Callable[[], float],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Let `rate()` bytes a second through; infinity is no limit."""
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._paid_until = -float("inf")  # when all that went so far would have gone at the rate

    async def take(self, count: int) -> None:
        """Wait until `count` bytes may go."""
        now = self._clock()
        start = max(self._paid_until, now - BURST_S)
        self._paid_until = start + count / self._rate()
        if start > now:
            await self._sleep(start - now)


class RateMeter:
    """Bytes a second over the last moments."""

    def __init__(self, window_s: float = 2.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = window_s
        self._clock = clock
        self._started = clock()
        self._recent: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, count: int) -> None:
        """Count bytes that have just passed."""
        self._recent.append((self._clock(), count))
        self._sum += count
        self._forget()

    def restart(self) -> None:
        """Forget what passed: from here on the circumstances are others."""
        self._started = self._clock()
        self._recent.clear()
        self._sum = 0

    @property
    def rate(self) -> float:
        """Bytes a second; 0 before there is anything to tell it from, and rather too few in the first moments.

        What a queue on the way lets through at once is not what comes after it.
        """
        self._forget()
        return self._sum / min(self._window, max(self._window / 4, self._clock() - self._started))

    @property
    def is_settled(self) -> bool:
        """True once it has seen enough for its rate to mean something."""
        return self._clock() - self._started > self._window / 4

    def _forget(self) -> None:
        limit = self._clock() - self._window
        while self._recent and self._recent[0][0] < limit:
            self._sum -= self._recent.popleft()[1]
