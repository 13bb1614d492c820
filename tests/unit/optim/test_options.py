"""How strategies are called: what help() shows, what becomes of a misspelt option, and codecs in one word."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import swarmkit
from swarmkit.optim import (
    CO2,
    AllReduce,
    Casting,
    Collective,
    CompressedAveraging,
    DeMo,
    DiLoCo,
    Every,
    LocalSGD,
    PlainAveraging,
    RandomK,
    SyncedOptimizer,
    TopK,
)
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import Net, adamw, same, sgd, train, trained

EVERY_STEP = {"inner", "collective", "names", "buffers", "offload", "clock"}
CODED = EVERY_STEP | {"averaging", "compression"}
WINDOWS = CODED | {"sync", "pace"}
OPTIONS: dict[type[SyncedOptimizer], set[str]] = {
    AllReduce: CODED | {"clip"},
    LocalSGD: WINDOWS,
    DiLoCo: WINDOWS
    | {"outer_lr", "outer_momentum", "nesterov", "eager", "overlap_steps", "mixing"}
    | {"fragments", "fragment_by", "staggered", "averaging_for"},
    CO2: WINDOWS | {"outer_lr", "outer_momentum", "penalty", "clip", "overlap", "keep_local"} | {"averaging_for"},
    DeMo: EVERY_STEP
    | {"sync", "k", "chunk", "beta", "alpha", "precondition", "values", "sign", "normalise", "average"},
}
CODEC = TopK(0.25, min_size=16)
every_strategy = pytest.mark.parametrize("strategy", OPTIONS)
every_coded = pytest.mark.parametrize("strategy", [AllReduce, LocalSGD, DiLoCo, CO2])


@pytest.fixture
def alone() -> LocalCollective:
    return LocalSwarm(1).collectives[0]


@every_strategy
def test_the_signature_shows_every_option_with_its_type_and_default(strategy: type[SyncedOptimizer]) -> None:
    shown = inspect.signature(strategy).parameters
    assert set(shown) == OPTIONS[strategy]
    for parameter in shown.values():
        assert parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        assert parameter.annotation not in (inspect.Parameter.empty, Any)
    required = [name for name, one in shown.items() if one.default is inspect.Parameter.empty]
    assert required == ["inner", "collective"]


@every_strategy
def test_options_that_are_passed_on_have_the_default_that_counts(strategy: type[SyncedOptimizer]) -> None:
    defaults = {name: one.default for name, one in inspect.signature(strategy).parameters.items()}
    optimizer = strategy(sgd(list(Net().parameters())), collective=LocalSwarm(1).collectives[0])
    for name, attribute in {"fragments": "_count", "fragment_by": "_by", "staggered": "_staggered"}.items():
        if name in defaults:
            assert getattr(optimizer, attribute) == defaults[name]


@every_strategy
def test_a_misspelt_option_is_refused_with_the_nearest(strategy: Any, alone: LocalCollective) -> None:
    with pytest.raises(TypeError, match=f"{strategy.__name__} has no option 'ofload': did you mean 'offload'"):
        strategy(sgd(list(Net().parameters())), collective=alone, ofload="cpu")


def test_an_option_of_another_strategy_is_refused_with_the_reason(alone: LocalCollective) -> None:
    parameters = list(Net().parameters())
    for strategy, option, reason in [
        (AllReduce, "sync", "in every step"),
        (AllReduce, "pace", "in every step"),
        (CO2, "fragments", "the whole model"),
        (DeMo, "compression", "coefficients of its own"),
        (DeMo, "pace", "in rounds only"),
    ]:
        with pytest.raises(ValueError, match=f"^{option}: .*{reason}"):
            strategy(sgd(parameters), collective=alone, **{option: None})  # type: ignore[operator]


# -- codecs ----------------------------------------------------------------------------------------------------------


@every_coded
def test_compression_is_the_averaging_that_one_would_build(strategy: Any) -> None:
    window = {} if strategy is AllReduce else {"sync": Every(4)}

    def short(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        found: SyncedOptimizer = strategy(adamw(parameters), collective=collective, compression=CODEC, **window)
        return found

    def long(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        averaging = CompressedAveraging(CODEC, collective, error_feedback=True)
        found: SyncedOptimizer = strategy(adamw(parameters), collective=collective, averaging=averaging, **window)
        return found

    left, right = (trained(make, replicas=2, steps=12) for make in (short, long))
    assert same(left[0][0], right[0][0])
    plain = trained(lambda p, c: strategy(adamw(p), collective=c, **window), replicas=2, steps=12)
    assert not same(left[0][0], plain[0][0])


def test_each_fragment_has_a_codec_s_state_of_its_own(alone: LocalCollective) -> None:
    net = Net()
    optimizer = DiLoCo(adamw(list(net.parameters())), collective=alone, sync=Every(4), fragments=2, compression=CODEC)
    averagings = optimizer._averagings()
    assert all(isinstance(one, CompressedAveraging) and one.error_feedback for one in averagings)
    assert len({id(one) for one in averagings}) == 2
    train(net, optimizer, 0, range(16))
    assert [report.failed for report in [optimizer.last_report] if report] == [None]


def test_error_feedback_comes_with_codecs_that_shrink_errors_only(alone: LocalCollective) -> None:
    for codec, feedback in [(Casting("fp16"), True), (RandomK(0.1), False), (RandomK(0.1, unbiased=False), True)]:
        averaging = LocalSGD(sgd([torch.nn.Parameter(torch.zeros(3))]), collective=alone, compression=codec).averaging
        assert isinstance(averaging, CompressedAveraging)
        assert averaging.error_feedback is feedback


def test_two_ways_at_once_to_say_how_to_average_are_refused(alone: LocalCollective) -> None:
    plain = PlainAveraging(alone)
    inner = sgd(list(Net().parameters()))
    with pytest.raises(ValueError, match="^compression: "):
        LocalSGD(inner, collective=alone, averaging=plain, compression=CODEC)
    for option in ({"averaging": plain}, {"compression": CODEC}):
        with pytest.raises(ValueError, match="^averaging_for: "):
            DiLoCo(inner, collective=alone, averaging_for=lambda _: plain, **option)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^compression: "):
        DiLoCo(inner, collective=alone, fragments=2, averaging=plain, compression=CODEC)


def test_every_name_that_the_package_exports_is_there() -> None:
    for name in swarmkit.optim.__all__:
        assert getattr(swarmkit.optim, name).__doc__, name
    with pytest.raises(AttributeError, match="DiLoco"):
        swarmkit.optim.DiLoco  # type: ignore[attr-defined] # noqa: B018
