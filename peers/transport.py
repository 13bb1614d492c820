"""Bulk streams between peers: gRPC where they reach each other directly, libp2p otherwise; every byte is counted."""

import asyncio
import contextlib
import time
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator

from google.protobuf.wrappers_pb2 import BytesValue

from swarmkit.peers.direct import DirectTransport, Endpoint
from swarmkit.peers.engine import P2P, P2PDaemonError, P2PHandlerError, PeerID, ServicerBase
from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.settings import NetworkSettings, Transport
from swarmkit.peers.wire import Message, decode, encode, field

StreamHandler = Callable[[str, Message, AsyncIterator[bytes]], AsyncIterator[bytes]]
# A peer that could not be reached over gRPC is asked again after this time: firewalls and addresses change.
RETRY_DIRECT_S = 120.0
DIRECT_CONNECT_S = 2.0
ROUND_KINDS = ("reduce", "gather")  # streams that training waits for


class Traffic:
    """Counts payload bytes of one round or one transfer as they pass."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0


class Bulk(ServicerBase):
    """Opens and serves two-way streams of bytes; the first message of a stream is its header."""

    def __init__(self, p2p: P2P, rpc: Rpc, run: str, settings: NetworkSettings) -> None:
        self.total = Traffic()
        self._p2p = p2p
        self._rpc = rpc
        self._run = run
        self._settings = settings
        self._handlers: dict[str, StreamHandler] = {}
        self._direct = DirectTransport(self._serve, settings)
        self._endpoints: dict[str, Endpoint] = {}
        self._indirect_until: dict[str, float] = {}
        self._round_streams = 0
        # Set by the node once there is a roster. A link may be so slow that a message takes longer than stall_s.
        self.is_alive: Callable[[str], Awaitable[bool]] = _nobody_knows
        self.heard_from: Callable[[str], None] = lambda peer_id: None

    async def serve(self) -> None:
        """Listen on both transports."""
        await self.add_p2p_handlers(self._p2p, namespace=self._run)
        if self._settings.transport is not Transport.libp2p:
            await self._direct.listen(await self._p2p.get_visible_maddrs(latest=True))
        self._rpc.handle("endpoint", self._describe_endpoint)

    def handle(self, kind: str, handler: StreamHandler) -> None:
        """Serve streams of replicas whose header says `kind`."""
        self._handlers[kind] = handler

    async def close(self) -> None:
        """Close channels and listeners; streams in flight end in PeerUnreachable at the other side."""
        await self._direct.close()

    async def open(
        self, peer_id: str, kind: str, header: Message, outgoing: AsyncIterator[bytes]
    ) -> AsyncGenerator[bytes, None]:
        """Send `outgoing` to a peer and yield what it sends back; raises PeerUnreachable when the stream breaks."""
        await self._rpc.make_known(peer_id, timeout=self._settings.silence_s)
        header = {**header, "kind": kind, "credential": self._rpc.access.credential}
        messages = self._with_header(encode(header), outgoing)
        endpoint = await self._endpoint(peer_id)
        if endpoint is not None:
            replies = self._direct.open(endpoint, messages)
        else:
            replies = self._open_libp2p(peer_id, messages)
        with self._counted_in(kind):
            async for chunk in self._without_stall(replies, peer_id):
                self.total.received += len(chunk)
                self.heard_from(peer_id)
                yield chunk

    @property
    def in_round(self) -> bool:
        """True while a round exchanges tensors over streams of this peer."""
        return self._round_streams > 0

    @contextlib.contextmanager
    def _counted_in(self, kind: str) -> Iterator[None]:
        count = int(kind in ROUND_KINDS)
        self._round_streams += count
        try:
            yield
        finally:
            self._round_streams -= count

    def uses_direct(self, peer_id: str) -> bool:
        """True when the last stream to this peer went over gRPC."""
        return peer_id in self._endpoints

    async def _with_header(self, header: bytes, outgoing: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield header
        async for chunk in outgoing:
            self.total.sent += len(chunk)
            yield chunk

    async def _without_stall(self, chunks: AsyncIterator[bytes], peer_id: str) -> AsyncIterator[bytes]:
        iterator = aiter(chunks)
        upcoming: asyncio.Future[bytes | None] | None = None
        try:
            while True:
                upcoming = asyncio.ensure_future(_next(iterator))
                patience = self._settings.stall_s
                while not upcoming.done():
                    await asyncio.wait([upcoming], timeout=patience)
                    patience = min(1.0, patience)
                    if not upcoming.done() and not await self.is_alive(peer_id):
                        raise PeerUnreachable(
                            f"stream with {peer_id[-8:]} brought nothing for {self._settings.stall_s} s "
                            "and its peer answers no ping"
                        )
                chunk = upcoming.result()
                if chunk is None:
                    return
                yield chunk
        finally:
            if upcoming is not None and not upcoming.done():
                upcoming.cancel()
                await asyncio.wait([upcoming])

    async def _endpoint(self, peer_id: str) -> Endpoint | None:
        """Find out how to reach a peer over gRPC; None sends the stream over libp2p."""
        if self._settings.transport is Transport.libp2p:
            return None
        known = self._endpoints.get(peer_id)
        if known is not None and self._direct.is_usable(known):
            return known
        self._endpoints.pop(peer_id, None)
        if time.monotonic() < self._indirect_until.get(peer_id, 0.0):
            return None
        answer = await self._rpc.call(peer_id, "endpoint", {}, timeout=self._settings.silence_s)
        endpoint = await self._direct.connect(Endpoint.from_message(answer), timeout=DIRECT_CONNECT_S)
        if endpoint is None:
            if self._settings.transport is Transport.grpc:
                raise PeerUnreachable(
                    f"peer {peer_id[-8:]} cannot be reached over gRPC and transport=grpc forbids libp2p"
                )
            self._indirect_until[peer_id] = time.monotonic() + RETRY_DIRECT_S
            return None
        self._endpoints[peer_id] = endpoint
        return endpoint

    async def _describe_endpoint(self, caller: str, message: Message) -> Message:
        return self._direct.describe(caller)

    async def _serve(self, sender: str, incoming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        iterator = aiter(incoming)
        try:
            header = decode(await asyncio.wait_for(anext(iterator), self._settings.stall_s))
        except (StopAsyncIteration, TimeoutError) as error:
            raise ProtocolError("stream without a header") from error
        self._rpc.access.check(sender, field(header, "credential", bytes), takes_part=True)
        kind = field(header, "kind", str)
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"unknown stream {kind[:40]!r}")
        with self._counted_in(kind):
            async for chunk in handler(sender, header, self._counted(iterator, sender)):
                self.total.sent += len(chunk)
                yield chunk

    async def _counted(self, incoming: AsyncIterator[bytes], sender: str) -> AsyncIterator[bytes]:
        async for chunk in incoming:
            self.total.received += len(chunk)
            self.heard_from(sender)
            yield chunk

    # hivemind reads these hints and knows typing's AsyncIterator only.
    async def rpc_stream(
        self,
        stream: typing.AsyncIterator[BytesValue],
        context: object,
    ) -> typing.AsyncIterator[BytesValue]:
        """Serve one stream that came over libp2p."""
        sender: str = context.remote_id.to_base58()  # type: ignore[attr-defined]
        incoming = (message.value async for message in stream)
        async for chunk in self._serve(sender, incoming):
            yield BytesValue(value=chunk)
        # hivemind closes the socket when this generator ends; were the caller's end-of-stream mark still on its way,
        # its write would fail and take with it what it has not read yet.
        async for _ in incoming:
            raise ProtocolError("more chunks than the stream's header announced")

    async def _open_libp2p(self, peer_id: str, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        stub = self.get_stub(self._p2p, PeerID.from_base58(peer_id), namespace=self._run)
        try:
            async for reply in await stub.rpc_stream(BytesValue(value=chunk) async for chunk in messages):
                yield reply.value
        except (P2PDaemonError, P2PHandlerError, ConnectionError, asyncio.IncompleteReadError) as error:
            raise PeerUnreachable(f"libp2p stream with {peer_id[-8:]} broke: {error}") from error


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    """The next chunk, or None after the last: StopAsyncIteration cannot be a task's result."""
    return await anext(chunks, None)


async def _nobody_knows(peer_id: str) -> bool:
    return False
