"""Every setting of the network layer, with its default and unit."""

import ipaddress
from dataclasses import dataclass, field
from enum import Enum
from math import inf


class Transport(Enum):
    """What carries bulk tensors between two peers."""

    auto = "auto"  # gRPC where the peer can be reached directly, libp2p otherwise
    grpc = "grpc"
    libp2p = "libp2p"


@dataclass(frozen=True, slots=True)
class Tls:
    """Who one end of a gRPC connection is and whom it believes, all PEM."""

    certificate: bytes
    key: bytes
    ca: bytes | None = None  # signs those that may connect; None: anybody may


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlSettings:
    """Where the control plane listens; beyond loopback only with mutual TLS."""

    host: str = "127.0.0.1"
    port: int = 0  # 0 picks a free one
    tls: Tls | None = None

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and (self.tls is None or self.tls.ca is None):
            raise ValueError(
                f"host={self.host}: others may reach it, and drain this peer; that needs TLS with a client CA"
            )


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches; a name other than localhost may be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(kw_only=True, slots=True)
class NetworkSettings:
    """How a node listens, how long it waits and how much it accepts."""

    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0 for all interfaces
    port: int = 0  # libp2p's TCP port; 0 picks a free one
    bulk_port: int = 0  # gRPC's TCP port for bulk tensors; 0 picks a free one
    announce: list[str] = field(default_factory=list)  # multiaddrs to announce instead of those that libp2p sees
    identity: str | None = None  # private key file, made when missing; None: a new identity for each process
    transport: Transport = Transport.auto
    round_timeout_s: float = 30.0  # bounds a round from a member's call to its result
    heartbeat_s: float = 2.0  # between two heartbeats; a record expires after five
    silence_s: float = 5.0  # a member that answers no ping for this long is taken for dead
    stall_s: float = 10.0  # a bulk stream without a message for this long is broken, unless its peer answers a ping
    startup_timeout_s: float = 30.0  # for p2pd to start and reach a bootstrap peer
    backup_workers: bool = False  # begin rounds without the slowest members where all together then do more
    chunk_bytes: int = 1 << 19  # size of one message of a bulk stream
    max_state_bytes: int = 8 << 30  # the largest state that is accepted from a peer
    max_downloads: int = 6  # joiners that download the state from this peer at the same time; others wait or go on
    state_mbit: float = 1000.0  # Mbit/s that all of them together may take; 0: no limit
    state_share: float = 0.25  # of the rate that the link has shown that they may take while a round exchanges tensors
    max_round_bytes: int = 8 << 30  # the largest payload that is accepted from a member
    run_key: str | None = None  # of a closed run, for its owner: private key file, made when missing
    invitation: str | None = None  # to a closed run: the line itself, or a file that holds it
    trim: float = 0.0  # of each coordinate's values, the share that a reduction cuts off at either end; 0: plain mean
    max_norm_ratio: float = 0.0  # of a contribution to a reduction, to the median of the members'; 0: unbounded
    relay: bool = False  # look for libp2p relays, for peers behind NAT
    peer_cache: str | None = None  # folder in which peers seen are remembered for a later start; None: nowhere
    socket_folder: str | None = None  # for p2pd's unix sockets; None: a temporary one, removed at exit

    def __post_init__(self) -> None:
        for name in ("round_timeout_s", "heartbeat_s", "silence_s", "stall_s", "startup_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be a positive number of seconds")
        if self.silence_s >= self.round_timeout_s:
            raise ValueError(
                f"silence_s={self.silence_s}: must be below round_timeout_s={self.round_timeout_s}, "
                "or a dead member could only be noticed after the round has failed"
            )
        if self.max_downloads < 1:
            raise ValueError(f"max_downloads={self.max_downloads}: with less than 1 nobody could join")
        if not 0 <= self.state_mbit < inf:
            raise ValueError(f"state_mbit={self.state_mbit}: must be a number of Mbit/s, or 0 for no limit")
        if not 0 < self.state_share <= 1:
            raise ValueError(f"state_share={self.state_share}: must be above 0 and at most 1")
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"trim={self.trim}: must be at least 0 and below 0.5")
        if not (self.max_norm_ratio == 0 or self.max_norm_ratio > 1):
            raise ValueError(f"max_norm_ratio={self.max_norm_ratio}: must be above 1, or 0 for none")
        if not 1 << 12 <= self.chunk_bytes <= 3 << 20:
            raise ValueError(f"chunk_bytes={self.chunk_bytes}: must lie between 4 KiB and 3 MiB (gRPC's message limit)")
