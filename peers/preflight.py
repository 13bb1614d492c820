"""Looks at bootstrap addresses before p2pd does, so that a failed join names its cause instead of one text for all."""

import asyncio
import ipaddress
import re
import socket

from swarmkit.peers.errors import ClosedPort, JoinFailed, NoAnswer, UnknownName

CONNECT_TIMEOUT_S = 5.0
EXAMPLE = "/ip4/203.0.113.5/tcp/31337/p2p/12D3Koo..."
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_ADDRESS = re.compile(
    r"^/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>\d{1,9})(/p2p/[^/]+/p2p-circuit)?"
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
    for peer_id in re.findall(r"/p2p/([^/]+)", address):
        if not _is_peer_id(peer_id):
            raise ValueError(
                f"{address!r}: {peer_id} is no peer id, or only a part of one; copy the whole line that the running "
                "peer printed"
            )
    return match["host"], port


def _is_peer_id(text: str) -> bool:
    """True for a base58 multihash: a code, the length of what follows, and so many bytes."""
    number = 0
    for character in text:
        digit = _BASE58.find(character)
        if digit < 0:
            return False
        number = number * 58 + digit
    data = bytes(len(text) - len(text.lstrip("1"))) + number.to_bytes((number.bit_length() + 7) // 8, "big")
    return len(data) > 2 and data[0] in (0x00, 0x12) and data[1] == len(data) - 2


def split_peer_id(address: str) -> tuple[str, str]:
    """Split a checked address into what libp2p dials and the peer id that it expects there."""
    dialled, _, peer_id = address.rpartition("/p2p/")
    return dialled, peer_id


async def why_unreachable(address: str) -> JoinFailed | None:
    """Open a TCP connection to a checked address; returns the reason when that does not work, within 5 seconds."""
    host, port = check_address(address)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_TIMEOUT_S)
    except socket.gaierror:
        return UnknownName(
            f"{address}: the name {host} cannot be resolved; check its spelling and this machine's DNS, "
            "or give the IP address"
        )
    except ConnectionRefusedError:
        return ClosedPort(
            f"{address}: {host} is up but nothing listens on port {port}; is the run still up, and is this its port? "
            "A peer that is up prints its line"
        )
    except TimeoutError:
        return NoAnswer(
            f"{address}: {host} did not answer within {CONNECT_TIMEOUT_S:.0f} s; is the machine up, and do its "
            f"firewall and router let TCP port {port} in?"
        )
    except OSError as error:
        return NoAnswer(
            f"{address}: {host} cannot be reached from here ({error.strerror or error}); check this machine's network"
        )
    writer.close()
    return None
