"""Looks at bootstrap addresses before p2pd does, so that a failed join names its cause instead of one text for all."""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence

from swarmkit.peers.errors import JoinFailed

CONNECT_TIMEOUT_S = 5.0
EXAMPLE = "/ip4/203.0.113.5/tcp/31337/p2p/QmW9..."
_ADDRESS = re.compile(
    r"^/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>\d+)(/p2p/[^/]+/p2p-circuit)?"
    r"/p2p/(?P<peer>[1-9A-HJ-NP-Za-km-z]{20,80})$"
)


def check_address(address: str) -> tuple[str, int]:
    """Return host and port of a bootstrap address; raises ValueError saying what is wrong with it."""
    match = _ADDRESS.match(address)
    if match is None:
        missing = " (it has no /p2p/ peer id at its end)" if "/tcp/" in address and "/p2p/" not in address else ""
        raise ValueError(f"{address!r} is not an address of a peer{missing}; it looks like {EXAMPLE}")
    port = int(match["port"])
    if not 0 < port < 65536:
        raise ValueError(f"{address!r}: port {port} cannot be dialled; copy the line that the running peer printed")
    if match["kind"] in ("ip4", "ip6"):
        try:
            ipaddress.ip_address(match["host"])
        except ValueError as error:
            raise ValueError(f"{address!r}: {match['host']!r} is not an IP address") from error
    return match["host"], port


async def find_reachable(addresses: Sequence[str]) -> list[str]:
    """Return the addresses at which something listens; raises JoinFailed with a reason for each when none does.

    Raises ValueError for a malformed address before anything is dialled.
    """
    targets = [check_address(address) for address in addresses]
    reasons = await asyncio.gather(*(_why_unreachable(host, port) for host, port in targets))
    reachable = [address for address, reason in zip(addresses, reasons, strict=True) if reason is None]
    if addresses and not reachable:
        listed = "; ".join(f"{address}: {reason}" for address, reason in zip(addresses, reasons, strict=True))
        raise JoinFailed(f"no bootstrap peer can be reached. {listed}")
    return reachable


async def _why_unreachable(host: str, port: int) -> str | None:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_TIMEOUT_S)
    except socket.gaierror:
        return f"the name {host} cannot be resolved; check its spelling and this machine's DNS"
    except ConnectionRefusedError:
        return f"{host} is up but nothing listens on port {port}; is the run still up, and is this its port?"
    except TimeoutError:
        return f"{host} did not answer within {CONNECT_TIMEOUT_S:.0f} s; is the machine up and port {port} open?"
    except OSError as error:
        return f"{host} cannot be reached ({error.strerror or error})"
    writer.close()
    return None
