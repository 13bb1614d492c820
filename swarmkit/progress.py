"""Live progress of a local run: a table on a terminal, plain lines elsewhere."""

import time
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from swarmkit.metrics import Event

LINE_EVERY_S = 5.0
REDRAW_EVERY_S = 0.25
OVER = frozenset({"done", "left", "died"})


@dataclass(slots=True)
class Row:
    """What is known of one peer."""

    name: str
    state: str = "starting"
    step: int = 0
    round: int = 0
    loss: float | None = None
    tokens_per_s: float = 0.0
    tokens: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    digest: str = ""

    def update(self, event: Event) -> None:
        """Take over what an event says."""
        kind = event["kind"]
        if kind == "state":
            self.state = str(event["state"])
        elif kind == "train":
            self.step, self.tokens = int(event["step"]), int(event["tokens"])
            self.loss, self.tokens_per_s = event.get("loss"), float(event.get("tokens_per_s") or 0.0)
        elif kind == "round":
            self.round, self.step = int(event["round"]) + 1, int(event["step"])
            self.bytes_sent += int(event.get("bytes_sent") or 0)
            self.bytes_received += int(event.get("bytes_received") or 0)
            self.digest = str(event.get("digest") or "") or self.digest
        elif kind == "done":
            self.state = "done" if event["finished"] else "left"
            self.step, self.tokens = int(event["step"]), int(event["tokens"])
            self.bytes_sent, self.bytes_received = int(event["bytes_sent"]), int(event["bytes_received"])
            self.digest = str(event["digest"])


class Progress:
    """Shows the rows of a run. It starts no thread: call `refresh` often."""

    def __init__(self, steps: int, *, file: TextIO | None = None) -> None:
        self.rows: list[Row] = []
        self._steps = steps
        self._console = Console(file=file, soft_wrap=True, highlight=False)
        self._live: Live | None = None
        self._last = 0.0
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()

    def add(self, name: str) -> Row:
        """Add a peer."""
        row = Row(name)
        self.rows.append(row)
        return row

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, markup=False)

    def refresh(self, *, force: bool = False) -> None:
        """Draw anew when it is time."""
        now = time.monotonic()
        every = REDRAW_EVERY_S if self._live is not None else LINE_EVERY_S
        if not force and now - self._last < every:
            return
        self._last = now
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif any(row.step for row in self.rows):
            self.say(self._line())

    def close(self) -> None:
        """Leave the last table on the screen."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for title in ("peer", "state", "", "step", "round", "loss", "tokens/s", "sent", "received"):
            table.add_column(title, justify="left" if title in ("peer", "state") else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(
                row.name,
                row.state,
                ProgressBar(total=self._steps, completed=row.step, width=16),
                f"{row.step}/{self._steps}",
                str(row.round),
                "" if row.loss is None else f"{row.loss:.4f}",
                f"{row.tokens_per_s:,.0f}",
                megabytes(row.bytes_sent),
                megabytes(row.bytes_received),
            )
        return table

    def _line(self) -> str:
        busy = [row for row in self.rows if row.state not in OVER]
        # At the end those count that got there; the baseline is another training.
        busy = busy or [row for row in self.rows if row.state == "done" and row.name != "baseline"] or self.rows
        what = "baseline: " if all(row.name == "baseline" for row in busy) else ""
        same = [row for row in self.rows if (row.name == "baseline") == bool(what)]
        losses = [row.loss for row in busy if row.loss is not None]
        loss = f"{sum(losses) / len(losses):.4f}" if losses else "-"
        return (
            f"{what}step {min(row.step for row in busy)}/{self._steps}  round {max(row.round for row in busy)}  "
            f"loss {loss}  "
            f"{sum(row.tokens_per_s for row in busy):,.0f} tokens/s  "
            f"sent {megabytes(sum(row.bytes_sent for row in same))}  "
            f"received {megabytes(sum(row.bytes_received for row in same))}  "
            + ", ".join(f"{row.name} {row.state}" for row in busy)
        )


def megabytes(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e6:,.1f} MB"
