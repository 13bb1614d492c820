"""What a peer in a terminal of its own says while it trains: a line now and then, and who comes and goes."""

import time
from collections.abc import Callable

from swarmkit.metrics import Event

EVERY_S = 5.0


class ConsoleSink:
    """Says where training stands, at most every few seconds, and what others would want to know at once."""

    def __init__(self, say: Callable[[str], None], steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._steps = steps
        self._clock = clock
        self._last = -EVERY_S
        self._members = 0
        self._sent = 0

    def write(self, event: Event) -> None:
        """See Sink."""
        kind = event["kind"]
        if kind == "round":
            self._on_round(event)
        elif kind == "train" and self._clock() - self._last >= EVERY_S:
            self._last = self._clock()
            self._say(
                f"step {event['step']}/{self._steps}  loss {float(event['loss']):.4f}  "
                f"{float(event['tokens_per_s']):,.0f} tokens/s  {self._members} peers in the last round  "
                f"sent {self._sent / 1e6:,.1f} MB"
            )
        elif kind == "peer_joined":
            self._say(f"{str(event['id'])[-8:]} is in round {event['round']}")
        elif kind == "peer_lost":
            self._say(f"lost a peer: {event['reason']}")
        elif kind == "fault":
            self._say(str(event["text"]))
        elif kind == "eval":
            self._say(f"step {event['step']}: validation loss {float(event['loss']):.4f} nats")

    def _on_round(self, event: Event) -> None:
        self._sent += int(event["bytes_sent"])
        if event["failed"] is not None:
            self._say(f"round {event['round']} failed, training goes on: {event['failed']}")
        else:
            self._members = len(event["members"])

    def close(self) -> None:
        """See Sink."""
