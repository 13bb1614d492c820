"""A donor or a joiner of a state, in a process of its own; run by test_state.py and the benchmark."""

import json
import sys
import time
from typing import Any

import torch

from swarmkit.peers import fetch
from swarmkit.peers.manifest import Snapshot
from swarmkit.peers.node import Node
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.transfer import Transfer


def a_state(megabytes: float) -> Snapshot:
    """A state of so many MB (2^20 bytes), the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    numel = int(megabytes * (1 << 18))
    return {"anchor/w": torch.randn(numel, generator=generator)}, {"round": 3, "lineage": "l"}


def main() -> None:
    """Arguments: host, "donor" or "joiner", MB, donors at a time, and for all but the first the first one's address."""
    host, role, megabytes, donors, *addresses = sys.argv[1:]
    fetch.MAX_DONORS = int(donors)
    settings = NetworkSettings(host=host, heartbeat_s=0.5, silence_s=2.0, round_timeout_s=10.0)
    node = Node.start("state", initial_peers=addresses, settings=settings)
    try:
        if role == "donor":
            state = a_state(float(megabytes))
            node.serve_state(lambda: state, lambda: "one")
            node.heartbeat(round=3)
            node.announce("training")
            print(json.dumps({"id": node.peer_id, "address": node.addresses[0]}), flush=True)
            sys.stdin.readline()
        else:
            print(json.dumps({"id": node.peer_id}), flush=True)
            sys.stdin.readline()
            join(node, float(megabytes))
    finally:
        node.close()


def join(node: Node, megabytes: float) -> None:
    """Fetch the state; says when half of it is here, and at the end what it took."""
    seen: list[tuple[float, int]] = []
    state: dict[str, Any] = {"half": False}

    def watch(at: Transfer) -> None:
        seen.append((time.monotonic(), at.done))
        if not state["half"] and at.total and 2 * at.done > at.total:
            state["half"] = True
            print(json.dumps({"half": time.monotonic(), "donors": at.donors}), flush=True)

    started = time.monotonic()
    tensors, _ = node.fetch_state(watch)
    ended = time.monotonic()
    moving = [(at, done) for at, done in seen if done]
    result = {
        "seconds": ended - started,
        "first": moving[0][0] - started,
        "ended": ended,
        "gap": max((b - a for (a, _), (b, _) in zip(moving, moving[1:], strict=False)), default=0.0),
        "received": node.bytes_received,
        "right": torch.equal(tensors["anchor/w"], a_state(megabytes)[0]["anchor/w"]),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
