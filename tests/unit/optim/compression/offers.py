"""What the tests of CompressedAveraging offer, and a collective that keeps what it was offered."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim.collective import Collective, Gathered, Reduced, RoundKey
from swarmkit.optim.compression import CODECS, CompressedAveraging, make_codec
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.shards import Wire

FED = tuple(name for name in CODECS if name != "ternary")  # what they leave out may be fed back
SHAPES: list[tuple[int, ...]] = [(24, 20), (30,), (6, 5, 3, 3), ()]


def contribution(rank: int, index: int = 0, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def exact_ones(rank: int) -> list[Tensor]:
    return [torch.full((3,), 1.0 + rank, dtype=torch.float64), torch.full((2, 2), 0.1 * rank)]


def averaging_of(name: str, collective: Collective, **options: Any) -> CompressedAveraging:
    parameters: dict[str, Any] = {}
    if name == "randomk":
        parameters = {"unbiased": not options.get("error_feedback", False)}
    return CompressedAveraging(make_codec(name, min_size=64, **parameters), collective, **options)


def weighted(parts: list[list[Tensor]], weights: list[float]) -> list[Tensor]:
    return [
        torch.stack([w * t.double() for w, t in zip(weights, tensors, strict=True)]).sum(0) / sum(weights)
        for tensors in zip(*parts, strict=True)
    ]


@dataclass
class Recorder:
    """A collective that keeps what goes through it, and may change or break it."""

    inner: Collective
    sent: list[list[Tensor]] = field(default_factory=list)
    keys: list[RoundKey] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    fail: list[RoundFailed] = field(default_factory=list)  # of the next calls
    hold: bool = False  # keep the next futures open

    @property
    def peer_id(self) -> str:
        return self.inner.peer_id

    def _call(self, operation: str, tensors: Any, round: RoundKey, weight: float, **wire: Any) -> Future[Any]:
        self.operations.append("sharded" if wire else operation)
        self.sent.append([tensor.clone() for tensor in tensors])
        self.keys.append(round)
        if self.fail or self.hold:
            future: Future[Any] = Future()
            if self.fail:
                future.set_exception(self.fail.pop(0))
            return future
        return getattr(self.inner, operation)(tensors, round=round, weight=weight, **wire)

    def all_reduce(self, tensors: Any, *, round: RoundKey, weight: float, wire: Wire | None = None) -> Future[Reduced]:
        return self._call("all_reduce", tensors, round, weight, **({} if wire is None else {"wire": wire}))

    def all_gather(self, payload: Any, *, round: RoundKey, weight: float) -> Future[Gathered]:
        return self._call("all_gather", payload, round, weight)

    def close(self) -> None:
        self.inner.close()
