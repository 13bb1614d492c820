"""swarmkit: train one PyTorch model with many badly connected machines."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmkit import optim, peers
    from swarmkit.peers.node import Node
    from swarmkit.peers.settings import NetworkSettings

__version__ = "0.1.0"
__all__ = ["__version__", "join", "optim", "peers"]


def join(
    run: str | None = None,
    *,
    peers: Sequence[str] = (),
    settings: "NetworkSettings | None" = None,
) -> "Node":
    """Enter a run from your own training script; without `peers` you are its first peer.

    Returns the node whose `collective()` the optimizers of `swarmkit.optim` take. Raises JoinFailed naming the cause.
    Without `settings` it remembers the peers that it sees in the user's cache folder, for when no given one answers.
    """
    from swarmkit.peers.node import Node
    from swarmkit.peers.peer_cache import default_folder
    from swarmkit.peers.settings import NetworkSettings

    return Node.start(run, initial_peers=peers, settings=settings or NetworkSettings(peer_cache=str(default_folder())))


def __getattr__(name: str) -> object:
    # `import swarmkit` alone stays light: the network costs seconds of imports that an evaluation does not need.
    if name in ("optim", "peers"):
        return importlib.import_module(f"swarmkit.{name}")
    raise AttributeError(f"module 'swarmkit' has no attribute {name!r}")
