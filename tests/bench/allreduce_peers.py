"""One peer of the all-reduce benchmark: runs an engine in its own process and obeys lines of JSON."""

import argparse
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from swarmkit.optim.collective import RoundKey


class Engine(Protocol):
    """An all-reduce under test."""

    def begin(self) -> str:
        """Run in peer 0 before all others; returns its address."""

    def connect(self, address: str) -> None:
        """Find the others; peer 0 hears its own address."""

    def load(self, tensor: Tensor) -> None:
        """Take what the next round averages; not a part of the round."""

    def reduce(self, index: int) -> None:
        """Average over all peers; raises if not all took part."""

    def result(self) -> Tensor:
        """What came out; not a part of the round."""


class Peer:
    """Which one this is."""

    def __init__(self, rank: int, size: int, host: str, timeout: float) -> None:
        self.rank, self.size, self.host, self.timeout = rank, size, host, timeout
        self._tensor = torch.empty(0)

    def load(self, tensor: Tensor) -> None:
        """Take what the next round averages."""
        self._tensor = tensor

    def result(self) -> Tensor:
        """Give back the last round's mean."""
        return self._tensor


class Swarm(Peer):
    """SwarmCollective with the transport that it picks, gRPC here."""

    transport = "auto"

    def begin(self) -> str:
        self._start([])
        return json.dumps(self._node.addresses)

    def _start(self, initial_peers: list[str]) -> None:
        from swarmkit.peers.node import Node
        from swarmkit.peers.settings import NetworkSettings, Transport

        settings = NetworkSettings(host=self.host, round_timeout_s=self.timeout, transport=Transport[self.transport])
        self._node = Node.start("bench", initial_peers=initial_peers, settings=settings)

    def connect(self, address: str) -> None:
        if self.rank:
            self._start(json.loads(address))
        self._node.announce("training")
        assert self._node.wait_for_peers(self.size, timeout=60)
        self._collective = self._node.collective()

    def reduce(self, index: int) -> None:
        future = self._collective.all_reduce([self._tensor], round=RoundKey("bench", index), weight=1.0)
        result = future.result(self.timeout + 10)
        assert len(result.members) == self.size, result.members
        self._tensor = result.tensors[0]


class SwarmOverLibp2p(Swarm):
    """SwarmCollective as between peers that do not reach each other directly."""

    transport = "libp2p"


class Torch(Peer):
    """TorchCollective over gloo."""

    def begin(self) -> str:
        return f"{self.host}:29500"

    def connect(self, address: str) -> None:
        import torch.distributed as dist

        from swarmkit.peers.distributed import TorchCollective

        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=self.rank, world_size=self.size)
        self._collective = TorchCollective(timeout=self.timeout)

    def reduce(self, index: int) -> None:
        future = self._collective.all_reduce([self._tensor], round=RoundKey("bench", index), weight=1.0)
        self._tensor = future.result(self.timeout).tensors[0]


class Hivemind(Peer):
    """hivemind.DecentralizedAverager, tuned as its documentation and our measurements say."""

    def begin(self) -> str:
        self._start(None)
        return json.dumps([str(address) for address in self._dht.get_visible_maddrs()])

    def _start(self, initial_peers: list[str] | None) -> None:
        import hivemind

        self._dht = hivemind.DHT(
            initial_peers=initial_peers,
            host_maddrs=[f"/ip4/{self.host}/tcp/0"],
            use_relay=False,
            use_auto_relay=False,
            auto_nat=False,
            nat_port_map=False,
            start=True,
        )
        self._averagers: dict[int, Any] = {}

    def connect(self, address: str) -> None:
        if self.rank:
            self._start(json.loads(address))

    def load(self, tensor: Tensor) -> None:
        if tensor.numel() not in self._averagers:
            self._averagers[tensor.numel()] = self._start_averager(tensor)
        self._averager = self._averagers[tensor.numel()]
        with self._averager.get_tensors() as staged:
            staged[0].copy_(tensor)

    def reduce(self, index: int) -> None:
        # With the group's exact size given, a group begins when all are there; retries cost seconds, not the round.
        group = self._averager.step(timeout=self.timeout)
        assert group is not None
        assert len(group) == self.size, group

    def result(self) -> Tensor:
        with self._averager.get_tensors() as staged:
            mean: Tensor = staged[0].clone()
        return mean

    def _start_averager(self, tensor: Tensor) -> Any:
        import hivemind

        return hivemind.DecentralizedAverager(
            [torch.zeros_like(tensor)],
            self._dht,
            prefix=f"bench{tensor.numel()}",
            target_group_size=self.size,
            min_group_size=self.size,
            min_matchmaking_time=1.0,
            request_timeout=1.0,
            allreduce_timeout=self.timeout,
            start=True,
        )


class Tcp(Peer):
    """Plain sockets: a direct reduce-scatter and all-gather with nothing around it."""

    def begin(self) -> str:
        return ""

    def connect(self, address: str) -> None:
        """Peer i listens for those after it; hosts are numbered from .1."""
        self._links: dict[int, socket.socket] = {}
        prefix = self.host.rpartition(".")[0]
        server = socket.create_server((self.host, 5000))
        for other in range(self.rank):
            self._links[other] = _dial(f"{prefix}.{other + 1}")
            self._links[other].sendall(struct.pack("i", self.rank))
        for _ in range(self.rank + 1, self.size):
            link, _ = server.accept()
            self._links[struct.unpack("i", link.recv(4, socket.MSG_WAITALL))[0]] = link

    def reduce(self, index: int) -> None:
        slices = list(self._tensor.chunk(self.size))
        parts = {rank: torch.empty_like(slices[self.rank]) for rank in self._links}
        self._exchange(slices, parts)
        mean = slices[self.rank]
        for rank in sorted(parts):
            mean += parts[rank]
        mean /= self.size
        result = {rank: slices[rank] for rank in self._links}
        self._exchange([mean] * self.size, result)
        # The chunks are views: the mean is where the input was.

    def _exchange(self, outgoing: list[Tensor], incoming: dict[int, Tensor]) -> None:
        senders = [
            threading.Thread(target=link.sendall, args=(memoryview(outgoing[rank].numpy()).cast("B"),))
            for rank, link in self._links.items()
        ]
        receivers = [
            threading.Thread(target=_receive, args=(link, incoming[rank])) for rank, link in self._links.items()
        ]
        for thread in senders + receivers:
            thread.start()
        for thread in senders + receivers:
            thread.join()


def _dial(host: str) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((host, 5000))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _receive(link: socket.socket, into: Tensor) -> None:
    view = memoryview(into.numpy()).cast("B")
    while view:
        count = link.recv_into(view)
        if not count:
            raise ConnectionError("closed early")
        view = view[count:]


ENGINES: dict[str, Callable[..., Any]] = {
    "swarm": Swarm,
    "libp2p": SwarmOverLibp2p,
    "hivemind": Hivemind,
    "torch": Torch,
    "tcp": Tcp,
}


def _values(megabytes: float) -> Tensor:
    return torch.arange(int(megabytes * (1 << 18)), dtype=torch.float32) % 1000


def obey(engine: Any, name: str, *arguments: Any) -> Any:
    """Do what the benchmark says."""
    if name == "begin":
        return engine.begin()
    if name == "connect":
        return engine.connect(*arguments)
    if name == "load":
        megabytes, index = arguments
        # Different at each peer and in each round, so that a mean of anything else shows.
        return engine.load(_values(megabytes) + (engine.rank + index))
    if name == "round":
        started = time.monotonic()
        engine.reduce(*arguments)
        return [started, time.monotonic()]
    megabytes, index = arguments
    return (engine.result() - (_values(megabytes) + ((engine.size - 1) / 2 + index))).abs().max().item()


def main() -> None:
    """Obey until stdin closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=list(ENGINES), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--timeout", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = ENGINES[options.engine](options.rank, options.size, options.host, options.timeout)
    for line in sys.stdin:
        answer = obey(engine, *json.loads(line))
        print(json.dumps(answer), file=answers, flush=True)
    # Helper processes of hivemind would keep it from ending; the benchmark kills what is left.
    os._exit(0)


if __name__ == "__main__":
    main()
