"""One stream of events: JSON lines always, TensorBoard and Prometheus by configuration."""

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from swarmkit.errors import ConfigError

Event = dict[str, Any]


class Sink(Protocol):
    """Takes events as they happen."""

    def write(self, event: Event) -> None:
        """Take one event."""
        ...

    def close(self) -> None:
        """Write out what is buffered."""
        ...


class EventLog:
    """Appends events to a file, one JSON object a line with time, peer and kind, and hands them to the sinks.

    Safe to use from several threads. A line is written whole and flushed, so that whoever follows the file, or comes
    after a kill -9, reads complete events.
    """

    def __init__(
        self, path: Path, *, peer: str = "", sinks: Sequence[Sink] = (), clock: Callable[[], float] = time.time
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.peer = peer
        self.dropped = 0  # events that the disk had no room for
        broken = _ends_within_a_line(path)
        self._file = path.open("a", encoding="utf-8")
        if broken:
            self._file.write("\n")  # or the first event of a restarted peer would be lost with the half line
        self._sinks = list(sinks)
        self._clock = clock
        self._lock = threading.Lock()

    def emit(self, kind: str, **fields: object) -> None:
        """Write one event; NaN and infinities become null, because JSON has no words for them."""
        event: Event = {"time": self._clock(), "peer": self.peer, "kind": kind, **fields}
        line = json.dumps({key: _plain(value) for key, value in event.items()})
        with self._lock:
            if self._file.closed:
                return
            self._write(line)
            for sink in self._sinks:
                sink.write(event)

    def _write(self, line: str) -> None:
        """Append a line; a full disk costs events, never the training."""
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            if not self.dropped:
                print(f"events cannot be written ({error.strerror}): {self._file.name}", file=sys.stderr)
            self.dropped += 1

    def close(self) -> None:
        """Close the file and the sinks; later events are dropped."""
        with self._lock:
            with contextlib.suppress(OSError):  # what is still buffered may not fit either
                self._file.close()
            for sink in self._sinks:
                sink.close()
            self._sinks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ends_within_a_line(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def read_events(path: Path) -> Iterator[Event]:
    """Read the events of a file; a last line that a killed process left half written is skipped."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "kind" in event:
                yield event


def _numbers(event: Event) -> Iterator[tuple[str, float]]:
    for key, value in event.items():
        if key not in ("time", "step") and isinstance(value, int | float) and not isinstance(value, bool):
            yield key, float(value)


class TensorBoardSink:
    """Writes every number of an event as kind/field against the inner step."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "log.tensorboard=true needs tensorboard: pip install 'swarmkit-torch[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, event: Event) -> None:
        """See Sink."""
        step = event.get("step")
        if isinstance(step, int):
            for key, value in _numbers(event):
                self._writer.add_scalar(f"{event['kind']}/{key}", value, step)

    def close(self) -> None:
        """See Sink."""
        self._writer.close()


class PrometheusSink:
    """Serves the newest number of every field on loopback, and counts rounds, failures and bytes."""

    def __init__(self, port: int, *, host: str = "127.0.0.1") -> None:
        import prometheus_client as prometheus

        self._registry = prometheus.CollectorRegistry()
        self._gauges: dict[str, prometheus.Gauge] = {}
        labels = ["peer"]
        self._rounds = prometheus.Counter("swarmkit_rounds", "Closed rounds", labels, registry=self._registry)
        self._failed = prometheus.Counter("swarmkit_rounds_failed", "Failed rounds", labels, registry=self._registry)
        self._bytes = prometheus.Counter(
            "swarmkit_round_bytes", "Payload bytes of rounds", ["peer", "direction"], registry=self._registry
        )
        try:
            self._server, self._thread = prometheus.start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise ConfigError(
                f"log.prometheus_port={port}: cannot listen on {host}:{port} ({error.strerror})"
            ) from error
        self.port: int = self._server.server_port

    def write(self, event: Event) -> None:
        """See Sink."""
        import prometheus_client as prometheus

        peer = str(event["peer"])
        if event["kind"] == "round":
            (self._rounds if event.get("failed") is None else self._failed).labels(peer).inc()
            for direction in ("sent", "received"):
                self._bytes.labels(peer, direction).inc(float(event.get(f"bytes_{direction}", 0)))
        if event["kind"] in ("train", "round", "eval"):
            for key, value in _numbers(event):
                name = f"swarmkit_{event['kind']}_{key}"
                if name not in self._gauges:
                    help_text = f"{key} of the last {event['kind']} event"
                    self._gauges[name] = prometheus.Gauge(name, help_text, ["peer"], registry=self._registry)
                self._gauges[name].labels(peer).set(value)

    def close(self) -> None:
        """See Sink."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
