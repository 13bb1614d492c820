"""Compute utilisation when a round takes as long as a window of training: the share of real time in forward, backward
and inner step, with everything else that a strategy does (outer step, encoding, copies) in the rest.

python -m tests.bench overlap
"""

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

from swarmkit.optim import CO2, DiLoCo, Every, Gathered, Reduced, RoundKey, SyncedOptimizer, make_codec
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.bench import aims
from tests.bench.step_overhead import seconds

BLOCKING = 0.6  # at most
OVERLAPPED = {"eager": 0.95, "CO2": 0.95, "eager, int4": 0.9}  # at least; the last encodes while training stands still


class Slow:
    """A collective whose results come `seconds` after their round began."""

    def __init__(self, collective: LocalCollective, seconds: float) -> None:
        self.peer_id = collective.peer_id
        self._collective, self._seconds = collective, seconds

    def all_reduce(self, tensors: Sequence[Tensor], *, round: RoundKey, weight: float, **more: Any) -> Future[Reduced]:
        return self._late(self._collective.all_reduce(tensors, round=round, weight=weight, **more))

    def all_gather(self, payload: Sequence[Tensor], *, round: RoundKey, weight: float) -> Future[Gathered]:
        return self._late(self._collective.all_gather(payload, round=round, weight=weight))

    def _late(self, inner: Future[Any]) -> Future[Any]:
        late: Future[Any] = Future()
        timer = threading.Timer(self._seconds, lambda: late.set_result(inner.result()))
        timer.daemon = True
        timer.start()
        return late

    def close(self) -> None:
        self._collective.close()


class Trainee:
    """A network that is trained on noise; it counts the time in forward, backward and inner step."""

    def __init__(self, layers: int, width: int, batch: int) -> None:
        torch.manual_seed(0)
        blocks = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.GELU())]
        self.net = nn.Sequential(*blocks)
        self.inputs = torch.randn(batch, width)
        self.inner = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        self.busy = 0.0
        self._step = self.inner.step
        self.inner.step = self._timed_step  # type: ignore[method-assign]

    def _timed_step(self, closure: Any = None) -> Any:
        started = time.perf_counter()
        result = self._step(closure)
        self.busy += time.perf_counter() - started
        return result

    def forward_backward(self) -> None:
        started = time.perf_counter()
        (self.net(self.inputs) - self.inputs).square().mean().backward()
        self.busy += time.perf_counter() - started

    def train(self, optimizer: torch.optim.Optimizer, steps: int) -> float:
        """Utilisation over so many steps."""
        self.busy, started = 0.0, time.perf_counter()
        for _ in range(steps):
            self.forward_backward()
            optimizer.step()
            optimizer.zero_grad()
        return self.busy / (time.perf_counter() - started)


Make = Callable[[Trainee, Any, int], SyncedOptimizer]


def blocking(trainee: Trainee, collective: Any, h: int) -> SyncedOptimizer:
    return DiLoCo(trainee.inner, collective=collective, sync=Every(h))


def eager(trainee: Trainee, collective: Any, h: int) -> SyncedOptimizer:
    return DiLoCo(trainee.inner, collective=collective, sync=Every(h), eager=True)


def eager_int4(trainee: Trainee, collective: Any, h: int) -> SyncedOptimizer:
    return DiLoCo(
        trainee.inner, collective=collective, sync=Every(h), eager=True, compression=make_codec("int4", block=256)
    )


def co2(trainee: Trainee, collective: Any, h: int) -> SyncedOptimizer:
    return CO2(trainee.inner, collective=collective, sync=Every(h))


METHODS: dict[str, Make] = {"blocking": blocking, "eager": eager, "eager, int4": eager_int4, "CO2": co2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--h", type=int, default=25, help="inner steps in a window")
    parser.add_argument("--windows", type=int, default=6)
    aims.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, missed = {}, []
    for name, make in METHODS.items():
        trainee = Trainee(options.layers, options.width, options.batch)
        trainee.train(trainee.inner, 3)
        window = min(seconds(lambda trainee=trainee: trainee.train(trainee.inner, options.h)) for _ in range(3))
        optimizer = make(trainee, Slow(LocalSwarm(1).collectives[0], window), options.h)
        # The first round of an overlapped strategy has nothing to hide behind: it is told apart.
        trainee.train(optimizer, 2 * options.h)
        found[name] = round(trainee.train(optimizer, options.windows * options.h), 4)
        print(f"{name:<14}{100 * found[name]:6.1f} %   window {window:.2f} s", flush=True)
        if name == "blocking":
            missed += aims.at_most("blocking, utilisation", found[name], BLOCKING)
        else:
            missed += aims.at_least(f"{name}, utilisation", found[name], OVERLAPPED[name])
    aims.conclude(missed, found, options)


if __name__ == "__main__":
    main()
