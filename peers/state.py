"""StateServer: gives this peer's state to joiners in pieces, a few joiners at a time and no faster than training bears.

A joiner calls `state` for an offer and a ticket, reads the manifest, and asks for pieces over one two-way stream. The
snapshot behind a ticket stays as it was while training goes on. See `fetch.py` for the other side.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from math import inf

from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.manifest import PIECE_BYTES, Frozen, Snapshot
from swarmkit.peers.rate import RateMeter, TokenBucket
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.transport import Bulk
from swarmkit.peers.wire import Message, decode, field

Provider = Callable[[], Snapshot]
Version = Callable[[], str]
MAX_FROZEN = 3  # snapshots that are in memory at the same time, those of earlier rounds included
KEEP_S = 10.0  # how long a snapshot that nobody downloads waits for the next joiner
ANSWER_S = 5.0  # a joiner is told to ask again when a snapshot takes longer
MAX_PIECES_ASKED = 4096  # in one message


@dataclass(slots=True)
class _Ticket:
    """A joiner that may download one snapshot."""

    peer_id: str
    frozen: Frozen
    touched: float  # monotonic time of its last sign of life
    streams: int = 0
    sent: int = 0


class StateServer:
    """Serves snapshots of this peer's state to joiners."""

    def __init__(self, rpc: Rpc, bulk: Bulk, settings: NetworkSettings) -> None:
        self._provider: Provider | None = None
        self._version: Version | None = None
        self._settings = settings
        self._bulk = bulk
        self._tickets: dict[str, _Ticket] = {}
        self._latest: tuple[str, Frozen, float] | None = None  # version, snapshot, monotonic time of its last use
        self._freezing: asyncio.Task[Frozen] | None = None
        self._bucket = TokenBucket(self._allowed)
        self._meter = RateMeter()
        self._fastest = 0.0  # bytes/s that were seen to go out, outside of rounds
        rpc.handle("state", self._on_state)
        rpc.handle("state_done", self._on_done)
        bulk.handle("manifest", self._serve_manifest)
        bulk.handle("state", self._serve)

    def serve(self, provider: Provider, version: Version | None = None) -> None:
        """Offer what `provider` returns; it is called in a worker thread.

        `version` names what it would return, without the work: joiners that come while it says the same share one
        snapshot. Without it every joiner costs one.
        """
        self._provider, self._version, self._latest = provider, version, None

    # -- offers --------------------------------------------------------------------------------------------------------

    async def _on_state(self, caller: str, message: Message) -> Message:
        if self._provider is None:
            raise ProtocolError("this peer holds no state yet")
        wants_to_load = field(message, "load", bool)
        is_first = field(message, "first", bool)  # no other donor serves this joiner yet
        self._sweep()
        if is_first and not self._has_place(caller, is_first):
            return {"outcome": "busy", "wait_s": self._time_to_next_place()}
        frozen = await self._freeze()
        if frozen is None:
            return {"outcome": "wait", "wait_s": 0.0}
        ticket = ""
        if wants_to_load and self._has_place(caller, is_first):
            ticket = self._give_ticket(caller, frozen)
        elif wants_to_load and is_first:  # others took the places while the snapshot was made
            return {"outcome": "busy", "wait_s": self._time_to_next_place()}
        manifest = frozen.manifest
        return {
            "outcome": "offer",
            "ticket": ticket,
            "size": manifest.size,
            "manifest": manifest.digest,
            "manifest_bytes": len(frozen.encoded),
            "shared": manifest.shared_digest,
            "place": manifest.place,
            "round": manifest.round,
        }

    def _has_place(self, caller: str, is_first: bool) -> bool:
        """Who has a donor already leaves room for those that have none."""
        others = {ticket.peer_id for ticket in self._tickets.values()} - {caller}
        limit = self._settings.max_downloads
        return len(others) < (limit if is_first else max(1, limit // 3))

    def _give_ticket(self, caller: str, frozen: Frozen) -> str:
        for old in [name for name, held in self._tickets.items() if held.peer_id == caller and not held.streams]:
            del self._tickets[old]
        ticket = secrets.token_hex(8)
        self._tickets[ticket] = _Ticket(caller, frozen, time.monotonic())
        return ticket

    async def _freeze(self) -> Frozen | None:
        """The present state; None when it takes longer than a call may, and the caller should ask again."""
        if self._freezing is None:
            version = self._version() if self._version is not None else ""
            if self._latest is not None and version and self._latest[0] == version:
                self._latest = (version, self._latest[1], time.monotonic())
                return self._latest[1]
            kept = {id(ticket.frozen) for ticket in self._tickets.values()}
            if len(kept) >= MAX_FROZEN:
                raise ProtocolError("joiners download too many different snapshots from this peer already")
            self._freezing = asyncio.ensure_future(self._take(version))
        freezing = self._freezing
        await asyncio.wait([freezing], timeout=ANSWER_S)
        if not freezing.done():
            return None
        if self._freezing is freezing:
            self._freezing = None
        return freezing.result()

    async def _take(self, version: str) -> Frozen:
        assert self._provider is not None
        provider, before = self._provider, self._latest
        frozen = await asyncio.to_thread(lambda: Frozen(provider()))
        if before is not None and before[1].manifest.digest == frozen.manifest.digest:
            frozen = before[1]  # one copy is enough
        # Named by what was there before: had it changed meanwhile, the next joiner takes a new one.
        self._latest = (version, frozen, time.monotonic())
        asyncio.get_running_loop().call_later(KEEP_S + 1, self._sweep)
        return frozen

    def _sweep(self) -> None:
        """Forget joiners that are gone and the snapshot that nobody downloads."""
        now = time.monotonic()
        patience = 4 * self._settings.stall_s
        for name, ticket in list(self._tickets.items()):
            if not ticket.streams and now - ticket.touched > patience:
                del self._tickets[name]
        if self._latest is not None:
            _, frozen, used = self._latest
            if now - used > KEEP_S and not any(ticket.frozen is frozen for ticket in self._tickets.values()):
                self._latest = None

    def _time_to_next_place(self) -> float:
        """Seconds until the joiner that is furthest will be done, at the present rate; a guess when nothing moves."""
        left = min((ticket.frozen.manifest.size - ticket.sent for ticket in self._tickets.values()), default=0)
        share = self._fastest / max(1, len(self._tickets))
        return min(30.0, max(0.2, left / share)) if share > 0 else 1.0

    async def _on_done(self, caller: str, message: Message) -> Message:
        ticket = self._tickets.get(field(message, "ticket", str))
        if ticket is not None and ticket.peer_id == caller:
            del self._tickets[field(message, "ticket", str)]
            asyncio.get_running_loop().call_later(KEEP_S + 1, self._sweep)
        return {}

    # -- streams -------------------------------------------------------------------------------------------------------

    def _find(self, sender: str, header: Message) -> _Ticket:
        ticket = self._tickets.get(field(header, "ticket", str))
        if ticket is None or ticket.peer_id != sender:
            raise ProtocolError("unknown or expired ticket")
        return ticket

    async def _serve_manifest(
        self, sender: str, header: Message, incoming: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        ticket = self._find(sender, header)
        for start in range(0, len(ticket.frozen.encoded), PIECE_BYTES):
            ticket.touched = time.monotonic()
            yield ticket.frozen.encoded[start : start + PIECE_BYTES]

    async def _serve(self, sender: str, header: Message, incoming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Send the pieces that the joiner's messages ask for, in the order in which it asks."""
        ticket = self._find(sender, header)
        ticket.streams += 1
        try:
            async for request in incoming:
                numbers = field(decode(request), "pieces", list, lambda found: len(found) <= MAX_PIECES_ASKED)
                for number in numbers:
                    if type(number) is not int:
                        raise ProtocolError("pieces are asked for by number")
                    data = ticket.frozen.piece(number)
                    await self._bucket.take(len(data))
                    ticket.touched = time.monotonic()
                    ticket.sent += len(data)
                    self._note(len(data))
                    yield data
        finally:
            ticket.streams -= 1
            ticket.touched = time.monotonic()

    # -- the rate ------------------------------------------------------------------------------------------------------

    def _allowed(self) -> float:
        """Bytes a second for all joiners together; while rounds exchange, they come first."""
        limit = self._settings.state_mbit * 1e6 / 8 or inf
        if self._bulk.in_round:
            return self._settings.state_share * min(limit, self._fastest or limit)
        return limit

    def _note(self, count: int) -> None:
        """Measure how fast pieces go out while no round does."""
        if self._bulk.in_round:
            self._meter.restart()
            return
        self._meter.add(count)
        if self._meter.is_settled:
            self._fastest = self._meter.rate
