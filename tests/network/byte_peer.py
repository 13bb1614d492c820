"""A replica that trains a small model with strategies in turn and says what its rounds sent; run by test_bytes.py."""

import json
import sys

import torch

from swarmkit.optim import AllReduce, Every, LocalSGD, SyncedOptimizer
from swarmkit.optim.round_report import RoundReport
from swarmkit.peers.node import Node
from swarmkit.peers.settings import NetworkSettings

STEPS = 64


def main() -> None:
    """Arguments: host, strategies. For each of these a line comes in with the address of a peer that is up, if any."""
    host, *strategies = sys.argv[1:]
    for strategy in strategies:
        replica(host, strategy, sys.stdin.readline().split())


def replica(host: str, strategy: str, addresses: list[str]) -> None:
    node = Node.start("bytes", initial_peers=addresses, settings=NetworkSettings(host=host))
    print(node.addresses[0], flush=True)
    try:
        collective = node.collective()
        assert node.wait_for_peers(2, timeout=30)
        sys.stdin.readline()  # the counters have been read
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 300)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer: SyncedOptimizer = (
            AllReduce(inner, collective=collective)
            if strategy == "allreduce"
            else LocalSGD(inner, collective=collective, sync=Every(32))
        )
        reports: list[RoundReport] = []
        optimizer.on_round.append(reports.append)
        for _ in range(STEPS):
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(report.failed is None and len(report.members) == 2 for report in reports)
        print(json.dumps({"rounds": len(reports), "sent": sum(report.bytes_sent for report in reports)}), flush=True)
        sys.stdin.readline()
    finally:
        node.close()


if __name__ == "__main__":
    main()
