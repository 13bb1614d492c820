"""The product's own codecs in rounds that overlap: replicas end alike, and what is in flight resumes bit for bit."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from torch import Tensor

from swarmkit.optim import CO2, Averaging, Collective, DiLoCo, Every, LocalSGD, SyncedOptimizer
from swarmkit.optim.compression.blockwise import Blockwise
from swarmkit.optim.compression.codec import Codec
from swarmkit.optim.compression.compressed import CompressedAveraging
from swarmkit.optim.compression.powersgd import PowerSGD
from swarmkit.optim.compression.qsgd import QSGD
from swarmkit.optim.compression.sparse import TopK
from swarmkit.optim.snapshot import digest_tensors
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import Net, adamw, same, train

CODECS: dict[str, Callable[[], Codec]] = {
    "int4": lambda: Blockwise(4, min_size=0),
    "qsgd": lambda: QSGD(4, min_size=0),
    "powersgd": lambda: PowerSGD(2, min_size=0),
    "topk": lambda: TopK(0.1, min_size=0),
}
STRATEGIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "LocalSGD": (LocalSGD, {}),
    "DiLoCo": (DiLoCo, {}),
    "eager": (DiLoCo, {"eager": True, "outer_momentum": 0.9}),
    "streaming": (DiLoCo, {"fragments": 2, "overlap_steps": 1, "mixing": 0.5}),
    "eager fragments": (DiLoCo, {"fragments": 2, "eager": True, "outer_momentum": 0.9}),
    "CO2": (CO2, {}),
}


def make(strategy: str, codec: str, parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
    kind, options = STRATEGIES[strategy]

    def averaging(number: int = 0) -> Averaging:
        return CompressedAveraging(CODECS[codec](), collective, error_feedback=codec != "qsgd", generator=number)

    given = {"averaging": averaging()} if kind is not DiLoCo else {"averaging_for": averaging}
    found: SyncedOptimizer = kind(adamw(parameters), collective=collective, sync=Every(4), **given, **options)
    return found


def run(strategy: str, codec: str, steps: range, saved: list[Any] | None = None, finish: bool = True) -> list[Any]:
    def task(collective: LocalCollective, rank: int) -> Any:
        net = Net()
        optimizer = make(strategy, codec, list(net.parameters()), collective)
        if saved is not None:
            net.load_state_dict(saved[rank][0])
            optimizer.load_state_dict(saved[rank][1])
        train(net, optimizer, rank, steps)
        if finish:
            optimizer.finish()
        return net, optimizer

    return LocalSwarm(2).run(task)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("codec", CODECS)
def test_replicas_end_alike_and_a_flight_resumes_bit_for_bit(strategy: str, codec: str) -> None:
    whole = run(strategy, codec, range(22))
    assert same(whole[0][0], whole[1][0])
    assert not same(whole[0][0], Net())
    half = [deepcopy((n.state_dict(), o.state_dict())) for n, o in run(strategy, codec, range(13), finish=False)]
    for (net, optimizer), (reference, expected) in zip(
        run(strategy, codec, range(13, 22), saved=half), whole, strict=True
    ):
        assert same(net, reference)
        assert digest_tensors(optimizer.snapshot()[0]) == digest_tensors(expected.snapshot()[0])
