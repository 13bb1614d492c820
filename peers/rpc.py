"""Control calls between peers: one unary hivemind RPC that carries checked messages."""

import asyncio
from collections.abc import Awaitable, Callable

from google.protobuf.wrappers_pb2 import BytesValue

from swarmkit.peers.access import Access
from swarmkit.peers.engine import P2P, P2PDaemonError, P2PHandlerError, PeerID, ServicerBase
from swarmkit.peers.errors import AccessRefused, PeerUnreachable, ProtocolError, Refusal
from swarmkit.peers.wire import Message, decode, encode, field

Handler = Callable[[str, Message], Awaitable[Message]]


class Rpc(ServicerBase):
    """Calls methods of other peers and answers theirs; the caller's peer id is proven by libp2p's handshake.

    In a closed run both sides show their credential with every message, which costs a comparison once it is known.
    """

    def __init__(self, p2p: P2P, run: str, access: Access) -> None:
        self.access = access
        self.peer_id: str = p2p.peer_id.to_base58()
        self._p2p = p2p
        self._run = run
        self._handlers: dict[str, tuple[Handler, bool]] = {}

    async def serve(self) -> None:
        """Start to answer; handlers may be added later."""
        await self.add_p2p_handlers(self._p2p, namespace=self._run)

    def handle(self, method: str, handler: Handler, *, onlookers: bool = False) -> None:
        """Answer calls of `method` with `handler(caller, message)`; `onlookers` may call it without being replicas."""
        self._handlers[method] = handler, onlookers

    async def make_known(self, peer_id: str, *, timeout: float) -> None:
        """See to it that a peer's credential is known before something is sent to it; raises AccessRefused."""
        try:
            self.access.check_known(peer_id)
        except AccessRefused as error:
            if error.refusal is not Refusal.not_invited:
                raise
            await self.call(peer_id, "ping", {}, timeout=timeout)

    async def call(self, peer_id: str, method: str, message: Message, *, timeout: float) -> Message:
        """Call a peer; raises PeerUnreachable when no answer comes, ProtocolError when the peer refuses the message."""
        if peer_id == self.peer_id:
            return await asyncio.wait_for(self._dispatch(peer_id, method, message), timeout)
        stub = self.get_stub(self._p2p, PeerID.from_base58(peer_id), namespace=self._run)
        try:
            request = encode({**message, "method": method, "credential": self.access.credential})
            reply = await stub.rpc_call(BytesValue(value=request), timeout=timeout)
        except (P2PDaemonError, P2PHandlerError, ConnectionError, asyncio.IncompleteReadError) as error:
            raise PeerUnreachable(f"peer {peer_id[-8:]} did not answer {method!r}: {error}") from error
        except TimeoutError as error:
            raise PeerUnreachable(f"peer {peer_id[-8:]} did not answer {method!r} within {timeout:.1f} s") from error
        answer = decode(reply.value)
        self.access.check(peer_id, field(answer, "credential", bytes))
        if "refused" in answer:
            refusal = Refusal.__members__.get(str(answer["refused"]), Refusal.not_invited)
            if refusal is Refusal.revoked:
                self.access.adopt(field(answer, "revocations", list))
            raise AccessRefused(field(answer, "error", str)[:500], refusal)
        if "error" in answer:
            raise ProtocolError(f"peer {peer_id[-8:]} refused {method!r}: {field(answer, 'error', str)[:500]}")
        return answer

    async def rpc_call(self, request: BytesValue, context: object) -> BytesValue:
        """Answer one call; errors of the protocol go back as text, never as a traceback."""
        caller: str = context.remote_id.to_base58()  # type: ignore[attr-defined]
        try:
            message = decode(request.value)
            method = field(message, "method", str)
            _, onlookers = self._handlers.get(method, (None, True))
            self.access.check(caller, field(message, "credential", bytes), takes_part=not onlookers)
            answer = {**await self._dispatch(caller, method, message), "credential": self.access.credential}
        except AccessRefused as error:
            # A stranger learns why, and nothing else; a credential is of no use to others than its peer.
            answer = {"error": error.text, "refused": error.refusal.name, "credential": self.access.credential}
            if error.refusal is Refusal.revoked:
                answer["revocations"] = self.access.revocations
        except ProtocolError as error:
            answer = {"error": str(error), "credential": self.access.credential}
        return BytesValue(value=encode(answer))

    async def _dispatch(self, caller: str, method: str, message: Message) -> Message:
        handler, _ = self._handlers.get(method, (None, True))
        if handler is None:
            raise ProtocolError(f"unknown method {method[:40]!r}")
        return await handler(caller, message)
