"""State transfer: a replica serves a consistent snapshot, a joiner downloads it in chunks and checks its digest."""

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Callable

import safetensors
import safetensors.torch
from torch import Tensor

from swarmkit.peers.errors import JoinFailed, PeerUnreachable, ProtocolError
from swarmkit.peers.roster import Roster
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.transport import Bulk
from swarmkit.peers.wire import Message, field

Snapshot = tuple[dict[str, Tensor], dict[str, object]]
Provider = Callable[[], Snapshot]
Progress = Callable[[int, int], None]
SNAPSHOT_TTL_S = 300.0
MAX_FROZEN = 4  # snapshots that are being downloaded at the same time
DESCRIBE_TIMEOUT_S = 60.0


def digest_of(data: bytes | bytearray) -> str:
    """Content hash of a serialised state."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


class StateServer:
    """Serves snapshots of this peer's state to joiners."""

    def __init__(self, rpc: Rpc, bulk: Bulk, settings: NetworkSettings) -> None:
        self._provider: Provider | None = None
        self._settings = settings
        self._frozen: dict[str, bytes] = {}  # ticket -> serialised snapshot
        rpc.handle("state", self._on_state)
        bulk.handle("state", self._serve)

    def serve(self, provider: Provider) -> None:
        """Offer what `provider` returns; it is called in a worker thread, once per joiner."""
        self._provider = provider

    async def _on_state(self, caller: str, message: Message) -> Message:
        if self._provider is None:
            raise ProtocolError("this peer holds no state yet")
        tensors, meta = await asyncio.to_thread(self._provider)
        data = await asyncio.to_thread(safetensors.torch.save, tensors)
        digest = await asyncio.to_thread(digest_of, data)
        ticket = secrets.token_hex(8)
        while len(self._frozen) >= MAX_FROZEN:
            # A joiner that asks again and again must not fill this peer's memory.
            self._frozen.pop(next(iter(self._frozen)))
        self._frozen[ticket] = data
        asyncio.get_running_loop().call_later(SNAPSHOT_TTL_S, self._frozen.pop, ticket, None)
        return {"ticket": ticket, "size": len(data), "digest": digest, "meta": json.dumps(meta)}

    async def _serve(self, sender: str, header: Message, incoming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        data = self._frozen.get(field(header, "ticket", str))
        if data is None:
            raise ProtocolError("unknown or expired ticket")
        step = self._settings.chunk_bytes
        for start in range(field(header, "offset", int, lambda offset: offset >= 0), len(data), step):
            yield data[start : start + step]


async def fetch_state(
    rpc: Rpc, bulk: Bulk, roster: Roster, settings: NetworkSettings, progress: Progress | None = None
) -> Snapshot:
    """Download the state from an active replica, the coordinator first; raises JoinFailed when none can serve it."""
    me = roster.mine.peer_id
    donors = [peer for peer in roster.active() if peer != me]
    reasons = []
    for donor in donors:
        try:
            return await _fetch_from(donor, rpc, bulk, settings, progress)
        except (PeerUnreachable, ProtocolError) as error:
            reasons.append(str(error))
    if not donors:
        raise JoinFailed("no active replica is known that could serve the state")
    raise JoinFailed("no replica could serve the state: " + "; ".join(reasons))


async def _fetch_from(
    donor: str, rpc: Rpc, bulk: Bulk, settings: NetworkSettings, progress: Progress | None
) -> Snapshot:
    offer = await rpc.call(donor, "state", {}, timeout=DESCRIBE_TIMEOUT_S)
    size = field(offer, "size", int, lambda size: size >= 8)
    if size > settings.max_state_bytes:
        raise ProtocolError(f"state of {size} bytes: max_state_bytes is {settings.max_state_bytes}")
    buffer = bytearray()
    header: Message = {"ticket": field(offer, "ticket", str), "offset": 0}
    stream = bulk.open(donor, "state", header, _nothing())
    try:
        async for chunk in stream:
            buffer += chunk
            if len(buffer) > size:
                raise ProtocolError(f"{donor[-8:]} sent more than the {size} bytes that it declared")
            if progress is not None:
                progress(len(buffer), size)
    finally:
        await stream.aclose()
    if len(buffer) != size or await asyncio.to_thread(digest_of, buffer) != field(offer, "digest", str):
        raise ProtocolError(f"the state from {donor[-8:]} is damaged: {len(buffer)} of {size} bytes or a wrong digest")
    try:
        tensors = await asyncio.to_thread(lambda: safetensors.torch.load(bytes(buffer)))
        meta = json.loads(field(offer, "meta", str))
    except (safetensors.SafetensorError, ValueError) as error:
        raise ProtocolError(f"the state from {donor[-8:]} cannot be read: {error}") from error
    if not isinstance(meta, dict):
        raise ProtocolError(f"the state from {donor[-8:]} has no description")
    return tensors, meta


async def _nothing() -> AsyncIterator[bytes]:
    for chunk in list[bytes]():
        yield chunk
