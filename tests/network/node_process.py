"""A peer that says its address and stays until its standard input ends; run by the tests of namespaces."""

import sys

from swarmkit.peers.node import Node
from swarmkit.peers.settings import NetworkSettings


def main() -> None:
    """Arguments: host, port, run, and for all but the first peer the first one's address."""
    host, port, run, *addresses = sys.argv[1:]
    settings = NetworkSettings(host=host, port=int(port), heartbeat_s=0.5)
    node = Node.start(run, initial_peers=addresses, settings=settings)
    try:
        node.announce("training")
        print(node.addresses[0], flush=True)
        sys.stdin.read()
    finally:
        node.close()


if __name__ == "__main__":
    main()
