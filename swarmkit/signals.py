"""How a peer is asked to leave: a first signal or a call do it in order, a second signal or a deadline at once."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

# The share of the time that is kept for the checkpoint and good-byes: then a round in flight is given up.
LAST_SHARE = 0.4


class Leaving:
    """Turns SIGINT, SIGTERM and SIGHUP, and calls of `ask`, into an orderly leave within `timeout_s`.

    Until `ready` is called there is nothing to keep in order: the process then ends at once, by SystemExit.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.number: int | None = None  # the signal that came
        self.reason = ""  # why this process leaves; empty: it does not
        self.clean: Callable[[], object] = lambda: None  # what a second signal still does
        self._on_leave: Callable[[], object] | None = None
        self._on_deadline: Callable[[], object] | None = None
        self._ends = math.inf
        self._begun = threading.Lock()  # held for ever once it leaves: a handler cannot wait, only find it taken

    def install(self) -> None:
        """Take over the signals of this process; from the main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def ready(self, on_leave: Callable[[], object], on_deadline: Callable[[], object]) -> None:
        """From now on call `on_leave` when asked to leave, and `on_deadline`, in a thread, when time gets short."""
        self._on_deadline = on_deadline
        self._on_leave = on_leave

    @property
    def is_leaving(self) -> bool:
        """True once this process was asked to leave."""
        return self._begun.locked()

    @property
    def left_s(self) -> float:
        """Seconds until the process is ended, whatever it is at; infinite when it does not leave."""
        return self._ends - time.monotonic()

    @property
    def exit_code(self) -> int:
        """What the process returns after an orderly leave: 0, but 130 when a user pressed Ctrl-C."""
        return 130 if self.number == signal.SIGINT else 0

    def end(self, code: int) -> int:
        """Return `code`, but end a process that leaves with it right here, when all is in order.

        The interpreter's own end may wait for a connection to a peer that does not answer, longer than there is time.
        """
        if self.is_leaving:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code

    def ask(self, reason: str) -> bool:
        """Leave in order; False when that is under way. From any thread, after `ready`.

        A signal that comes afterwards is the first one: whoever stops a service often does both.
        """
        assert self._on_leave is not None, "nothing is ready yet"
        return self._begin(reason)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            self.clean()
            os._exit(128 + number)
        self.number = number
        self._begin(signal.Signals(number).name)

    def _begin(self, reason: str) -> bool:
        if not self._begun.acquire(blocking=False):
            return False
        self.reason = reason
        # The kernel keeps this deadline, whatever this process is stuck in.
        signal.setitimer(signal.ITIMER_REAL, self.timeout_s)
        self._ends = time.monotonic() + self.timeout_s
        if self._on_leave is None or self._on_deadline is None:
            raise SystemExit(self.exit_code)
        self._on_leave()
        timer = threading.Timer(self.timeout_s * (1 - LAST_SHARE), self._on_deadline)
        timer.daemon = True
        timer.start()
        return True
