"""Control calls between peers: one unary hivemind RPC that carries checked messages."""

import asyncio
from collections.abc import Awaitable, Callable

from google.protobuf.wrappers_pb2 import BytesValue

from swarmkit.peers.engine import P2P, P2PDaemonError, P2PHandlerError, PeerID, ServicerBase
from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.wire import Message, decode, encode, field

Handler = Callable[[str, Message], Awaitable[Message]]


class Rpc(ServicerBase):
    """Calls methods of other peers and answers theirs; the caller's peer id is proven by libp2p's handshake."""

    def __init__(self, p2p: P2P, run: str) -> None:
        self.peer_id: str = p2p.peer_id.to_base58()
        self._p2p = p2p
        self._run = run
        self._handlers: dict[str, Handler] = {}

    async def serve(self) -> None:
        """Start to answer; handlers may be added later."""
        await self.add_p2p_handlers(self._p2p, namespace=self._run)

    def handle(self, method: str, handler: Handler) -> None:
        """Answer calls of `method` with `handler(caller, message)`."""
        self._handlers[method] = handler

    async def call(self, peer_id: str, method: str, message: Message, *, timeout: float) -> Message:
        """Call a peer; raises PeerUnreachable when no answer comes, ProtocolError when the peer refuses the message."""
        if peer_id == self.peer_id:
            return await asyncio.wait_for(self._dispatch(peer_id, method, message), timeout)
        stub = self.get_stub(self._p2p, PeerID.from_base58(peer_id), namespace=self._run)
        try:
            reply = await stub.rpc_call(BytesValue(value=encode({**message, "method": method})), timeout=timeout)
        except (P2PDaemonError, P2PHandlerError, ConnectionError, asyncio.IncompleteReadError) as error:
            raise PeerUnreachable(f"peer {peer_id[-8:]} did not answer {method!r}: {error}") from error
        except TimeoutError as error:
            raise PeerUnreachable(f"peer {peer_id[-8:]} did not answer {method!r} within {timeout:.1f} s") from error
        answer = decode(reply.value)
        if "error" in answer:
            raise ProtocolError(f"peer {peer_id[-8:]} refused {method!r}: {field(answer, 'error', str)[:500]}")
        return answer

    async def rpc_call(self, request: BytesValue, context: object) -> BytesValue:
        """Answer one call; errors of the protocol go back as text, never as a traceback."""
        caller: str = context.remote_id.to_base58()  # type: ignore[attr-defined]
        try:
            message = decode(request.value)
            answer = await self._dispatch(caller, field(message, "method", str), message)
        except ProtocolError as error:
            answer = {"error": str(error)}
        return BytesValue(value=encode(answer))

    async def _dispatch(self, caller: str, method: str, message: Message) -> Message:
        handler = self._handlers.get(method)
        if handler is None:
            raise ProtocolError(f"unknown method {method[:40]!r}")
        return await handler(caller, message)
