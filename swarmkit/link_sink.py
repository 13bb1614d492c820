"""The sink that sends a peer's events to its supervisor."""

from swarmkit.metrics import Event
from swarmkit.processes import Link


class LinkSink:
    """Sends events to the supervisor."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def write(self, event: Event) -> None:
        """See Sink; what a slow supervisor has no room for is dropped, but never how the peer ended."""
        plain = {
            key: value if isinstance(value, int | float | str | None) else str(value) for key, value in event.items()
        }
        self._link.send(plain, patience=2.0 if event["kind"] in ("done", "sample", "eval") else 0.0)

    def close(self) -> None:
        """See Sink."""
