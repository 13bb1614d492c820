"""Who is in the run: heartbeats on the DHT, the peer table, and who is suspected to be gone."""

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from typing import Any

from swarmkit.peers.engine import DHTNode, get_dht_time
from swarmkit.peers.errors import AccessRefused, PeerUnreachable, ProtocolError
from swarmkit.peers.records import seal, unseal
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.shares import SharesExchange
from swarmkit.peers.wire import Message, decode, encode, field

logger = logging.getLogger(__name__)
EXPIRE_BEATS = 5  # a record lives for this many heartbeats
MAX_RECORD_BYTES = 8192  # with signature and credential
CONFIRMED = 2  # times in a row that a peer's port was closed: it has ended
TCP_ADDRESS = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>\d{1,5})(?:/|$)")
MAX_AHEAD_S = 300.0  # of a peer's clock before this one's
MAX_BEHIND_S = 60.0  # beyond a record's lifetime: then it is a replay
MAX_REMEMBERED = 10_000  # peers of whose newest record the time is kept, so that an older one is never taken again
TOLD_FIRST_S = 0.5  # that a coordinator hears later than the others who leaves
MAX_LOST = 64  # peers that fell silent and are looked for
PURPOSE = "heartbeat"
LEAVING_STATES = frozenset({"draining", "done", "gone"})
# States in which a replica takes part in rounds and is waited for.
ACTIVE_STATES = frozenset({"waiting", "training", "evaluating"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """One row of the peer table: what a peer said of itself in its last heartbeat."""

    peer_id: str
    role: str = "replica"
    state: str = "starting"
    joined_at: float = 0.0  # DHT time at which the peer entered the run; orders peers, nothing else
    updated_at: float = 0.0  # DHT time of this heartbeat
    slot: int = -1  # which share of the data the peer draws; -1: none
    data_from: int = 0  # the first sample of that share, through all epochs, which is this peer's
    data_to: int = 0  # up to where closed rounds have taken its samples
    round: int = 0
    step: int = 0
    samples: int = 0
    tokens_per_s: float = 0.0
    loss: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    device: str = ""
    version: str = ""
    digest: str = ""  # of the anchor after the last round for which it is known
    lineage: str = ""  # hash chain over the rounds up to that one: peers that have it equal must have equal digests
    config: str = ""  # hash of the run's configuration as this peer has it
    revoked: str = ""  # digest of the revocations that this peer knows
    address: str = ""  # with which others join the run here
    control: str = ""  # host:port of its control plane, where others could reach it
    late: str = ""  # who holds the rounds up, as this peer sees it: the ends of their ids and what is late

    @property
    def may_coordinate(self) -> bool:
        """True for a replica that is not leaving; whether it trains yet does not matter."""
        return self.role == "replica" and self.state not in LEAVING_STATES

    @property
    def is_active(self) -> bool:
        """True for a replica that rounds wait for."""
        return self.role == "replica" and self.state in ACTIVE_STATES


def _direct(record: PeerRecord | None) -> tuple[str, int] | None:
    """Host and port of a peer that others dial themselves, not through a relay."""
    found = TCP_ADDRESS.match(record.address) if record is not None else None
    return None if found is None or "/p2p-circuit" in found.string else (found["host"], int(found["port"]))


def peers_key(run: str) -> str:
    """Where a run's heartbeats lie on the DHT."""
    return f"{run}.peers"


_KINDS: dict[str, type] = {f.name: f.type for f in fields(PeerRecord)}  # type: ignore[misc]


def read_record(peer_id: str, data: bytes) -> PeerRecord:
    """Read what a peer signed; raises ProtocolError."""
    message = decode(data)
    values: dict[str, Any] = {name: field(message, name, kind) for name, kind in _KINDS.items() if name in message}
    for name, value in values.items():
        if isinstance(value, str):
            # Names and texts of strangers end up on terminals.
            values[name] = "".join(c for c in value[:200] if c.isprintable())
    if values.get("peer_id") != peer_id:
        raise ProtocolError(f"heartbeat of {str(values.get('peer_id'))[:60]} stored under {peer_id[:60]}")
    return PeerRecord(**values)


class Roster:
    """Publishes this peer's heartbeat and keeps the table of the others'."""

    def __init__(self, dht: DHTNode, rpc: Rpc, run: str, settings: NetworkSettings, mine: PeerRecord) -> None:
        self.mine = mine
        self.changed = asyncio.Event()
        self._dht = dht
        self._rpc = rpc
        self._access = rpc.access
        self._run = run
        self._key = peers_key(run)
        self._settings = settings
        self._table: dict[str, PeerRecord] = {}
        self._sealed: dict[str, bytes] = {}  # peer id -> its newest record as it came
        self._newest: OrderedDict[str, float] = OrderedDict()  # peer id -> time of its newest record, forgotten or not
        self._arrived: dict[str, float] = {}  # peer id -> monotonic time at which its newest record came
        self._suspects: dict[str, float] = {}  # peer id -> monotonic time of the suspicion
        self._pings: dict[str, asyncio.Task[bool]] = {}  # one under way for each peer
        self._heard: dict[str, float] = {}  # peer id -> monotonic time of its last sign of life
        self._unanswered: dict[str, float] = {}  # peer id -> monotonic time of the first ping since then
        self._refusals: dict[str, int] = {}  # times in a row that its port was closed
        self.lost: OrderedDict[str, PeerRecord] = OrderedDict()  # whose records expired without a good-bye
        rpc.handle("ping", self._on_ping, onlookers=True)
        rpc.handle("beat", self._on_beat, onlookers=True)
        self._access.on_revoked.append(self._drop_revoked)
        self.on_leave: list[Callable[[str], None]] = []
        self.shares = SharesExchange(rpc)

    # -- heartbeats ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Beat and refresh for ever; a beat that fails is said and the next one tried, or this peer would vanish."""
        while True:
            try:
                if self.mine.role != "observer":
                    await self.beat()
                await self.refresh()
            except Exception:
                logger.warning("a heartbeat failed", exc_info=True)
            await asyncio.sleep(self._settings.heartbeat_s)

    async def beat(self) -> None:
        """Store this peer's record on the DHT."""
        record = self._seal_mine()
        await self._dht.store(self._key, record, get_dht_time() + self._lifetime, subkey=self.mine.peer_id)

    def _seal_mine(self) -> bytes:
        """Sign this peer's record as it is now, later than any before it."""
        now = max(get_dht_time(), self.mine.updated_at + 1e-6)
        self.mine = replace(self.mine, updated_at=now, revoked=self._access.revocations_digest)
        return seal(self._access.identity, PURPOSE, self._run, encode(asdict(self.mine)), self._access.credential)

    def say(self, **values: object) -> None:
        """Change what the next heartbeat says."""
        self.mine = replace(self.mine, **values)  # type: ignore[arg-type]

    async def refresh(self) -> None:
        """Read everybody's record from the DHT."""
        found = await self._dht.get(self._key, latest=True)
        if found is None or not isinstance(found.value, dict):
            return
        for peer_id, entry in found.value.items():
            self._accept(peer_id, entry.value)
        self._forget_expired()

    def _accept(self, peer_id: object, data: object) -> None:
        if not isinstance(peer_id, str) or not isinstance(data, bytes):
            return
        if data == self._sealed.get(peer_id):
            return
        try:
            record = self._check(peer_id, data)
        except ProtocolError:
            return  # a stranger's rubbish under our key is no reason to stop
        now = get_dht_time()
        if not now - self._lifetime - MAX_BEHIND_S <= record.updated_at <= now + MAX_AHEAD_S:
            return  # a replay, or one that would hide every later record of that peer
        known = self._table.get(peer_id)
        if record.updated_at > self._newest.get(peer_id, -inf):
            self._table[peer_id] = record
            self._sealed[peer_id] = data
            self._newest[peer_id] = record.updated_at
            self._newest.move_to_end(peer_id)
            self.lost.pop(peer_id, None)
            while len(self._newest) > MAX_REMEMBERED:
                self._newest.popitem(last=False)
            self._arrived[peer_id] = time.monotonic()
            self.shares.hear(peer_id, record.slot, record.data_from, record.data_to)
            if known is None or known.state != record.state:
                self.changed.set()

    def _check(self, peer_id: str, data: bytes) -> PeerRecord:
        """Read a record that anybody may have stored; raises ProtocolError."""
        if len(data) > MAX_RECORD_BYTES:
            raise ProtocolError(f"heartbeat of {len(data)} bytes: the limit is {MAX_RECORD_BYTES}")
        body, credential = unseal(peer_id, PURPOSE, self._run, data)
        self._access.check(peer_id, credential)
        record = read_record(peer_id, body)
        if not self._access.may_appear_as(peer_id, record.role):
            raise ProtocolError(f"{peer_id[-8:]} was not invited as {record.role}")
        return record

    def _drop_revoked(self) -> None:
        """Take those out of the table who have lost their invitation; rounds go on without them."""
        for peer_id in list(self._table):
            try:
                self._access.check_known(peer_id)
            except AccessRefused:
                self.lost.pop(peer_id, None)
                self._forget(peer_id)
                for callback in self.on_leave:
                    callback(peer_id)

    @property
    def _lifetime(self) -> float:
        """Seconds that a record is good for: longer than it takes to tell that its peer is silent."""
        return max(EXPIRE_BEATS * self._settings.heartbeat_s, 2 * self._settings.silence_s)

    def _forget_expired(self) -> None:
        """Drop who has not beaten for a lifetime, by this peer's own clock: clocks of peers may disagree."""
        limit = time.monotonic() - self._lifetime
        for peer_id in [peer for peer, arrived in self._arrived.items() if arrived < limit]:
            record = self._table.get(peer_id)
            if record is not None and record.state not in LEAVING_STATES and peer_id != self.mine.peer_id:
                self.lost[peer_id] = record
            self._forget(peer_id)
        while len(self.lost) > MAX_LOST:
            self.lost.popitem(last=False)

    def _forget(self, peer_id: str) -> None:
        self._table.pop(peer_id, None)
        self._sealed.pop(peer_id, None)
        for known in (self._arrived, self._suspects, self._heard, self._unanswered, self._refusals):
            known.pop(peer_id, None)
        self.changed.set()

    async def announce(self, state: str) -> None:
        """Change this peer's state and tell the others at once, not only with the next heartbeat.

        Whoever closes the rounds hears of one that leaves last: the others know by then why the next one lacks it.
        """
        self.mine = replace(self.mine, state=state)
        if self.mine.role == "observer":
            return
        await self.refresh()
        others = [peer for peer in self._table if peer != self.mine.peer_id and peer not in self._suspects]
        first = {peer: asyncio.ensure_future(self._tell(peer)) for peer in others if peer != self.coordinator()}
        if first and state in LEAVING_STATES:
            await asyncio.wait(first.values(), timeout=TOLD_FIRST_S)
        await asyncio.gather(self.beat(), *first.values(), *(self._tell(peer) for peer in others if peer not in first))

    async def _tell(self, peer_id: str) -> None:
        try:
            await self._rpc.call(peer_id, "beat", {"record": self._seal_mine()}, timeout=2.0)
        except (PeerUnreachable, ProtocolError):
            return  # the DHT tells it later

    async def greet(self, peer_id: str) -> None:
        """Tell a peer of this one and hear of it, without the DHT; raises PeerUnreachable, ProtocolError."""
        answer = await self._rpc.call(peer_id, "beat", {"record": self._seal_mine()}, timeout=2.0)
        if "record" in answer:
            self._accept(peer_id, field(answer, "record", bytes))

    async def may_be_back(self, peer_id: str) -> bool:
        """False while nothing can be reached where a lost peer was; one whose port is closed has ended: it is dropped.

        libp2p would refuse to dial for longer and longer after each attempt that failed.
        """
        record = self.lost.get(peer_id)
        found = _direct(record)
        if found is None:
            return record is not None
        answer = await self._knock(*found)
        if answer is ConnectionRefusedError:
            self.lost.pop(peer_id, None)
        return answer is None

    async def _on_beat(self, caller: str, message: Message) -> Message:
        self._accept(caller, field(message, "record", bytes))
        record = self._table.get(caller)
        if record is not None and not record.is_active:
            for callback in self.on_leave:
                callback(caller)
        return {} if self.mine.role == "observer" else {"record": self._seal_mine()}

    # -- who is there --------------------------------------------------------------------------------------------------

    def table(self) -> list[PeerRecord]:
        """All known peers in the order in which they joined; this one too, unless it only looks on."""
        records = dict(self._table)
        if self.mine.role != "observer":
            records[self.mine.peer_id] = self.mine
        return sorted(records.values(), key=lambda record: (record.joined_at, record.peer_id))

    def order(self, peer_id: str) -> tuple[float, str]:
        """Sort key of a peer: the order in which peers joined."""
        record = self.mine if peer_id == self.mine.peer_id else self._table.get(peer_id)
        return (record.joined_at if record is not None else float("inf"), peer_id)

    def active(self) -> list[str]:
        """Replicas that rounds wait for, in join order, without suspects."""
        return [r.peer_id for r in self.table() if r.is_active and not self.is_suspect(r.peer_id)]

    def coordinator(self) -> str:
        """Who coordinates rounds: the replica that joined first; views of who is active already may still differ."""
        for record in self.table():
            if record.may_coordinate and not self.is_suspect(record.peer_id):
                return record.peer_id
        return self.mine.peer_id

    # -- who is gone ---------------------------------------------------------------------------------------------------

    def suspect(self, peer_id: str) -> None:
        """Take a peer for dead until it beats again."""
        if peer_id != self.mine.peer_id:
            self._suspects[peer_id] = time.monotonic()
            self.changed.set()

    def is_suspect(self, peer_id: str) -> bool:
        """True while a peer has not beaten since it was suspected."""
        since = self._suspects.get(peer_id)
        if since is None:
            return False
        if self._arrived.get(peer_id, -inf) > since:
            del self._suspects[peer_id]
            return False
        return True

    async def is_alive(self, peer_id: str) -> bool:
        """Ask whether a peer lives: False once its port was closed twice in a row or it was silent for `silence_s`.

        Whatever else is heard from it meanwhile counts for an answer: on a full link pings queue behind the data.
        """
        if peer_id == self.mine.peer_id:
            return True
        if peer_id not in self._pings:
            self._pings[peer_id] = asyncio.ensure_future(self._ping(peer_id))
            self._pings[peer_id].add_done_callback(lambda _: self._pings.pop(peer_id, None))
        return await asyncio.shield(self._pings[peer_id])

    async def _ping(self, peer_id: str) -> bool:
        started = time.monotonic()
        asked_since = self._unanswered.setdefault(peer_id, started)
        try:
            await self._rpc.call(peer_id, "ping", {}, timeout=self._settings.silence_s / 2)
        except AccessRefused:
            return False  # its invitation has ended: as good as gone
        except ProtocolError:
            pass  # an answer, even if not one that we like
        except PeerUnreachable:
            now = time.monotonic()
            if now - started > self._settings.silence_s:
                # It is this process that stood still, as when a laptop sleeps: nobody could have been heard.
                self._unanswered[peer_id] = now
                return True
            # A call that fails at once tells little: after one failed attempt libp2p refuses to dial for some seconds.
            if now - started < self._settings.silence_s / 4 and await self._has_closed_port(peer_id):
                self._refusals[peer_id] = self._refusals.get(peer_id, 0) + 1
                return self._refusals[peer_id] < CONFIRMED
            return self._heard.get(peer_id, -inf) >= started or now - asked_since < self._settings.silence_s
        self.heard_from(peer_id)
        return True

    async def _has_closed_port(self, peer_id: str) -> bool:
        """True when a peer's machine says that nothing listens where the peer did: its process has ended."""
        found = _direct(self._table.get(peer_id))
        return found is not None and await self._knock(*found) is ConnectionRefusedError

    async def _knock(self, host: str, port: int) -> type[Exception] | None:
        """Open a TCP connection; the kind of error that came of it, or None."""
        try:
            async with asyncio.timeout(self._settings.silence_s / 4):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError, OverflowError) as error:
            return type(error)
        writer.close()
        return None

    def silent(self) -> set[str]:
        """Replicas that took part in rounds and are not heard any more, though nobody has seen them end."""
        return {
            record.peer_id
            for record in self.table()
            if record.is_active
            and self.is_suspect(record.peer_id)
            and self._refusals.get(record.peer_id, 0) < CONFIRMED
        }

    def heard_from(self, peer_id: str) -> None:
        """Note a sign of life."""
        self._heard[peer_id] = time.monotonic()
        self._unanswered.pop(peer_id, None)
        self._refusals.pop(peer_id, None)

    def silent_for(self, peer_id: str) -> float | None:
        """Seconds since anything was heard of a peer; None when it is not in the table."""
        if peer_id not in self._table:
            return None
        return time.monotonic() - max(self._arrived.get(peer_id, -inf), self._heard.get(peer_id, -inf))

    def has_left(self, peer_id: str) -> bool:
        """True for a peer that said good-bye."""
        record = self._table.get(peer_id)
        return record is not None and record.state in LEAVING_STATES

    async def _on_ping(self, caller: str, message: Message) -> Message:
        self.heard_from(caller)
        return {}
