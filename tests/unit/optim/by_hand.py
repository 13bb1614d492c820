"""Overlapping algorithms written down once more, plainly and from their papers, for vectors in float64."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.unit.optim.replicas import Gradient

Path = list[list[Tensor]]  # of every replica, the parameters after every step


def inner(x: Tensor, rank: int, step: int, gradient: Gradient, lr: float) -> Tensor:
    return x - lr * gradient(rank, step, x)


@dataclass
class Nesterov:
    """torch.optim.SGD with momentum, as an outer optimizer."""

    x: Tensor
    lr: float
    mu: float
    look_ahead: bool = True
    v: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.v = torch.zeros_like(self.x)

    def step(self, g: Tensor) -> Tensor:
        self.v = self.mu * self.v + g
        self.x = self.x - self.lr * (g + self.mu * self.v if self.look_ahead else self.v)
        return self.x


def eager(
    gradient: Gradient,
    start: Tensor,
    *,
    weights: list[float],
    h: int,
    rounds: int,
    lr: float,
    mu: float,
    outer_lr: float,
    look_ahead: bool = True,
) -> Path:
    """Alg. 3 of 2502.12996: every replica has an outer optimizer of its own, fed the stale mean with its own part
    replaced by the fresh one; in the first round the stale ones are 0."""
    shares = [weight / sum(weights) for weight in weights]
    outers = [Nesterov(start, outer_lr, mu, look_ahead) for _ in weights]
    paths: Path = [[start] for _ in weights]
    stale = [torch.zeros_like(start) for _ in weights]
    for index in range(rounds):
        fresh = []
        for rank, outer in enumerate(outers):
            x = outer.x
            for step in range(index * h, (index + 1) * h):
                x = inner(x, rank, step, gradient, lr)
                paths[rank].append(x)
            fresh.append(outer.x - x)
        mean = sum((s * d for s, d in zip(shares, stale, strict=True)), torch.zeros_like(start))
        for rank, outer in enumerate(outers):
            paths[rank][-1] = outer.step(mean + shares[rank] * (fresh[rank] - stale[rank]))
        stale = fresh
    return paths


def delayed(
    gradient: Gradient,
    start: Tensor,
    *,
    replicas: int,
    h: int,
    rounds: int,
    lr: float,
    outer: Callable[[Tensor], Tensor],
) -> Path:
    """Alg. 2 of 2502.12996, and CO2: `outer` turns the mean of one round ago into where all go on from."""
    paths: Path = [[start] for _ in range(replicas)]
    stale: Tensor | None = None
    shared = start
    for index in range(rounds):
        progress = []
        for rank in range(replicas):
            x = shared
            for step in range(index * h, (index + 1) * h):
                x = inner(x, rank, step, gradient, lr)
                paths[rank].append(x)
            progress.append(shared - x)
        if stale is not None:
            shared = outer(stale)
        for path in paths:
            path[-1] = shared
        stale = torch.stack(progress).mean(0)
    return paths


def streaming(
    gradient: Gradient,
    start: Tensor,
    *,
    replicas: int,
    fragments: list[list[int]],
    h: int,
    steps: int,
    lr: float,
    mu: float,
    outer_lr: float,
    overlap: int,
    mixing: float,
) -> tuple[Path, Tensor]:
    """Alg. 2 of 2501.18512 for vectors of which a fragment is some entries; returns the outer parameters as well."""
    offsets = [p * h // len(fragments) for p in range(len(fragments))]
    outers = [Nesterov(start[part].clone(), outer_lr, mu) for part in fragments]
    xs = [start.clone() for _ in range(replicas)]
    sent: dict[int, Tensor] = {}
    paths: Path = [[x.clone()] for x in xs]
    for t in range(1, steps + 1):
        xs = [inner(x, rank, t - 1, gradient, lr) for rank, x in enumerate(xs)]
        for late in (overlap, 0):  # what is under way lands before the next round begins
            for p, part in enumerate(fragments):
                since = t - offsets[p] - late
                if since < h or since % h:
                    continue
                if late == 0:
                    sent[p] = torch.stack([outers[p].x - x[part] for x in xs]).mean(0)
                if late == overlap:
                    new = outers[p].step(sent.pop(p))
                    for x in xs:
                        x[part] = mixing * x[part] + (1 - mixing) * new
            if overlap == 0:
                break
        for path, x in zip(paths, xs, strict=True):
            path.append(x.clone())
    outer = start.clone()
    for part, found in zip(fragments, outers, strict=True):
        outer[part] = found.x
    return paths, outer
