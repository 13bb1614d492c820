"""Seconds per optimizer step of every strategy, rounds included, against torch's AdamW(foreach=True) in the same run.

python -m tests.bench.optimizers [--sizes 10 100] [--json FILE]

One peer, so that a round costs what the strategy itself does and no network.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from swarmkit.optim import CO2, AllReduce, DeMo, DiLoCo, Every, LocalSGD
from swarmkit.peers.local import LocalSwarm
from tests.bench import aims

WINDOWED = ("local_sgd", "diloco", "eager", "streaming", "co2")
MOST = 1.5  # times AdamW, for these: the others have a round in every step
H = 10  # inner steps between two rounds, of those that have windows


def parameters(millions: float) -> list[torch.nn.Parameter]:
    """Matrices of a transformer's shapes, with gradients: so many million values."""
    width = 320 if millions < 50 else 768
    layers = max(1, round(millions * 1e6 / (12 * width**2)))
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,), (width,)] * layers
    found = [torch.nn.Parameter(torch.randn(shape) / width**0.5) for shape in shapes]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def adamw(millions: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters(millions), lr=1e-4, foreach=True)


def alone() -> Any:
    return LocalSwarm(1).collectives[0]


MAKE: dict[str, Callable[[float], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "allreduce": lambda size: AllReduce(adamw(size), collective=alone()),
    "local_sgd": lambda size: LocalSGD(adamw(size), collective=alone(), sync=Every(H)),
    "diloco": lambda size: DiLoCo(adamw(size), collective=alone(), sync=Every(H)),
    "eager": lambda size: DiLoCo(adamw(size), collective=alone(), sync=Every(H), eager=True),
    "streaming": lambda size: DiLoCo(adamw(size), collective=alone(), sync=Every(H), fragments=5, overlap_steps=1),
    "co2": lambda size: CO2(adamw(size), collective=alone(), sync=Every(H)),
    "demo": lambda size: DeMo(torch.optim.SGD(parameters(size), lr=1e-3), collective=alone()),
}


class Timed:
    """An optimizer, and how long its windows of H steps take."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.pairs = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]

    def window(self) -> float:
        """Seconds per step."""
        spent = 0.0
        for _ in range(H):
            # Some strategies replace gradients by their mean.
            for parameter, gradient in self.pairs:
                parameter.grad = gradient
            started = time.perf_counter()
            self.optimizer.step()
            spent += time.perf_counter() - started
        return spent / H


def compare(method: str, millions: float, windows: int) -> tuple[float, float]:
    """Seconds per step and the ratio to AdamW: medians over windows that take turns, the first left out."""
    base, other = Timed(adamw(millions)), Timed(MAKE[method](millions))
    pairs = [(base.window(), other.window()) for _ in range(1 + windows)][1:]
    return statistics.median(b for _, b in pairs), statistics.median(b / a for a, b in pairs)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=float, default=[10.0, 100.0], help="millions of parameters")
    parser.add_argument("--methods", nargs="+", choices=MAKE, default=list(MAKE))
    parser.add_argument("--windows", type=int, default=5)
    aims.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, missed = [], []
    print(f"{'strategy':<12}{'M':>6}{'ms/step':>10}{'times AdamW':>13}")
    for size in options.sizes:
        for method in options.methods:
            spent, ratio = compare(method, size, options.windows)
            rows.append({"method": method, "millions": size, "ms": 1e3 * spent, "ratio": ratio})
            if method in WINDOWED:
                missed += aims.at_most(f"{method}, {size:g} M, times AdamW", ratio, MOST)
            print(f"{method:<12}{size:>6g}{1e3 * spent:>10.1f}{ratio:>13.2f}", flush=True)
    aims.conclude(missed, rows, options)


if __name__ == "__main__":
    main()
