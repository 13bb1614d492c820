"""The door: the one call that every peer answers to everybody, so that who is refused hears why."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.wrappers_pb2 import BytesValue

from swarmkit.peers import directory
from swarmkit.peers.access import Access
from swarmkit.peers.clock import MAX_SKEW_S, adjust, swarm_time
from swarmkit.peers.engine import P2P, Multiaddr, P2PDaemonError, P2PHandlerError, PeerID, ServicerBase
from swarmkit.peers.errors import AccessRefused, JoinFailed, NotInvited, ProtocolError, Refusal
from swarmkit.peers.wire import Message, decode, encode, field, finite

logger = logging.getLogger(__name__)
NAMESPACE = "swarmkit"  # the same for all runs: who knocks may not know which there are
KNOCK_TIMEOUT_S = 10.0


class Door(ServicerBase):
    """Answers whether a run is closed, which protocol it speaks and what time it is; the rest is for the invited."""

    def __init__(self, p2p: P2P, access: Access) -> None:
        self._p2p = p2p
        self._access = access

    async def serve(self) -> None:
        """Start to answer."""
        await self.add_p2p_handlers(self._p2p, namespace=NAMESPACE)

    async def rpc_knock(self, request: BytesValue, context: object) -> BytesValue:
        """Let a caller in or say why not."""
        caller: str = context.remote_id.to_base58()  # type: ignore[attr-defined]
        access = self._access
        answer: Message = {"protocol": directory.PROTOCOL, "time": swarm_time(), "closed": access.is_closed}
        try:
            access.check(caller, field(decode(request.value), "credential", bytes))
            answer |= {"credential": access.credential, "revocations": access.revocations}
        except AccessRefused as error:
            answer |= {"refused": error.refusal.name, "error": error.text[:300]}
        except ProtocolError as error:
            answer |= {"refused": Refusal.forged.name, "error": str(error)[:300]}
        return BytesValue(value=encode(answer))


@dataclass(frozen=True, slots=True)
class _Answer:
    message: Message
    address: str
    peer_id: str
    sent: float  # swarm time at which the question left
    got: float


async def knock(p2p: P2P, addresses: Sequence[str], access: Access) -> None:
    """Ask the peers at these addresses to let this one in, and go by their clock.

    The first that answers counts. Raises NotInvited naming the cause, JoinFailed for another protocol or a clock that
    is far off, or when a closed run's peers do not answer. Peers of plain hivemind have no door; an open run goes on.
    """
    for address in addresses:
        answer = await _ask(p2p, address, access.credential)
        if answer is not None:
            _read(answer, access)
            return
    if addresses and access.is_closed:
        raise JoinFailed(f"nobody at {', '.join(addresses)} answers for a closed run: is it up, with this version?")


async def _ask(p2p: P2P, address: str, credential: bytes) -> _Answer | None:
    peer_id = str(Multiaddr(address)["p2p"])

    stub = Door.get_stub(p2p, PeerID.from_base58(peer_id), namespace=NAMESPACE)
    sent = swarm_time()
    try:
        reply = await stub.rpc_knock(BytesValue(value=encode({"credential": credential})), timeout=KNOCK_TIMEOUT_S)
        return _Answer(decode(reply.value), address, peer_id, sent, swarm_time())
    except (P2PDaemonError, P2PHandlerError, ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
        logger.info("%s has no door: %s", address, error)
        return None


def _read(answer: _Answer, access: Access) -> None:
    message, address = answer.message, answer.address
    try:
        theirs = field(message, "protocol", int)
        if theirs != directory.PROTOCOL:
            raise directory.other_protocol(address, theirs)
        refused = message.get("refused")
        if refused is not None:
            text = "".join(c for c in field(message, "error", str)[:300] if c.isprintable())
            raise NotInvited(text, _refusal(refused))
        if field(message, "closed", bool) != access.is_closed:
            raise NotInvited(f"the run at {address} is open, the invitation is for another one", Refusal.wrong_run)
        access.check(answer.peer_id, field(message, "credential", bytes))
        if access.is_closed:
            access.adopt(field(message, "revocations", list))
        middle = (answer.sent + answer.got) / 2
        ahead = field(message, "time", float, finite) - middle
    except AccessRefused as error:
        raise NotInvited(f"the peer at {address} is not of this run: {error.text}", error.refusal) from error
    except ProtocolError as error:
        raise JoinFailed(f"the peer at {address} answers in a way that this version cannot read: {error}") from error
    if abs(ahead) > MAX_SKEW_S:
        side = "behind" if ahead > 0 else "ahead of"
        raise JoinFailed(f"this machine's clock is {abs(ahead):.0f} s {side} the run's: set it")
    if abs(ahead) > (answer.got - answer.sent) and adjust(ahead):
        logger.warning("this machine's clock is %.0f s off the run's; going by the run's", ahead)


def _refusal(name: object) -> Refusal:
    return Refusal.__members__.get(str(name), Refusal.not_invited)
