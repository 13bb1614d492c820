"""Every strategy with every codec: a state saved while rounds are in flight goes on bit for bit (I27)."""

import json
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmkit.optim import SyncedOptimizer
from swarmkit.optim.compression import CODECS, CompressedAveraging, LGreCo, Route
from swarmkit.peers.local import LocalCollective, LocalSwarm
from swarmkit.training_state import State, collect, resume_exactly
from tests.unit.optim.matrix import DEMO, GATHERED, PAYLOADS, STRATEGIES, WITH_PARAMETER, Coded, Strategy, descend
from tests.unit.optim.replicas import Net, same

Ended = tuple[Net, SyncedOptimizer]


def whole(strategy: Strategy, codec: Coded | None) -> tuple[list[Ended], list[State]]:
    """Two replicas after training, and the checkpoint that each wrote on the way, as a file would give it back."""

    def task(collective: LocalCollective, rank: int) -> tuple[Ended, State]:
        net = Net()
        optimizer = strategy(list(net.parameters()), collective, codec)
        descend(net, optimizer, rank, range(strategy.stop))
        tensors, meta = collect(net, optimizer, {})
        saved = deepcopy(tensors), json.loads(json.dumps(meta))
        assert optimizer.last_report is not None
        assert optimizer.last_report.failed is None
        in_flight = [part["flight"] for part in optimizer.state_dict()["synced"].get("fragments", [])]
        assert strategy.flies == any(flight is not None and flight["report"] is None for flight in in_flight)
        descend(net, optimizer, rank, range(strategy.stop, strategy.steps))
        optimizer.finish()
        return (net, optimizer), saved

    found = LocalSwarm(2).run(task)
    return [ended for ended, _ in found], [saved for _, saved in found]


def resumed(strategy: Strategy, codec: Coded | None, saved: list[State]) -> list[Ended]:
    def task(collective: LocalCollective, rank: int) -> Ended:
        net = Net(seed=7)
        optimizer = strategy(list(net.parameters()), collective, codec)
        resume_exactly(net, optimizer, saved[rank])
        descend(net, optimizer, rank, range(strategy.stop, strategy.steps))
        optimizer.finish()
        return net, optimizer

    return LocalSwarm(2).run(task)


def equal(left: Any, right: Any) -> bool:
    """Bit for bit, through all containers."""
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def assert_resumes(strategy: Strategy, codec: Coded | None) -> None:
    ended, saved = whole(strategy, codec)
    assert same(ended[0][0], ended[1][0])
    assert not same(ended[0][0], Net())
    for (net, optimizer), (reference, expected) in zip(resumed(strategy, codec, saved), ended, strict=True):
        assert same(net, reference)
        assert equal(optimizer.state_dict(), expected.state_dict())
        assert optimizer.last_report is not None
        assert optimizer.last_report.failed is None


@pytest.mark.parametrize("codec", PAYLOADS.values(), ids=PAYLOADS)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_state_saved_amid_rounds_resumes_bit_for_bit(strategy: Strategy, codec: Coded | None) -> None:
    assert_resumes(strategy, codec)


@pytest.mark.parametrize("values", ["float32", "float16", "int8", "sign"])
@pytest.mark.parametrize("precondition", [None, 0.95])
def test_demo_with_its_own_codec_resumes_bit_for_bit(values: str, precondition: float | None) -> None:
    options = DEMO.options | {"values": values, "precondition": precondition}
    assert_resumes(Strategy(DEMO.kind, options, windows=False, stop=DEMO.stop, steps=DEMO.steps), None)


def test_every_codec_has_something_to_do_in_the_small_network() -> None:
    (collective,) = LocalSwarm(1).collectives
    tensors = list(Net().parameters())
    for name, codec in PAYLOADS.items():
        if codec is not None:
            averaging = codec(collective)
            inner = averaging.averaging if isinstance(averaging, LGreCo) else averaging
            assert isinstance(inner, CompressedAveraging)
            assert inner.compressed(tensors)[:1] == [0], name


# -- what the comparison would notice ----------------------------------------------------------------------------------


def lose(saved: list[State], name: str) -> list[State]:
    """States in which every list kept under that name is empty."""

    def lost(key: Any, value: Any) -> Any:
        return {"list": []} if key == name and "list" in (value or ()) else without(value)

    def without(tree: Any) -> Any:
        if isinstance(tree, dict) and "pairs" in tree:
            return {"pairs": [[key, lost(key, value)] for key, value in tree["pairs"]]}
        if isinstance(tree, dict) and "list" in tree:
            return {"list": [without(value) for value in tree["list"]]}
        return tree

    return [(tensors, {**meta, "optimizer": without(meta["optimizer"])}) for tensors, meta in saved]


@pytest.mark.parametrize(
    ("strategy", "codec", "name"),
    [
        ("AllReduce", "int4", "residual"),
        ("LocalSGD", "topk sharded", "residual"),
        ("DiLoCo", "powersgd", "state"),
        ("DiLoCo eager", "fp4", "residual"),
        ("DiLoCo eager", "int8", "carry"),
        ("DiLoCo streaming", "powersgd adaptive", "state"),
        ("CO2 that keeps", "qsgd", "start"),
    ],
)
def test_a_state_without_what_a_codec_keeps_does_not_pass_for_whole(strategy: str, codec: str, name: str) -> None:
    ended, saved = whole(STRATEGIES[strategy], PAYLOADS[codec])
    (net, _), _ = resumed(STRATEGIES[strategy], PAYLOADS[codec], lose(saved, name))
    assert not same(net, ended[0][0])


# -- pairs that cannot be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PAYLOADS if name != "none"])
def test_demo_refuses_every_codec_and_says_why(name: str) -> None:
    with pytest.raises(ValueError, match="averaging: DeMo sends coefficients of its own, which no codec takes"):
        DEMO(list(Net().parameters()), LocalSwarm(1).collectives[0], PAYLOADS[name])


@pytest.mark.parametrize("name", CODECS)
def test_lgreco_refuses_codecs_without_a_parameter_and_routes_are_for_payloads_that_cannot_be_summed(name: str) -> None:
    (collective,) = LocalSwarm(1).collectives
    if name not in WITH_PARAMETER:
        with pytest.raises(ValueError, match=f"codec '{name}' has no parameter to choose"):
            Coded(name, feedback=False, adaptive=True)(collective)
    if name not in GATHERED:
        with pytest.raises(ValueError, match=f"route=sharded: payloads of {name} can be summed"):
            Coded(name, feedback=False, route=Route.sharded)(collective)


def test_error_feedback_is_refused_where_it_would_grow_without_end() -> None:
    with pytest.raises(ValueError, match="randomk with error_feedback"):
        Coded("randomk", feedback=True)(LocalSwarm(1).collectives[0])


@pytest.mark.parametrize("name", CODECS)
def test_fragments_refuse_to_share_a_codec(name: str) -> None:
    (collective,) = LocalSwarm(1).collectives
    codec = Coded(name, feedback=False)(collective)
    with pytest.raises(ValueError, match="a codec has state of its own for each fragment"):
        STRATEGIES["DiLoCo streaming"](list(Net().parameters()), collective, averaging=codec)
