"""Every strategy and every codec at a size that suits a small network, for tests of all pairs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim import CO2, AllReduce, Averaging, Collective, DeMo, DiLoCo, Every, LocalSGD, SyncedOptimizer
from swarmkit.optim.compression import CODECS, CompressedAveraging, LGreCo, Route, make_codec
from tests.unit.optim.replicas import Net, adamw, sgd


def descend(net: Net, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """Train on a quadratic whose minimum is elsewhere for every rank and step; no graph, so that it takes no time."""
    parameters = list(net.parameters())
    for step in steps:
        generator = torch.Generator().manual_seed(100 * rank + step)
        for parameter in parameters:
            parameter.grad = parameter.detach() - torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@dataclass(frozen=True)
class Strategy:
    """A strategy, and after how many steps its state is most telling: in flight, with a table of L-GreCo's."""

    kind: Callable[..., SyncedOptimizer]
    options: dict[str, Any] = field(default_factory=dict)
    windows: bool = True
    flies: bool = False
    h: int = 2
    stop: int = 7
    steps: int = 10

    @property
    def fragments(self) -> int:
        """In how many parts the model meets."""
        found: int = self.options.get("fragments", 1)
        return found

    def __call__(
        self, parameters: list[Tensor], collective: Collective, codec: "Coded | None" = None, **more: Any
    ) -> SyncedOptimizer:
        """Wrap an AdamW over the parameters, or for DeMo an SGD."""
        inner = sgd(parameters) if self.kind is DeMo else adamw(parameters)
        options = {**self.options, **({"sync": Every(self.h)} if self.windows else {}), **more}
        if codec is not None and self.fragments > 1:
            options["averaging_for"] = lambda number: codec(collective, self.fragments, number)
        elif codec is not None:
            options["averaging"] = codec(collective)
        return self.kind(inner, collective=collective, **options)


STRATEGIES: dict[str, Strategy] = {
    "AllReduce": Strategy(AllReduce, windows=False, stop=5, steps=8),
    "LocalSGD": Strategy(LocalSGD),
    "DiLoCo": Strategy(DiLoCo),
    "DiLoCo eager": Strategy(DiLoCo, {"eager": True, "outer_momentum": 0.9}, flies=True),
    "DiLoCo delayed": Strategy(DiLoCo, {"eager": "delayed", "outer_momentum": 0.9}, flies=True),
    "DiLoCo streaming": Strategy(
        DiLoCo, {"fragments": 2, "overlap_steps": 3, "mixing": 0.25}, flies=True, h=4, stop=14, steps=18
    ),
    "CO2 with penalty": Strategy(CO2, {"penalty": "gap", "keep_local": False}, flies=True),
    "CO2 that keeps": Strategy(CO2, {"keep_local": True}, flies=True),
}
DEMO = Strategy(DeMo, {"sync": Every(2), "k": 16, "chunk": 8, "beta": 0.9}, windows=False, stop=5, steps=9)


@dataclass(frozen=True)
class Coded:
    """A codec with what goes around it."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    feedback: bool = True
    route: Route | None = None
    adaptive: bool = False

    def __call__(self, collective: Collective, fragments: int = 1, number: int = 0) -> Averaging:
        """An averaging of a fragment."""
        codec = make_codec(self.name, **{"min_size": 8, **self.settings})
        found = CompressedAveraging(codec, collective, error_feedback=self.feedback, generator=number, route=self.route)
        return LGreCo(found, period=2, window=1, stride=fragments) if self.adaptive else found


_SMALL: dict[str, dict[str, Any]] = {
    "int8": {"block": 8},
    "int4": {"block": 8},
    "fp4": {"block": 8},
    "qsgd": {"bucket": 8},
    "topk": {"density": 0.2},
    "randomk": {"density": 0.2, "unbiased": False},
    "powersgd": {"rank": 2},
}
GATHERED = ("int8", "int4", "fp4", "qsgd", "ternary", "topk")
WITH_PARAMETER = ("qsgd", "topk", "randomk", "powersgd")
UNFED = ("ternary",)  # their noise fed back grows without end


def _coded(name: str, **options: Any) -> Coded:
    return Coded(name, _SMALL.get(name, {}), feedback=name not in UNFED, **options)


PAYLOADS: dict[str, Coded | None] = {"none": None} | {name: _coded(name) for name in CODECS}
PAYLOADS |= {f"{name} sharded": _coded(name, route=Route.sharded) for name in GATHERED}
PAYLOADS |= {f"{name} adaptive": _coded(name, adaptive=True) for name in WITH_PARAMETER}
PAYLOADS |= {f"{name} adaptive sharded": _coded(name, route=Route.sharded, adaptive=True) for name in ("qsgd", "topk")}
PAYLOADS["randomk unbiased"] = Coded("randomk", {"density": 0.2}, feedback=False)
PAYLOADS["topk without feedback"] = Coded("topk", _SMALL["topk"], feedback=False)
