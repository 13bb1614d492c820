"""Real nodes of a closed run on loopback, with guests of every kind."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from swarmkit.optim.collective import Reduced, RoundKey
from swarmkit.peers.collective import SwarmCollective
from swarmkit.peers.identity import Identity
from swarmkit.peers.invitation import RunKey
from swarmkit.peers.node import Node
from swarmkit.peers.settings import NetworkSettings

QUICK = NetworkSettings(heartbeat_s=0.5, silence_s=1.0, stall_s=2.0, round_timeout_s=4.0)


class ClosedRun:
    """An owner, whoever was let in, and a key to invite others with."""

    def __init__(self, folder: Path, name: str = "closed") -> None:
        self.name = name
        self.key_file = folder / f"{name}.run-key"
        self.nodes: list[Node] = []
        self.owner = self.keep(Node.start(name, settings=replace(QUICK, run_key=str(self.key_file))))
        self.key = RunKey.load(self.key_file)
        self.address = self.owner.addresses[0]

    def keep(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    def invite(self, guest: str = "guest", *, seconds: float = 3600.0, issued: float | None = None, **more: Any) -> str:
        now = time.time() if issued is None else issued
        return self.key.invite(self.name, guest, now=now, seconds=seconds, **more).to_text()

    def join(self, invitation: str | None, *, role: str = "replica", **settings: Any) -> Node:
        """Enter by an invitation."""
        node = Node.start(
            initial_peers=[self.address],
            settings=replace(QUICK, invitation=invitation, **settings),
            role=role,
            existing=True,
        )
        return self.keep(node)

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.close()


@contextlib.contextmanager
def closed_run(folder: Path, name: str = "closed") -> Iterator[ClosedRun]:
    run = ClosedRun(folder, name)
    try:
        yield run
    finally:
        run.close()


def identity_file(folder: Path, name: str = "guest") -> tuple[str, str]:
    """A new identity's file and its peer id."""
    path = folder / f"{name}.key"
    return str(path), Identity.load_or_make(path).peer_id


def all_together(collectives: list[SwarmCollective], index: int, values: list[float] | None = None) -> list[Reduced]:
    """A round of everybody; the value of each member, one by default."""
    key = RoundKey("x", index)
    offered = values or [1.0] * len(collectives)
    futures = [
        c.all_reduce([torch.full((3,), v)], round=key, weight=1.0) for c, v in zip(collectives, offered, strict=True)
    ]
    return [future.result(20) for future in futures]
