"""What passes between a joiner and its donors: offers, donors that send, where a download stands."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as attribute

from swarmkit.peers.manifest import MAX_MANIFEST_BYTES, Manifest
from swarmkit.peers.rate import RateMeter
from swarmkit.peers.wire import Message, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Where a download stands."""

    done: int  # bytes that are here
    total: int  # bytes of the state
    rate: float  # bytes a second, lately
    eta_s: float  # seconds to go at that rate; infinite before there is one
    donors: tuple[str, ...]  # peers that send
    note: str = ""  # what has just happened that a user would want to know; empty: nothing but bytes


Progress = Callable[[Transfer], None]


@dataclass(frozen=True, slots=True)
class Offer:
    """What a donor says it has."""

    ticket: str  # empty: it is asked for its opinion only, or has no place
    size: int
    manifest: str  # digests
    manifest_bytes: int
    shared: str
    place: str
    round: int

    @classmethod
    def from_message(cls, message: Message) -> "Offer":
        """Read an offer; raises ProtocolError."""
        return cls(
            ticket=field(message, "ticket", str, lambda text: len(text) <= 64),
            size=field(message, "size", int, lambda size: size >= 0),
            manifest=field(message, "manifest", str, lambda text: len(text) <= 128),
            manifest_bytes=field(message, "manifest_bytes", int, lambda size: 10 <= size <= MAX_MANIFEST_BYTES),
            shared=field(message, "shared", str, lambda text: len(text) <= 128),
            place=field(message, "place", str, lambda text: len(text) <= 1 << 16),
            round=field(message, "round", int),
        )


@dataclass(slots=True, eq=False)
class Donor:
    """A peer that sends pieces."""

    peer_id: str
    ticket: str
    manifest: Manifest
    meter: RateMeter = attribute(default_factory=RateMeter)
    pending: deque[int] = attribute(default_factory=deque)  # pieces asked for, in the order in which they will come
    heard: float = attribute(default_factory=time.monotonic)  # when it last sent something, or was first asked
    requests: "asyncio.Queue[bytes | None]" = attribute(default_factory=asyncio.Queue)
    wake: asyncio.Event = attribute(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None

    @property
    def lateness(self) -> float:
        """Seconds since anything came, beyond what the pieces ahead should take; 0 when nothing is asked of it."""
        return time.monotonic() - self.heard if self.pending else 0.0


class Busy(Exception):
    """A donor has no place; it says for how long."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"busy for another {wait_s:.1f} s")
        self.wait_s = wait_s
