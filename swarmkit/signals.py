"""Signals of a peer: the first asks it to leave in order, the second ends it, and a deadline ends it in any case."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

# The share of the time that is kept for the checkpoint and good-byes: then a round in flight is given up.
LAST_SHARE = 0.4


class Leaving:
    """Turns SIGINT, SIGTERM and SIGHUP into an orderly leave within `timeout_s`.

    Until `ready` is called there is nothing to keep in order: the first signal then raises SystemExit at once.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.number: int | None = None  # the signal that came
        self.clean: Callable[[], object] = lambda: None  # what a second signal still does
        self._on_leave: Callable[[], None] | None = None
        self._on_deadline: Callable[[], None] | None = None

    def install(self) -> None:
        """Take over the signals of this process; from the main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def ready(self, on_leave: Callable[[], None], on_deadline: Callable[[], None]) -> None:
        """From now on call `on_leave` at the first signal, and `on_deadline`, in a thread, when time gets short."""
        self._on_deadline = on_deadline
        self._on_leave = on_leave

    @property
    def exit_code(self) -> int:
        """What the process returns after an orderly leave: 0, but 130 when a user pressed Ctrl-C."""
        return 130 if self.number == signal.SIGINT else 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            self.clean()
            os._exit(128 + number)
        self.number = number
        # The kernel keeps this deadline, whatever this process is stuck in.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self.timeout_s)
        if self._on_leave is None or self._on_deadline is None:
            raise SystemExit(self.exit_code)
        self._on_leave()
        timer = threading.Timer(self.timeout_s * (1 - LAST_SHARE), self._on_deadline)
        timer.daemon = True
        timer.start()
