"""The one place that imports hivemind: its DHT node and P2P, set up so that nothing outlives this process."""

import asyncio
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from swarmkit.peers.clock import swarm_time as get_dht_time
from swarmkit.peers.errors import DaemonFailed, NotAPeer
from swarmkit.peers.hygiene import children_die_with_us
from swarmkit.peers.identity import Identity, write_new
from swarmkit.peers.settings import NetworkSettings

# Before the import: with torch's default "file_system" strategy hivemind leaves a manager process and /dev/shm files.
os.environ.setdefault("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")


@contextmanager
def _scipy_on_demand() -> Iterator[None]:
    """Let `import scipy.optimize` do nothing meanwhile; scipy itself loads the module when its name is first used.

    hivemind imports it for its averaging, which nobody here uses, and it takes as long as all the rest of hivemind.
    """
    name = "scipy.optimize"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]


with warnings.catch_warnings(), _scipy_on_demand():
    # Not ours to mend: torch.jit.script in parts of hivemind that nobody here uses, and the like.
    warnings.simplefilter("ignore")
    import hivemind.dht.node
    import hivemind.dht.protocol
    import hivemind.dht.routing
    import hivemind.hivemind_cli
    import hivemind.utils.timed_storage
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2P, PeerID, ServicerBase
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
    from hivemind.utils.auth import AuthorizerBase
    from hivemind.utils.multiaddr import Multiaddr

# hivemind's own is the wall clock, which peers do not agree on.
for _module in (hivemind.dht.node, hivemind.dht.protocol, hivemind.dht.routing, hivemind.utils.timed_storage):
    _module.get_dht_time = get_dht_time

__all__ = [
    "DHTID",
    "P2PD_PATH",
    "P2P",
    "AuthorizerBase",
    "DHTNode",
    "DHTRecord",
    "Multiaddr",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "RecordValidatorBase",
    "ServicerBase",
    "get_dht_time",
    "start_dht",
    "start_p2p",
    "stop_p2p",
]

P2PD_PATH = Path(hivemind.hivemind_cli.__path__[0], "p2pd")


async def start_p2p(settings: NetworkSettings, socket_folder: Path, identity: Identity) -> P2P:
    """Start p2pd as a child that dies with this process; raises DaemonFailed saying why it cannot.

    It knows nobody yet: `swarmkit.peers.entry` connects it, because p2pd has one text for every cause.
    """
    P2P._UNIX_SOCKET_PREFIX = f"/unix{socket_folder}/"
    public = settings.host not in ("127.0.0.1", "localhost", "::1")
    protocol = "ip6" if ":" in settings.host else "ip4"
    host = "127.0.0.1" if settings.host == "localhost" else settings.host
    children: list[asyncio.subprocess.Process] = []
    # p2pd reads its key from a file; whoever named none has it for this moment only.
    key_file = Path(settings.identity or socket_folder / f"{identity.peer_id}.key")
    write_new(key_file, identity.to_bytes())
    try:
        with children_die_with_us() as children:
            return await P2P.create(
                host_maddrs=[f"/{protocol}/{host}/tcp/{settings.port}"],
                announce_maddrs=settings.announce or None,
                identity_path=str(key_file),
                check_if_identity_free=False,  # it knows RSA keys only
                startup_timeout=settings.startup_timeout_s,
                nat_port_map=public and settings.relay,
                auto_nat=public and settings.relay,
                use_relay=settings.relay,
                use_auto_relay=settings.relay,
                # The daemon must not give up a peer whose trainer is busy importing for half a minute.
                idle_timeout=600,
            )
    except (P2PDaemonError, OSError, ValueError) as error:
        for child in children:
            if child.returncode is None:
                child.kill()
            await child.wait()
        raise DaemonFailed(f"p2pd did not start: {error}") from error
    finally:
        if settings.identity is None:
            key_file.unlink(missing_ok=True)


async def stop_p2p(p2p: P2P) -> None:
    """End p2pd; what it complains of while its socket is closed under it is no news."""
    logging.getLogger("hivemind.p2p.p2p_daemon").setLevel(logging.CRITICAL)
    await p2p.shutdown()


async def start_dht(
    p2p: P2P,
    initial_peers: Sequence[str],
    validator: RecordValidatorBase | None = None,
    authorizer: AuthorizerBase | None = None,
) -> DHTNode:
    """Start a DHT node on a running P2P, in the running loop.

    hivemind's own DHT class runs it in a forked process behind a control pipe that dies of messages over 16 KB; in the
    loop that the rounds use anyway, that trap, a process and 194 MB are gone.
    """
    try:
        return await DHTNode.create(
            p2p=p2p, initial_peers=list(initial_peers) or None, record_validator=validator, authorizer=authorizer
        )
    except (RuntimeError, P2PDaemonError, ValueError) as error:
        raise NotAPeer(
            f"a libp2p host answers at {', '.join(initial_peers)}, but as no peer of swarmkit ({error}); is that the "
            "line that a peer printed, and is its process not frozen?"
        ) from error
