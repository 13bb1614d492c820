"""A peer's place in the network, found out with the help of another peer: delay, rates, clock, reachability."""

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarmkit.peers.checkup import MAX_CHUNK_BYTES
from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.node import Node
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.wire import field as take
from swarmkit.peers.wire import finite

PINGS = 7
CALL_TIMEOUT_S = 4.0
FIRST_BYTES = 16 << 10
MEASURE_S = 1.2  # of transfer in each direction, when the bytes last so long
MAX_BYTES = 4 << 20  # in each direction
IN_FLIGHT = 4
MAX_PORTS = 2


@dataclass(slots=True, kw_only=True)
class Rate:
    """A rate that was measured."""

    bytes_per_s: float
    at_least: bool  # the bytes were gone before the link was full for long


@dataclass(slots=True, kw_only=True)
class Examination:
    """What was found with one peer; `problems` has what could not be, by name."""

    peer_id: str = ""
    rtt_s: float | None = None
    skew_s: float | None = None  # of this machine's clock; positive: it is ahead
    upload: Rate | None = None
    download: Rate | None = None
    dials: dict[int, dict[str, str]] = field(default_factory=dict)  # port -> address seen by the peer -> outcome
    problems: dict[str, str] = field(default_factory=dict)


def examine(node: Node, ports: list[int], *, timeout: float) -> Examination:
    """Ask a peer of the run for help, the one whose address was given first; takes `timeout` seconds at most."""
    found = Examination()
    known = [address.rpartition("/")[2] for address in node.entry.live]
    helpers = list(dict.fromkeys([*known, *(record.peer_id for record in node.table())]))
    helpers = [peer_id for peer_id in helpers if peer_id != node.peer_id]
    try:
        node._thread.run(_examine(node._rpc, helpers[:3], ports[:MAX_PORTS], found), timeout=timeout)
    except TimeoutError:
        found.problems["time"] = f"the measurements did not end within {timeout:.0f} s"
    return found


async def _examine(rpc: Rpc, helpers: list[str], ports: list[int], found: Examination) -> None:
    reasons = []
    for peer_id in helpers:
        try:
            found.rtt_s, found.skew_s = await _clock(rpc, peer_id)
        except (PeerUnreachable, ProtocolError) as error:
            reasons.append(str(error))
            continue
        found.peer_id = peer_id
        break
    else:
        found.problems["help"] = "; ".join(reasons) or "no other peer is in the run"
        return
    await asyncio.gather(_rates(rpc, found), *(_dial_back(rpc, port, found) for port in ports))


async def _clock(rpc: Rpc, peer_id: str) -> tuple[float, float]:
    """Median round trip, and how far this clock is ahead by the quickest exchange, off by half of that at most."""
    trips = []
    for _ in range(PINGS):
        before, started = time.time(), time.monotonic()
        answer = await rpc.call(peer_id, "checkup.time", {}, timeout=CALL_TIMEOUT_S)
        trip = time.monotonic() - started
        trips.append((trip, before + trip / 2 - take(answer, "time", float, finite)))
    return statistics.median(trip for trip, _ in trips), min(trips)[1]


async def _rates(rpc: Rpc, found: Examination) -> None:
    async def upload(size: int) -> None:
        await rpc.call(found.peer_id, "checkup.upload", {"payload": os.urandom(size)}, timeout=CALL_TIMEOUT_S)

    async def download(size: int) -> None:
        answer = await rpc.call(found.peer_id, "checkup.download", {"size": size}, timeout=CALL_TIMEOUT_S)
        take(answer, "payload", bytes, lambda payload: len(payload) == size)

    # One after the other: on a slow link the acknowledgements of one would wait behind the other's data.
    try:
        found.upload = await measure_rate(upload)
        found.download = await measure_rate(download)
    except (PeerUnreachable, ProtocolError) as error:
        found.problems["rate"] = str(error)


async def measure_rate(move: Callable[[int], Awaitable[None]]) -> Rate:
    """Move chunks, several at a time, until the time or the bytes are used up."""
    started = time.monotonic()
    await move(FIRST_BYTES)
    # So large that a chunk takes about a quarter of a second: few of them on a slow link, few calls on a fast one.
    guess = FIRST_BYTES / (time.monotonic() - started)
    size = int(min(MAX_CHUNK_BYTES, max(FIRST_BYTES, guess / 4)))
    moved, left = 0, MAX_BYTES // size
    started = time.monotonic()

    async def worker() -> None:
        nonlocal moved, left
        while left > 0 and time.monotonic() - started < MEASURE_S:
            left -= 1
            await move(size)
            moved += size

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    seconds = time.monotonic() - started
    return Rate(bytes_per_s=moved / seconds, at_least=seconds < MEASURE_S / 4)


async def _dial_back(rpc: Rpc, port: int, found: Examination) -> None:
    try:
        answer = await rpc.call(found.peer_id, "checkup.dial", {"port": port}, timeout=2 * CALL_TIMEOUT_S)
        outcomes = take(answer, "outcomes", dict, lambda outcomes: len(outcomes) <= 4)
    except (PeerUnreachable, ProtocolError) as error:
        found.problems["dial"] = str(error)
        return
    found.dials[port] = {
        str(host)[:45]: str(outcome)[:10] for host, outcome in outcomes.items() if str(host).isprintable()
    }
