"""The strategies whose rounds overlap, each as a test makes one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmkit.optim import CO2, Collective, DiLoCo, Every, SyncedOptimizer
from swarmkit.optim.overlapped import OverlappedOptimizer
from tests.unit.optim.replicas import Net, adamw
from tests.unit.optim.rounding import Rounding


def of(kind: Any, parameters: list[Tensor], collective: Collective, h: int = 4, **options: Any) -> OverlappedOptimizer:
    found = kind(adamw(parameters), collective=collective, sync=Every(h), **options)
    assert isinstance(found, OverlappedOptimizer)
    return found


def coded(kind: Any, parameters: list[Tensor], collective: Collective, **options: Any) -> OverlappedOptimizer:
    return of(kind, parameters, collective, averaging_for=lambda _: Rounding(collective, 2**-12), **options)


EAGER: dict[str, Callable[..., OverlappedOptimizer]] = {
    "eager": partial(of, DiLoCo, eager=True, outer_momentum=0.9),
    "delayed": partial(of, DiLoCo, eager="delayed", outer_momentum=0.9),
    "CO2": partial(of, CO2, keep_local=False, penalty="gap"),
    "CO2 that keeps": partial(of, CO2, penalty="gap"),
}
ALL = EAGER | {
    "blocking": partial(of, DiLoCo),
    "streaming": partial(of, DiLoCo, fragments=2, overlap_steps=1, mixing=0.25),
    "eager fragments": partial(of, DiLoCo, fragments=2, eager=True, outer_momentum=0.9),
    "eager, coded": partial(coded, DiLoCo, eager=True, outer_momentum=0.9),
    "streaming, coded": partial(coded, DiLoCo, fragments=2, overlap_steps=1),
    "CO2, coded": partial(coded, CO2),
}
hidden = pytest.mark.parametrize("make", EAGER.values(), ids=EAGER)
everyone = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def same_as_anchor(net: Net, optimizer: SyncedOptimizer) -> bool:
    pairs = zip(net.parameters(), optimizer.anchor().values(), strict=True)
    return all(torch.equal(parameter, held.to(parameter.dtype)) for parameter, held in pairs)
