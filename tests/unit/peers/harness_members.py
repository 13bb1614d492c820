"""Members of a group under test: worker processes (or threads) that run scenario functions on command."""

import itertools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from swarmkit.optim.collective import Collective


class MemberDied(Exception):
    """The worker that ran a scenario is gone."""


@dataclass
class Member:
    """What a scenario sees of the member that it runs in."""

    collective: Collective
    rank: int
    size: int
    die: Callable[[], None]  # kill -9 of this member, or what comes closest


Scenario = Callable[..., Any]  # (member, *args) -> something plain


class Group(Protocol):
    """Some members of one swarm, numbered from 0."""

    size: int
    peer_ids: list[str]
    broken: bool  # not to be used by another test

    def start(self, scenario: Scenario, *args: Any, ranks: Sequence[int] | None = None) -> list[Future[Any]]: ...

    def kill(self, rank: int) -> None: ...

    def freeze(self, rank: int) -> None: ...

    def close(self) -> None: ...


def run(group: Group, scenario: Scenario, *args: Any, ranks: Sequence[int] | None = None, timeout: float = 60) -> list:
    """Run a scenario in members and wait for what they return."""
    futures = group.start(scenario, *args, ranks=ranks)
    deadline = time.monotonic() + timeout
    return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]


# -- worker processes ------------------------------------------------------------------------------------------------

_CONTEXT = multiprocessing.get_context("forkserver")
# Workers are forked from a process that has these already: 20 ms instead of 3 s each.
_CONTEXT.set_forkserver_preload(["swarmkit.peers.distributed", "swarmkit.peers.node"])


class Worker:
    """A process that runs one function after the other, in a thread here that waits for it."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._ours, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `function(state, *args)` in the worker; `state` is a dict that lasts as long as the worker."""
        future: Future[Any] = Future()
        threading.Thread(target=self._call, args=(future, function, args), daemon=True).start()
        return future

    def _call(self, future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        with self._lock:
            try:
                self._ours.send((function, args))
                ok, value = self._ours.recv()
            except (OSError, EOFError):
                future.set_exception(MemberDied(f"worker {self.pid} died in {function.__name__}"))
                return
        if ok:
            future.set_result(value)
        else:
            future.set_exception(AssertionError(f"in worker {self.pid}:\n{value}"))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker, and to it only."""
        os.kill(self.pid, number)

    def close(self) -> None:
        """Kill the worker."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(10)


def _serve(connection: Connection) -> None:
    import torch

    from swarmkit.peers.hygiene import die_with_parent

    die_with_parent()
    torch.set_num_threads(1)
    state: dict[str, Any] = {}
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(state, *args))
        except BaseException:  # noqa: BLE001 the test shall see it
            answer = (False, traceback.format_exc())
        connection.send(answer)


class Pool:
    """Workers that outlive a test; the dead are replaced."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def take(self, count: int) -> list[Worker]:
        """The first `count` workers."""
        while len(self._workers) < count:
            self._workers.append(Worker())
        return self._workers[:count]

    def discard(self, worker: Worker) -> None:
        """Kill a worker and forget it."""
        worker.close()
        if worker in self._workers:
            self._workers.remove(worker)

    def close(self) -> None:
        """Kill all workers."""
        for worker in list(self._workers):
            self.discard(worker)


# -- groups of worker processes --------------------------------------------------------------------------------------

_NAMES = itertools.count()


class Kind(Protocol):
    """How a member of one implementation is made and ended, in its worker. Pickled by name: module-level functions."""

    @staticmethod
    def begin(state: dict, name: str, size: int) -> Any:
        """Run in the first member before all others; returns what these need to find it."""

    @staticmethod
    def complete(state: dict, name: str, rank: int, size: int, found: Any) -> Collective:
        """Run in all members at once."""

    @staticmethod
    def end(state: dict, name: str, collective: Collective) -> None:
        """Run in all members that still live."""


class ProcessGroup:
    """A group whose members live in the workers of a pool."""

    def __init__(self, pool: Pool, size: int, kind: type[Kind]) -> None:
        self.size = size
        self.broken = False
        self._pool = pool
        self._kind = kind
        self._workers = list(pool.take(size))
        self._name = f"contract-{os.getpid()}-{next(_NAMES)}"
        self._lost: set[int] = set()
        found = self._workers[0].call(_begin, self._name, kind, size).result(60)
        futures = [
            worker.call(_complete, self._name, kind, rank, size, found) for rank, worker in enumerate(self._workers)
        ]
        self.peer_ids: list[str] = [future.result(60) for future in futures]

    def start(self, scenario: Scenario, *args: Any, ranks: Sequence[int] | None = None) -> list[Future[Any]]:
        ranks = range(self.size) if ranks is None else ranks
        futures = {rank: self._workers[rank].call(_run, self._name, scenario, args) for rank in ranks}
        for rank, future in futures.items():
            future.add_done_callback(lambda done, rank=rank: self._note_death(done, rank))
        return list(futures.values())

    def _note_death(self, done: Future[Any], rank: int) -> None:
        if isinstance(done.exception(), MemberDied):
            self.lose(rank)

    def kill(self, rank: int) -> None:
        self._workers[rank].signal(signal.SIGKILL)
        self.lose(rank)

    def freeze(self, rank: int) -> None:
        self._workers[rank].signal(signal.SIGSTOP)
        self.lose(rank)

    def lose(self, rank: int) -> None:
        """Note that a member is of no use any more."""
        self.broken = True
        self._lost.add(rank)

    def close(self) -> None:
        for rank in self._lost:
            self._pool.discard(self._workers[rank])
        alive = [worker for rank, worker in enumerate(self._workers) if rank not in self._lost]
        futures = [worker.call(_end, self._name, self._kind) for worker in alive]
        for worker, future in zip(alive, futures, strict=True):
            try:
                future.result(30)
            except (MemberDied, TimeoutError):
                self._pool.discard(worker)


def _begin(state: dict, name: str, kind: type[Kind], size: int) -> Any:
    return kind.begin(state, name, size)


def _complete(state: dict, name: str, kind: type[Kind], rank: int, size: int, found: Any) -> str:
    collective = kind.complete(state, name, rank, size, found)
    state[name] = Member(collective, rank, size, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return collective.peer_id


def _run(state: dict, name: str, scenario: Scenario, args: tuple[Any, ...]) -> Any:
    return scenario(state[name], *args)


def _end(state: dict, name: str, kind: type[Kind]) -> None:
    kind.end(state, name, state.pop(name).collective)
