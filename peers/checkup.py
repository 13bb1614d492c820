"""What a peer does for another's `swarmkit doctor`, rationed: it tells the time, moves a few bytes, dials back."""

import asyncio
import ipaddress
import os
import time
from collections.abc import Awaitable, Callable

from swarmkit.peers.budget import SharedBudget
from swarmkit.peers.engine import P2P, P2PDaemonError
from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.wire import Message, field

MAX_CHUNK_BYTES = 256 << 10
MINUTE_S = 60.0
# In a minute, for one caller and for all together.
BYTES_EACH, BYTES_TOGETHER = 16 << 20, 64 << 20
DIALS_EACH, DIALS_TOGETHER = 6, 60
MAX_DIALS = 4  # at the same time
DIAL_TIMEOUT_S = 3.0
GREETING = b"\x13/multistream/1.0.0\n"  # with which every libp2p host answers


class Checkup:
    """Answers the calls; a caller that asks for more than its share hears so."""

    def __init__(self, rpc: Rpc, p2p: P2P, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._p2p = p2p
        self._bytes = SharedBudget(BYTES_EACH, BYTES_TOGETHER, MINUTE_S, clock=clock)
        self._dials = SharedBudget(DIALS_EACH, DIALS_TOGETHER, MINUTE_S, clock=clock)
        self._dialling = 0
        rpc.handle("checkup.time", self._on_time, onlookers=True)
        rpc.handle("checkup.upload", self._on_upload, onlookers=True)
        rpc.handle("checkup.download", self._on_download, onlookers=True)
        rpc.handle("checkup.dial", self._on_dial, onlookers=True)

    async def _on_time(self, caller: str, message: Message) -> Message:
        return {"time": time.time()}

    async def _on_upload(self, caller: str, message: Message) -> Message:
        size = len(field(message, "payload", bytes, lambda payload: len(payload) <= MAX_CHUNK_BYTES))
        self._ration(self._bytes, caller, size, "bytes")
        return {"size": size}

    async def _on_download(self, caller: str, message: Message) -> Message:
        size = field(message, "size", int, lambda size: 0 <= size <= MAX_CHUNK_BYTES)
        self._ration(self._bytes, caller, size, "bytes")
        return {"payload": os.urandom(size)}

    async def _on_dial(self, caller: str, message: Message) -> Message:
        """Try a port of the caller, at the addresses that this peer sees it at and at no other.

        Whatever the caller says, nobody else can be dialled through here, and whoever connects through a relay cannot
        have the relay dialled.
        """
        port = field(message, "port", int, lambda port: 0 < port < 65536)
        if self._dialling >= MAX_DIALS:
            raise ProtocolError("too many dials are under way here; ask again, or another peer")
        hosts = observed_hosts([str(one) for one in await self._addresses_of(caller)])[:2]
        self._ration(self._dials, caller, len(hosts), "dials")
        self._dialling += 1
        try:
            outcomes = await asyncio.gather(*(dial(host, port) for host in hosts))
        finally:
            self._dialling -= 1
        return {"outcomes": dict(zip(hosts, outcomes, strict=True))}

    async def _addresses_of(self, caller: str) -> list[object]:
        try:
            peers = await self._p2p.list_peers()
        except P2PDaemonError as error:
            raise ProtocolError("this peer cannot see its connections") from error
        return [address for info in peers if info.peer_id.to_base58() == caller for address in info.addrs]

    def _ration(self, budget: SharedBudget, caller: str, amount: int, what: str) -> None:
        if not budget.take(caller, amount):
            raise ProtocolError(f"enough {what} for this minute; ask again later, or another peer")


def observed_hosts(addresses: list[str]) -> list[str]:
    """The IP addresses of direct connections; a relayed one shows the relay's, which is not the peer's."""
    hosts = []
    for address in addresses:
        parts = address.split("/")
        if len(parts) < 3 or parts[1] not in ("ip4", "ip6") or "p2p-circuit" in parts:
            continue
        try:
            host = ipaddress.ip_address(parts[2])
        except ValueError:
            continue
        if not host.is_multicast and not host.is_unspecified:
            hosts.append(str(host))
    return list(dict.fromkeys(hosts))


async def dial(host: str, port: int) -> str:
    """Open a TCP connection and exchange libp2p's greeting: "open", "closed", "silent" or "other"."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), DIAL_TIMEOUT_S)
    except ConnectionRefusedError:
        return "closed"
    except (OSError, TimeoutError):
        return "silent"
    try:
        writer.write(GREETING)
        heard = await _within(reader.readexactly(len(GREETING)))
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return "other"
    finally:
        writer.close()
    return "open" if heard == GREETING else "other"


async def _within(work: Awaitable[bytes]) -> bytes:
    return await asyncio.wait_for(work, DIAL_TIMEOUT_S)
