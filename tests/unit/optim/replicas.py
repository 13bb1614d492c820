"""Small replicas for the tests of strategies: a vector with given gradients, and a network on data of its own."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim import AllReduce, Collective, DiLoCo, Every, LocalSGD, RoundFailed, SyncedOptimizer
from swarmkit.peers.local import LocalCollective, LocalSwarm

Make = Callable[[list[Tensor], Collective], SyncedOptimizer]
Gradient = Callable[[int, int, Tensor], Tensor]  # rank, completed steps, parameters


class Faulty:
    """A collective whose rounds of the given indices fail."""

    def __init__(self, collective: LocalCollective, failing: set[int], missed: bool = False) -> None:
        self.peer_id = collective.peer_id
        self._collective = collective
        self._failing = failing
        self._missed = missed

    def all_reduce(self, tensors: Any, *, round: Any, weight: float) -> Any:
        if round.index not in self._failing:
            return self._collective.all_reduce(tensors, round=round, weight=weight)
        future: Future[Any] = Future()
        future.set_exception(RoundFailed("the line was cut", missed=self._missed))
        return future

    def all_gather(self, payload: Any, *, round: Any, weight: float) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self._collective.close()


def sgd(parameters: list[Tensor], lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def adamw(parameters: list[Tensor], lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


def all_reduce(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
    return AllReduce(adamw(parameters), collective=collective)


def local_sgd(parameters: list[Tensor], collective: Collective, h: int = 4) -> SyncedOptimizer:
    return LocalSGD(adamw(parameters), collective=collective, sync=Every(h))


def diloco(parameters: list[Tensor], collective: Collective, h: int = 4) -> SyncedOptimizer:
    return DiLoCo(adamw(parameters), collective=collective, sync=Every(h))


STRATEGIES: dict[str, Make] = {"AllReduce": all_reduce, "LocalSGD": local_sgd, "DiLoCo": diloco}


@dataclass(frozen=True)
class Quadratics:
    """One loss a replica, 0.5 (x - c)' A (x - c): one Hessian, minima of their own, and noise in every step."""

    hessian: Tensor
    minima: Tensor
    noise: Tensor  # rank, step, dimension

    @classmethod
    def of(cls, replicas: int, steps: int = 64, dimension: int = 5, seed: int = 0, noise: float = 0.3) -> "Quadratics":
        generator = torch.Generator().manual_seed(seed)
        normal = partial(torch.randn, generator=generator, dtype=torch.float64)
        root = normal(dimension, dimension)
        hessian = root @ root.T / dimension + 0.1 * torch.eye(dimension, dtype=torch.float64)
        return cls(hessian, normal(replicas, dimension), noise * normal(replicas, steps, dimension))

    def __call__(self, rank: int, step: int, x: Tensor) -> Tensor:
        return self.hessian @ (x - self.minima[rank]) + self.noise[rank, step]


def trajectories(
    make: Make, gradient: Gradient, *, replicas: int, steps: int, start: Tensor, samples: list[float] | None = None
) -> list[list[Tensor]]:
    """Parameters of every replica after every step; the first entry is the start."""

    def task(collective: LocalCollective, rank: int) -> list[Tensor]:
        x = torch.nn.Parameter(start.clone())
        optimizer = make([x], collective)
        path = [x.detach().clone()]
        for step in range(steps):
            x.grad = gradient(rank, step, x.detach())
            if samples is not None:
                optimizer.samples += samples[rank]
            optimizer.step()
            path.append(x.detach().clone())
        return path

    return LocalSwarm(replicas).run(task)


class Net(torch.nn.Module):
    """A small network, equal on all replicas for one seed."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x)))
        return found


TEACHER_SEED = 99


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32, size: int = 16) -> tuple[Tensor, Tensor]:
    """Inputs and a teacher's answers; the inputs of every rank and step are others."""
    generator = torch.Generator().manual_seed(1000 * rank + step + 7)
    x = torch.randn(size, 6, generator=generator)
    with torch.no_grad():
        return x.to(dtype), (2 * Net(TEACHER_SEED)(x)).to(dtype)


def loss_of(net: Net, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step, net.first.weight.dtype)
    return ((net(x) - y) ** 2).mean()


def train(net: Net, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """Ordinary training: zero, forward, backward, step."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()


def trained(
    make: Make, *, replicas: int, steps: int, dtype: torch.dtype = torch.float32
) -> list[tuple[Net, SyncedOptimizer]]:
    """Networks and optimizers of a whole swarm after training."""

    def task(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer]:
        net = Net(dtype=dtype)
        optimizer = make(list(net.parameters()), collective)
        train(net, optimizer, rank, range(steps))
        return net, optimizer

    return LocalSwarm(replicas).run(task)


def held_out_loss(net: Net) -> float:
    """Loss on data that no replica trained on."""
    with torch.no_grad():
        return float(torch.stack([loss_of(net, 50, step) for step in range(8)]).mean())


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))
