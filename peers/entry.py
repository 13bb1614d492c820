"""Through which addresses a peer enters its run: those it was given, else those of peers that it has seen before."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from swarmkit.peers.engine import P2P, Multiaddr, P2PDaemonError, PeerID, start_p2p
from swarmkit.peers.errors import ClosedPort, DaemonFailed, JoinFailed, NoAnswer, NotAPeer, UnknownName, WrongPeerId
from swarmkit.peers.identity import Identity
from swarmkit.peers.peer_cache import Remembered
from swarmkit.peers.preflight import split_peer_id, why_unreachable
from swarmkit.peers.settings import NetworkSettings

DIAL_TIMEOUT_S = 8.0  # libp2p gives a silent listener up after 5
# Between questions for a peer of the same identity: its neighbours hear of a new peer only after a moment.
TWIN_PAUSES_S = (0.2, 0.5, 0.0)
MAX_FALLBACKS = 16  # remembered peers that are dialled at once
# Codes of the parts of a multiaddr, as varints: 421 and 290.
_P2P, _P2P_CIRCUIT = b"\xa5\x03", b"\xa2\x02"
_OTHER_ID = re.compile(r"expected (\w+), but remote key matches (\w+)")


@dataclass(slots=True, kw_only=True)
class Entry:
    """How a peer got in."""

    live: list[str] = field(default_factory=list)  # addresses that answer as the peer that they name
    dead: list[JoinFailed] = field(default_factory=list)  # why the other ones that were given do not
    run: str | None = None  # of the cache, where `live` comes from there

    @property
    def notes(self) -> list[str]:
        """What the user should know of it: addresses that did not work, and what was used in their place."""
        lines = [f"no way in: {error}" for error in self.dead]
        if self.run is not None:
            lines.append(f"joining run {self.run!r} through peers that were seen in it before: {', '.join(self.live)}")
        return lines


async def enter(p2p: P2P, addresses: Sequence[str], remembered: Remembered) -> Entry:
    """Connect to all `addresses` at once; when none answers, to the `remembered` peers.

    Takes 13 seconds at most for either; `addresses` are checked already. Raises the JoinFailed of the cause when nobody
    answers.
    """
    entry = Entry()
    entry.live, entry.dead = await _reach(p2p, addresses)
    if entry.live or not addresses:
        return entry
    others = [address for address in remembered.addresses if address not in addresses][:MAX_FALLBACKS]
    entry.live, _ = await _reach(p2p, others)
    if not entry.live:
        raise _told(entry.dead, len(others))
    entry.run = remembered.run
    return entry


async def refuse_twin(settings: NetworkSettings, sockets: Path, addresses: Sequence[str]) -> None:
    """Raise DaemonFailed when a peer with this peer's identity file is up: two of one id lose each other's messages.

    The question is asked by a p2pd of another identity.
    """
    if settings.identity is None or not addresses or not Path(settings.identity).exists():
        return
    own = PeerID.from_base58(Identity.load(Path(settings.identity)).peer_id)
    asker = await start_p2p(replace(settings, identity=None, port=0, announce=[]), sockets, Identity.generate())
    try:
        await _reach(asker, addresses)
        for pause in TWIN_PAUSES_S:
            if await _is_found(asker, own):
                break
            await asyncio.sleep(pause)
        else:
            return  # nobody of that id can be reached
    finally:
        await asker.shutdown()
    raise DaemonFailed(
        f"network.identity={settings.identity}: a peer with this identity ({own.to_base58()}) is up already; end it, "
        "or give this one a file of its own"
    )


async def _is_found(asker: P2P, peer: PeerID) -> bool:
    """Whether those whom the asker knows lead it to a peer."""
    try:
        await asyncio.wait_for(asker._client.connect(peer, []), DIAL_TIMEOUT_S)
    except (P2PDaemonError, OSError, TimeoutError):
        return False
    return True


def _told(failures: Sequence[JoinFailed], remembered: int) -> JoinFailed:
    """One error for all addresses, of the kind that they share."""
    kinds = {type(failure) for failure in failures}
    kind = kinds.pop() if len(kinds) == 1 else JoinFailed
    also = f" (nor any of the {remembered} peers seen in the run before)" if remembered else ""
    if len(failures) == 1:
        return kind(f"no bootstrap peer can be reached{also}. {failures[0]}")
    return kind("\n    ".join([f"no bootstrap peer can be reached{also}:", *map(str, failures)]))


async def _reach(p2p: P2P, addresses: Sequence[str]) -> tuple[list[str], list[JoinFailed]]:
    """Dial every address; returns those at which the right peer is, and why the others are of no use."""
    of_peer: dict[str, list[str]] = {}
    for address in addresses:
        of_peer.setdefault(split_peer_id(address)[1], []).append(address)
    of_peer.pop(p2p.peer_id.to_base58(), None)  # this peer's own, of an earlier start
    found = await asyncio.gather(*(_reach_peer(p2p, group) for group in of_peer.values()))
    live = [address for group, _ in found for address in group]
    return live, [failure for _, failures in found for failure in failures]


async def _reach_peer(p2p: P2P, addresses: Sequence[str]) -> tuple[list[str], list[JoinFailed]]:
    """Dial the addresses of one peer, one after the other once TCP has said which of them are worth it."""
    reasons = await asyncio.gather(*(why_unreachable(address) for address in addresses))
    failures = [reason for reason in reasons if reason is not None]
    live: list[str] = []
    for address in [address for address, reason in zip(addresses, reasons, strict=True) if reason is None]:
        failure = await _dial(p2p, address)
        if failure is None:
            live.append(address)
        else:
            failures.append(failure)
    return live, failures


async def _dial(p2p: P2P, address: str) -> JoinFailed | None:
    dialled, peer_id = split_peer_id(address)
    try:
        where = [_Target(dialled)]
        await asyncio.wait_for(p2p._client.connect(PeerID.from_base58(peer_id), where), DIAL_TIMEOUT_S)
    except TimeoutError:
        return _silent(address)
    except (P2PDaemonError, OSError) as error:
        return explain_dial(address, str(error))
    return None


class _Target:
    """An address as p2pd reads it; hivemind writes the relay's peer id in /p2p/RELAY/p2p-circuit in another way."""

    def __init__(self, address: str) -> None:
        host, relay, circuit = address.partition("/p2p/")
        self._bytes: bytes = Multiaddr(host).to_bytes()
        if relay:
            peer_id = PeerID.from_base58(circuit.removesuffix("/p2p-circuit")).to_bytes()
            self._bytes += _P2P + bytes([len(peer_id)]) + peer_id + _P2P_CIRCUIT

    def to_bytes(self) -> bytes:
        """As Multiaddr's."""
        return self._bytes


def _silent(address: str) -> NotAPeer:
    return NotAPeer(f"{address}: something accepts connections there, but says nothing; is that the right port?")


def explain_dial(address: str, told: str) -> JoinFailed:
    """The error for what p2pd told of a failed dial; its texts are those of go-libp2p's swarm and security packages."""
    lines = [line.strip() for line in told.splitlines() if "dial backoff" not in line]
    detail = lines[-1].rpartition("] ")[2][:200] if lines else told[:200]
    if other := _OTHER_ID.search(told):
        expected, new = other.groups()
        return WrongPeerId(
            f"{address}: the host answers as {new}, expected {expected}: that peer was started anew without "
            "network.identity, or another one has its port now. If you trust it, use "
            f"{split_peer_id(address)[0]}/p2p/{new}"
        )
    if "relay" in detail or "circuit" in detail:
        return NoAnswer(f"{address}: the relay does not lead to that peer ({detail}); is it up, and on this relay?")
    if "connection refused" in detail:
        return ClosedPort(f"{address}: nothing listens there any more; is the run still up?")
    if "no good addresses" in told or "no addresses" in told:
        return UnknownName(f"{address}: p2pd cannot resolve the name; check this machine's DNS, or give the IP address")
    if "i/o timeout" in detail or "unreachable" in detail or "no route" in detail:
        return NoAnswer(f"{address}: no answer ({detail}); is the machine up and the port open?")
    if "deadline exceeded" in detail:
        return _silent(address)
    if "negotiate" in detail or "EOF" in detail or "reset" in detail:
        return NotAPeer(f"{address}: what listens there does not speak libp2p ({detail}); is that the right port?")
    return JoinFailed(f"{address}: p2pd cannot connect ({detail})")
