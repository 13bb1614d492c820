"""A network in memory for state transfers: donors and joiners without sockets, which can lie, die and be slow."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, cast

import torch

from swarmkit.peers.download import Download
from swarmkit.peers.errors import PeerUnreachable
from swarmkit.peers.fetch import Fetch
from swarmkit.peers.manifest import PIECE_BYTES, Frozen, Snapshot
from swarmkit.peers.rpc import Handler
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.state import StateServer
from swarmkit.peers.transfer import Transfer
from swarmkit.peers.transport import StreamHandler
from swarmkit.peers.wire import Message, decode, encode

SETTINGS = NetworkSettings(stall_s=1.0, silence_s=1.0, state_mbit=0.0)


def a_state(seed: int = 0, pieces: float = 8, **meta: object) -> Snapshot:
    """A state of so many pieces; the same seed gives the same bits."""
    generator = torch.Generator().manual_seed(seed)
    numel = int(pieces * PIECE_BYTES / 4)
    return {"anchor/w": torch.randn(numel, generator=generator)}, {"round": 3, "lineage": "l", **meta}


def with_own(shared: Snapshot, seed: int, parameters: int = 4) -> Snapshot:
    """The state with an inner optimizer's on top, which is this donor's own: a piece and a half for each parameter."""
    tensors, meta = shared
    generator = torch.Generator().manual_seed(seed)
    numel = int(0.75 * PIECE_BYTES / 4)
    own = {
        f"inner/p{i}/{name}": torch.randn(numel, generator=generator)
        for i in range(parameters)
        for name in ("exp_avg", "exp_avg_sq")
    }
    return {**tensors, **own}, meta


class Net:
    """Peers by name."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}

    def peer(self, name: str, settings: NetworkSettings = SETTINGS) -> "Peer":
        self.peers[name] = Peer(self, name, settings)
        return self.peers[name]

    def donor(self, name: str, state: Snapshot, settings: NetworkSettings = SETTINGS) -> "Peer":
        peer = self.peer(name, settings)
        peer.server.serve(lambda: state, lambda: "one")
        # Made beforehand: how long it takes on a busy machine is no part of what is tested.
        peer.server._latest = ("one", Frozen(state), float("inf"))
        return peer


class Peer:
    """What state transfer uses of a node: its calls, its streams, its server."""

    in_round = False

    def __init__(self, net: Net, name: str, settings: NetworkSettings) -> None:
        self.net, self.peer_id, self.settings = net, name, settings
        self.dead = asyncio.Event()
        self.handlers: dict[str, Handler] = {}
        self.streams: dict[str, StreamHandler] = {}
        self.spoil: Callable[[bytes], bytes] = lambda data: data
        self.hang = False
        self.sent = 0
        self.most_joiners = 0
        self.server = StateServer(cast(Any, self), cast(Any, _Streams(self)), settings)

    def handle(self, method: str, handler: Handler) -> None:
        self.handlers[method] = handler

    async def call(self, peer_id: str, method: str, message: Message, *, timeout: float) -> Message:
        other = self.net.peers[peer_id]
        await asyncio.sleep(0)
        if other.dead.is_set():
            raise PeerUnreachable(f"{peer_id} is dead")
        answer = await other.handlers[method](self.peer_id, decode(encode(message)))
        other.most_joiners = max(other.most_joiners, len({t.peer_id for t in other.server._tickets.values()}))
        return decode(encode(answer))

    async def open(
        self, peer_id: str, kind: str, header: Message, outgoing: AsyncIterator[bytes]
    ) -> AsyncGenerator[bytes, None]:
        other = self.net.peers[peer_id]
        replies = aiter(other.streams[kind](self.peer_id, decode(encode(header)), outgoing))
        died = asyncio.ensure_future(other.dead.wait())
        try:
            while True:
                upcoming = asyncio.ensure_future(anext(replies, None))
                await asyncio.wait([upcoming, died], return_when=asyncio.FIRST_COMPLETED)
                if other.dead.is_set():
                    upcoming.cancel()
                    raise PeerUnreachable(f"{peer_id} is dead")
                data = upcoming.result()
                if data is None:
                    return
                if kind == "state":
                    if other.hang:
                        await asyncio.Event().wait()
                    other.sent += len(data)
                    data = other.spoil(data)
                yield data
        finally:
            died.cancel()

    async def fetch(
        self,
        donors: Sequence[str],
        download: Download | None = None,
        progress: Callable[[Transfer], None] | None = None,
    ) -> Download:
        """Download the state that these donors have, asked in this order."""
        download = download if download is not None else Download()
        known = [name for name in donors if name in self.net.peers]
        rpc, bulk = cast(Any, self), cast(Any, self)
        await Fetch(rpc, bulk, self.settings, lambda: known, download, progress).run()
        return download


class _Streams:
    """The part of a transport that a server sees."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    @property
    def in_round(self) -> bool:
        return self._peer.in_round

    def handle(self, kind: str, handler: StreamHandler) -> None:
        self._peer.streams[kind] = handler
