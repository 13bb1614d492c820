"""Where a peer's time goes between two lines of its log."""

import time


class Stopwatch:
    """Seconds since the last report, by what they went into."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin the next report."""
        self.started = time.perf_counter()
        self.compute = self.communication = self.waiting = 0.0
        self.tokens = 0  # that this peer learnt from

    @property
    def elapsed(self) -> float:
        """Seconds since it was restarted; never 0."""
        return max(1e-9, time.perf_counter() - self.started)
