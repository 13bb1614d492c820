"""The implementations that the contract suite runs against, and what each of them promises beyond the least."""

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from swarmkit.optim.collective import Collective

from .harness_members import Group, Kind, Member, MemberDied, Pool, ProcessGroup, Scenario


@dataclass
class Harness:
    """Makes groups of one implementation, keeps them between tests, and says what it promises."""

    name: str
    make: Callable[[int], Group]
    round_timeout: float
    shrinks: bool  # who survives a death gets a result without the dead; otherwise RoundFailed
    knows_missed: bool  # who comes after the round has closed hears `missed`; otherwise it is waited for
    majority_rules: bool  # of three schemas, two that agree go on; otherwise all fail
    one_at_a_time: bool = False  # a worker can be in one group only
    end: Callable[[], None] = lambda: None
    _groups: dict[int, Group] = field(default_factory=dict)
    _rounds: dict[str, int] = field(default_factory=dict)

    def group(self, size: int) -> Group:
        """A group that works; the same one as last time if possible."""
        for other, group in list(self._groups.items()):
            if group.broken or (self.one_at_a_time and other != size):
                self._groups.pop(other).close()
        if size not in self._groups:
            self._groups[size] = self.make(size)
        return self._groups[size]

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        self.end()


# -- LocalSwarm: threads ---------------------------------------------------------------------------------------------


class ThreadGroup:
    """A LocalSwarm, one thread for each scenario."""

    def __init__(self, size: int, round_timeout: float) -> None:
        from swarmkit.peers.local import LocalSwarm

        self.size = size
        self.broken = False
        self._swarm = LocalSwarm(size, round_timeout=round_timeout)
        self.peer_ids = [collective.peer_id for collective in self._swarm.collectives]

    def start(self, scenario: Scenario, *args: Any, ranks: Sequence[int] | None = None) -> list[Future[Any]]:
        futures = []
        for rank in range(self.size) if ranks is None else ranks:
            future: Future[Any] = Future()
            threading.Thread(target=self._run, args=(future, rank, scenario, args), daemon=True).start()
            futures.append(future)
        return futures

    def _run(self, future: Future[Any], rank: int, scenario: Scenario, args: tuple[Any, ...]) -> None:
        def die() -> None:
            self.kill(rank)
            raise MemberDied

        try:
            future.set_result(scenario(Member(self._swarm.collectives[rank], rank, self.size, die), *args))
        except BaseException as error:  # noqa: BLE001 the test shall see it
            future.set_exception(error)

    def kill(self, rank: int) -> None:
        self.broken = True
        self._swarm.kill(self.peer_ids[rank])

    def freeze(self, rank: int) -> None:
        pytest.skip("a thread can't be frozen from outside")

    def close(self) -> None:
        for collective in self._swarm.collectives:
            collective.close()


def local_harness() -> Harness:
    pytest.importorskip("swarmkit.peers.local")
    return Harness(
        name="local",
        make=lambda size: ThreadGroup(size, 3.0),
        round_timeout=3.0,
        shrinks=True,
        knows_missed=True,
        majority_rules=False,
    )


# -- TorchCollective: gloo -------------------------------------------------------------------------------------------

TORCH_TIMEOUT = 3.0


class TorchKind(Kind):
    """Ranks of a torch.distributed group that meet in a file."""

    @staticmethod
    def begin(state: dict, name: str, size: int) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"swarmkit-{os.getpid()}-")) / "store"

    @staticmethod
    def complete(state: dict, name: str, rank: int, size: int, found: Path) -> Collective:
        import torch.distributed as dist

        from swarmkit.peers.distributed import TorchCollective

        dist.init_process_group(
            "gloo", store=dist.FileStore(str(found), size), rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
        return TorchCollective(timeout=TORCH_TIMEOUT)

    @staticmethod
    def end(state: dict, name: str, collective: Collective) -> None:
        import torch.distributed as dist

        collective.close()
        dist.destroy_process_group()


def torch_harness() -> Harness:
    pool = Pool()
    return Harness(
        name="torch",
        make=lambda size: ProcessGroup(pool, size, TorchKind),
        round_timeout=TORCH_TIMEOUT,
        shrinks=False,
        knows_missed=False,
        majority_rules=False,
        one_at_a_time=True,
        end=pool.close,
    )


# -- SwarmCollective: a DHT and p2pd processes on loopback -----------------------------------------------------------

SWARM_TIMEOUT = 5.0


class SwarmKind(Kind):
    """Nodes that find each other on a DHT."""

    @staticmethod
    def begin(state: dict, name: str, size: int) -> list[str]:
        return SwarmKind._start(state, name, []).addresses

    @staticmethod
    def complete(state: dict, name: str, rank: int, size: int, found: list[str]) -> Collective:
        node = state[name, "node"] if rank == 0 else SwarmKind._start(state, name, found)
        node.announce("training")
        assert node.wait_for_peers(size, timeout=30)
        return node.collective(round_timeout=SWARM_TIMEOUT)

    @staticmethod
    def end(state: dict, name: str, collective: Collective) -> None:
        collective.close()
        state.pop((name, "node")).close()

    @staticmethod
    def _start(state: dict, name: str, initial_peers: list[str]) -> Any:
        from swarmkit.peers.node import Node
        from swarmkit.peers.settings import NetworkSettings

        settings = NetworkSettings(heartbeat_s=0.5, silence_s=2.0, stall_s=2.0, round_timeout_s=SWARM_TIMEOUT)
        state[name, "node"] = Node.start(name, initial_peers=initial_peers, settings=settings)
        return state[name, "node"]


def swarm_harness() -> Harness:
    pytest.importorskip("swarmkit.peers.node")
    pool = Pool()
    return Harness(
        name="swarm",
        make=lambda size: ProcessGroup(pool, size, SwarmKind),
        round_timeout=SWARM_TIMEOUT,
        shrinks=True,
        knows_missed=True,
        majority_rules=True,
        end=pool.close,
    )


HARNESSES: dict[str, Callable[[], Harness]] = {
    "local": local_harness,
    "torch": torch_harness,
    "swarm": swarm_harness,
}
