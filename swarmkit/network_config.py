"""Settings of the network as a run's configuration names them, and the node settings they make."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import TYPE_CHECKING

from swarmkit.checks import at_least, in_range, positive
from swarmkit.peers.preflight import check_address
from swarmkit.peers.settings import Transport

if TYPE_CHECKING:
    from swarmkit.peers.settings import NetworkSettings


# As in swarmkit.peers.coordinator, which refuses longer rounds.
MAX_ROUND_TIMEOUT_S = 24 * 3600.0


class PaceRule(Enum):
    """Whose steps fill the window of a strategy that has windows."""

    steps = "steps"  # each replica takes all its steps, then waits for the others
    swarm = "swarm"  # all replicas together: the fast take more, the slow fewer, and nobody waits


class RejoinRule(Enum):
    """What becomes of local work when the others have closed rounds without this replica."""

    fetch = "fetch"  # it is lost: the others' state replaces it
    offer = "offer"  # 1 / (1 + rounds missed) of it is brought into the next round


@dataclass(kw_only=True, slots=True)
class NetworkConfig:
    """How peers listen, find each other and wait."""

    listen: str = "127.0.0.1:0"  # host:port of libp2p; port 0 picks a free one, host 0.0.0.0 is every interface
    bulk_port: int = 0  # gRPC's port for bulk tensors; 0 picks a free one
    announce: list[str] = field(default_factory=list)  # multiaddrs to tell others instead of those that libp2p sees
    initial_peers: list[str] = field(default_factory=list)  # addresses of peers of a run to join
    identity: str | None = None  # private key file; made when missing; none: a new identity each time
    closed: bool = False  # only who holds an invitation, made with the run key, takes part or sees anything
    run_key: str | None = None  # private key file of a closed run, made when missing; none: NAME.run-key
    transport: Transport = Transport.auto  # auto: gRPC where a peer can be reached directly, libp2p otherwise
    relay: bool = False  # look for libp2p relays, for peers behind NAT
    peer_cache: str = "auto"  # folder that remembers peers, for when no address answers; auto: the user's; none: off
    pace: PaceRule = PaceRule.steps  # whose steps fill a window; the same on all peers
    backup_workers: bool = False  # rounds begin without their slowest members where all together then do more
    rejoin: RejoinRule = RejoinRule.fetch  # what becomes of local work after missed rounds
    trim: float = 0.0  # share of each coordinate's values that a reduction cuts off at either end; 0: plain mean
    max_norm_ratio: float = 100.0  # of a contribution to a reduction, to the median of three or more; 0: unbounded
    min_peers: int = 1  # training starts when so many replicas are there
    max_wait_s: float = 600.0  # for min_peers, before giving up
    round_timeout_s: float = 30.0  # bounds a round
    heartbeat_s: float = 2.0  # between two heartbeats
    silence_s: float = 5.0  # a member that answers no ping for so long is taken for dead
    stall_s: float = 10.0  # a bulk stream without a byte for so long is broken
    drain_timeout_s: float = 20.0  # from SIGTERM until a peer leaves without finishing its round
    state_mbit: float = 1000.0  # Mbit/s that all joiners together may take of this peer's state; 0: no limit
    state_share: float = 0.25  # of what the link has shown that joiners may take while a round exchanges tensors
    max_downloads: int = 6  # joiners that download the state from this peer at the same time; others go on or wait

    def __post_init__(self) -> None:
        host_port("network.listen", self.listen)
        positive(
            "network", self, "max_wait_s", "round_timeout_s", "heartbeat_s", "silence_s", "stall_s", "drain_timeout_s"
        )
        at_least("network", self, 1, "min_peers", "max_downloads")
        in_range("network", self, 0.0, inf, "state_mbit")
        in_range("network", self, 0.0, 0.5, "trim")
        if not (self.max_norm_ratio == 0 or 1 < self.max_norm_ratio < inf):
            raise ValueError(f"network.max_norm_ratio={self.max_norm_ratio}: must be above 1, or 0 for no limit")
        positive("network", self, "state_share")
        if self.state_share > 1:
            raise ValueError(f"network.state_share={self.state_share}: must be at most 1")
        if not 0 <= self.bulk_port < 65536:
            raise ValueError(f"network.bulk_port={self.bulk_port}: not a port")
        if self.round_timeout_s > MAX_ROUND_TIMEOUT_S:
            raise ValueError(
                f"network.round_timeout_s={self.round_timeout_s}: at most a day, {MAX_ROUND_TIMEOUT_S:.0f}"
            )
        if self.silence_s >= self.round_timeout_s:
            raise ValueError(
                f"network.silence_s={self.silence_s}: must be below network.round_timeout_s={self.round_timeout_s}, "
                "or a dead member would only be noticed after its round has failed"
            )
        if self.run_key is not None and not self.closed:
            raise ValueError(f"network.run_key={self.run_key}: only a closed run has one; set network.closed=true")
        for address in self.initial_peers:
            try:
                check_address(address)
            except ValueError as error:
                raise ValueError(f"network.initial_peers: {error}") from error
        for address in self.announce:
            if not re.fullmatch(r"/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/tcp/\d+(/.*)?", address):
                raise ValueError(f"network.announce={address!r}: must look like /ip4/203.0.113.5/tcp/31337")
            if "/tcp/0" in address:
                raise ValueError(f"network.announce={address!r}: nobody can dial port 0; name the real one")

    def key_file(self, run: str) -> str:
        """Where the key of a closed run lies."""
        return self.run_key or f"{run.replace('/', '_')}.run-key"

    def settings(
        self, socket_folder: str | None = None, *, owner_of: str | None = None, invitation: str | None = None
    ) -> "NetworkSettings":
        """What a Node takes; with a run's name that of its owner if it is closed, else with an invitation."""
        from swarmkit.peers.settings import NetworkSettings

        host, port = host_port("network.listen", self.listen)
        return NetworkSettings(
            host=host,
            port=port,
            bulk_port=self.bulk_port,
            announce=list(self.announce),
            identity=self.identity,
            run_key=self.key_file(owner_of) if self.closed and owner_of is not None and invitation is None else None,
            invitation=invitation,
            transport=self.transport,
            relay=self.relay,
            trim=self.trim,
            max_norm_ratio=self.max_norm_ratio,
            peer_cache=cache_folder(self.peer_cache),
            round_timeout_s=self.round_timeout_s,
            heartbeat_s=self.heartbeat_s,
            silence_s=self.silence_s,
            stall_s=self.stall_s,
            backup_workers=self.backup_workers,
            state_mbit=self.state_mbit,
            state_share=self.state_share,
            max_downloads=self.max_downloads,
            socket_folder=socket_folder,
        )


def listen_for(addresses: Sequence[str], listen: str) -> str:
    """Where a peer that joins at `addresses` listens: not on loopback when they are elsewhere."""
    remote = not all("/127." in address or "/::1/" in address for address in addresses)
    # Peers elsewhere cannot reach a loopback address.
    return "0.0.0.0:0" if remote and host_port("network.listen", listen)[0] == "127.0.0.1" else listen


def cache_folder(wanted: str) -> str | None:
    """The folder that `network.peer_cache` means."""
    from swarmkit.peers.peer_cache import default_folder

    return {"auto": str(default_folder()), "none": None}.get(wanted, wanted)


def host_port(key: str, text: str) -> tuple[str, int]:
    """Split host:port ([host]:port for IPv6); raises ValueError naming the key."""
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[\w.:-]+|\[[\w:.]+\]", host) or not port.isdigit() or not int(port) < 65536:
        raise ValueError(f"{key}={text!r}: must be host:port, as 0.0.0.0:31337 or [::]:31337")
    return host.strip("[]"), int(port)
