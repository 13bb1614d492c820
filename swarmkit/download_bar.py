"""What a joiner sees of the state on its way: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from swarmkit.peers.transfer import Transfer

LINE_EVERY_S = 2.0
REDRAW_EVERY_S = 0.2


class DownloadBar:
    """Shows one download. It starts no thread: call `show` with every step of it, and `close` at the end."""

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draw on `file`, standard output unless given, if that is a terminal; else say lines."""
        self._say = say
        self._clock = clock
        self._console = Console(file=file or sys.stdout)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last = -float("inf")

    def show(self, at: Transfer) -> None:
        """Bring the bar up to date; what a user would want to know is said at once."""
        if at.note:
            self._say(at.note)
        now = self._clock()
        every = REDRAW_EVERY_S if self._console.is_terminal else LINE_EVERY_S
        if not at.total or (now - self._last < every and at.done < at.total):
            return
        self._last = now
        if self._console.is_terminal:
            self._draw(at)
        else:
            self._say(line(at))

    def _draw(self, at: Transfer) -> None:
        if self._bar is None:
            columns = (TextColumn("state"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[rate]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, auto_refresh=False)
            self._task = self._bar.add_task("state", total=at.total, rate="")
            self._bar.start()
        rate = f"{at.rate / 1e6:.1f} MB/s from {len(at.donors)}"
        self._bar.update(self._task, total=at.total, completed=at.done, rate=rate, refresh=True)

    def close(self) -> None:
        """Leave the last bar on the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def line(at: Transfer) -> str:
    """A download in one line."""
    left = f", {at.eta_s:.0f} s to go" if 0 < at.eta_s < float("inf") else ""
    return (
        f"downloading the state: {100 * at.done // at.total} % of {at.total / 1e6:.1f} MB at {at.rate / 1e6:.1f} MB/s "
        f"from {len(at.donors)} donor{'s' if len(at.donors) != 1 else ''}{left}"
    )
