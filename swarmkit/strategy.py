"""Settings of every strategy, and from settings to a strategy."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from swarmkit.checks import at_least, in_range, positive
from swarmkit.compression import CompressionConfig, build_averaging

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from swarmkit.optim import Collective, Pace, Schedule, SyncedOptimizer
    from swarmkit.optim.averaging import Averaging
    from swarmkit.optim.options import EveryStep


DEVICES = r"cpu|mps|cuda(:\d+)?"


class SyncRule(Enum):
    """What decides when a window ends."""

    every = "every"  # h inner steps
    qsr = "qsr"  # the Quadratic Synchronization Rule: more steps as the learning rate falls


class FragmentBy(Enum):
    """How a model is cut into fragments."""

    strided = "strided"  # layers dealt out by size: each fragment has early and late blocks
    layer = "layer"  # runs of neighbouring layers


@dataclass(kw_only=True, slots=True)
class SyncConfig:
    """When replicas synchronise."""

    rule: SyncRule = SyncRule.every  # what ends a window
    h: int = 16  # inner steps per window; QSR's smallest window (h_base)
    alpha: float | None = None  # QSR: H = max(h, floor((alpha / lr)^2)); about peak lr * sqrt(H wanted at the peak)

    def __post_init__(self) -> None:
        if self.h < 1:
            raise ValueError(f"strategy.sync.h={self.h}: H must be at least 1 inner step")
        if self.rule is SyncRule.qsr and self.alpha is None:
            raise ValueError("strategy.sync.rule=qsr: needs strategy.sync.alpha, for example peak lr * sqrt(h)")
        if self.rule is SyncRule.every and self.alpha is not None:
            raise ValueError(
                f"strategy.sync.alpha={self.alpha}: only strategy.sync.rule=qsr uses it; set the rule or drop alpha"
            )
        if self.alpha is not None:
            positive("strategy.sync", self, "alpha")


@dataclass(kw_only=True, slots=True)
class StrategyConfig:
    """What all strategies have in common."""

    name: str = "diloco"  # which strategy; set by the choice of the group
    offload: str | None = None  # device that holds the anchor and the outer state, such as cpu; none: the model's

    def __post_init__(self) -> None:
        if self.offload is not None and not re.fullmatch(DEVICES, self.offload):
            raise ValueError(f"strategy.offload={self.offload!r}: must be cpu, cuda, cuda:N or mps")


@dataclass(kw_only=True, slots=True)
class AllReduceConfig(StrategyConfig):
    """Average gradients in every step."""

    name: str = "allreduce"


@dataclass(kw_only=True, slots=True)
class LocalSGDConfig(StrategyConfig):
    """Average parameters every H steps."""

    name: str = "local_sgd"
    sync: SyncConfig = field(default_factory=SyncConfig)


@dataclass(kw_only=True, slots=True)
class DiLoCoConfig(StrategyConfig):
    """An outer Nesterov step on the averaged pseudo-gradient every H steps."""

    name: str = "diloco"
    sync: SyncConfig = field(default_factory=SyncConfig)
    outer_lr: float = 0.7  # of the step along the averaged pseudo-gradient
    outer_momentum: float | None = None  # null: 0.9, and 0 with eager; 0 with outer_lr=1 is parameter averaging
    nesterov: bool = True  # look ahead along the momentum
    eager: bool | str = False  # true: rounds overlap the next window; delayed: the naive form, for comparison
    fragments: int = 1  # parts of the model that meet one after the other; 1 sends the whole model at once
    fragment_by: FragmentBy = FragmentBy.strided  # how the model is cut into fragments
    overlap_steps: int = 0  # inner steps from the start of a round until its result is adopted; not with eager
    mixing: float = 0.0  # share of the local parameters that is kept when a result is adopted

    def __post_init__(self) -> None:
        StrategyConfig.__post_init__(self)
        positive("strategy", self, "outer_lr")
        if self.outer_momentum is None:
            self.outer_momentum = 0.0 if self.eager else 0.9
        in_range("strategy", self, 0.0, 1.0, "outer_momentum")
        at_least("strategy", self, 1, "fragments")
        at_least("strategy", self, 0, "overlap_steps")
        if self.eager not in (True, False, "delayed"):
            raise ValueError(f"strategy.eager={self.eager}: must be true, false or delayed")
        if not 0 <= self.mixing <= 1:
            raise ValueError(f"strategy.mixing={self.mixing}: a share of the local parameters, between 0 and 1")
        if self.eager and (self.overlap_steps or self.mixing):
            raise ValueError(
                f"strategy.overlap_steps={self.overlap_steps}, strategy.mixing={self.mixing}: with strategy.eager a "
                "round has the whole next window; set both to 0"
            )
        if self.fragments > self.sync.h:
            raise ValueError(
                f"strategy.fragments={self.fragments}: more than a window has steps (strategy.sync.h={self.sync.h}); "
                "each fragment meets at a step of its own"
            )
        if self.overlap_steps >= self.sync.h:
            raise ValueError(
                f"strategy.overlap_steps={self.overlap_steps}: must be below strategy.sync.h={self.sync.h}, "
                "or the next round would begin first"
            )


@dataclass(kw_only=True, slots=True)
class CO2Config(StrategyConfig):
    """An outer step on a mean that is one round late, so that communication hides behind a whole window."""

    name: str = "co2"
    sync: SyncConfig = field(default_factory=SyncConfig)
    outer_lr: float = 0.7  # of the step along the outer momentum
    outer_momentum: float = 0.5  # 0 applies each late mean as it is
    penalty: int | float | str | None = None  # a late mean is divided by it: gap (anchor's movement), a number, null
    clip: float | None = 1.0  # largest value of the outer momentum; null does not clip
    overlap: bool = True  # false waits for every round (SlowMo)
    keep_local: bool = True  # begin windows from the anchor plus this peer's newest progress; the paper does not

    def __post_init__(self) -> None:
        StrategyConfig.__post_init__(self)
        positive("strategy", self, "outer_lr")
        in_range("strategy", self, 0.0, 1.0, "outer_momentum")
        number = isinstance(self.penalty, int | float) and not isinstance(self.penalty, bool)
        if not (self.penalty in (None, "gap") or (number and float(self.penalty or 0) >= 1)):
            raise ValueError(f"strategy.penalty={self.penalty}: must be gap, a number of at least 1, or null")
        if self.clip is not None:
            at_least("strategy", self, 0, "clip")
        if self.keep_local and not self.overlap:
            raise ValueError(
                "strategy.keep_local=true: without strategy.overlap no local progress is put off; set it to false"
            )


class CoefficientValues(Enum):
    """How DeMo sends a coefficient."""

    float32 = "float32"
    float16 = "float16"
    int8 = "int8"  # and a scale for each chunk
    sign = "sign"  # 1 bit, and a scale for each chunk


class CoefficientAverage(Enum):
    """What a coefficient's sum over the members is divided by."""

    senders = "senders"  # the members that sent it, as the paper's code does
    members = "members"  # all


@dataclass(kw_only=True, slots=True)
class DeMoConfig(StrategyConfig):
    """The largest DCT coefficients of a decoupled momentum."""

    name: str = "demo"
    every: int = 1  # steps between two rounds; between them parameters do not move
    k: int = 80  # coefficients sent of each chunk of 64 by 64, of others in proportion to the root of their area
    chunk: int = 64  # side of a chunk
    beta: float = 0.999  # decay of the momentum per step
    alpha: float = 1.0  # share of what is sent that leaves the momentum
    precondition: float | None = 0.95  # decay of the second moment that gradients are divided by, as Adam's; null: none
    values: CoefficientValues = CoefficientValues.sign  # how coefficients are sent
    sign: bool = False  # step along the signs of the mean, as the paper's first version does
    normalise: bool = False  # scale each chunk of the mean to a root mean square of 1; optimizer.lr is then about 1e-3
    average: CoefficientAverage = CoefficientAverage.members  # what a sum is divided by

    def __post_init__(self) -> None:
        StrategyConfig.__post_init__(self)
        at_least("strategy", self, 1, "every", "k")
        if not 1 <= self.chunk <= 256:
            raise ValueError(f"strategy.chunk={self.chunk}: between 1 and 256")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"strategy.beta={self.beta}: between 0 and 1")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"strategy.alpha={self.alpha}: above 0 and at most 1")
        if self.precondition is not None and not 0 <= self.precondition < 1:
            raise ValueError(f"strategy.precondition={self.precondition}: at least 0 and below 1, or null")


def build_schedule(config: SyncConfig, *, total_steps: int, warmup_steps: int) -> "Schedule":
    """Make the schedule of a strategy that has windows."""
    from swarmkit.optim import Every, QuadraticSync

    if config.rule is SyncRule.every:
        return Every(config.h, total_steps)
    assert config.alpha is not None
    return QuadraticSync(alpha=config.alpha, h_base=config.h, total_steps=total_steps, warmup_steps=warmup_steps)


def build_strategy(
    config: StrategyConfig,
    inner: "torch.optim.Optimizer",
    *,
    collective: "Collective",
    total_steps: int,
    warmup_steps: int,
    pace: "Pace | None" = None,
    compression: CompressionConfig | None = None,
    clip: float | None = None,
    seed: int = 0,
    names: "Mapping[Tensor, str] | None" = None,
    buffers: "Sequence[Tensor]" = (),
) -> "SyncedOptimizer":
    """Wrap an inner optimizer in the strategy that a configuration names.

    `pace` fills the windows of strategies that have them, `clip` is the largest norm of a gradient where the strategy
    has to see to it itself (`clips_itself`), `seed` is for codecs that draw.
    """
    from swarmkit.optim import CO2, AllReduce, DeMo, DiLoCo, LocalSGD

    codec = compression or CompressionConfig()
    options: EveryStep = {
        "collective": collective,
        "names": names,
        "buffers": buffers,
        "offload": config.offload,
    }

    def averaging() -> "Averaging | None":
        return build_averaging(codec, collective, seed=seed)

    def averaging_for(fragments: int) -> "Callable[[int], Averaging] | None":
        def made(fragment: int) -> "Averaging":
            found = build_averaging(codec, collective, seed=seed, fragment=fragment, fragments=fragments)
            assert found is not None
            return found

        return None if codec.name == "none" else made

    def sync(found: SyncConfig) -> "Schedule":
        return build_schedule(found, total_steps=total_steps, warmup_steps=warmup_steps)

    match config:
        case AllReduceConfig():
            return AllReduce(inner, averaging=averaging(), clip=clip, **options)
        case LocalSGDConfig():
            return LocalSGD(inner, sync=sync(config.sync), pace=pace, averaging=averaging(), **options)
        case DiLoCoConfig():
            return DiLoCo(
                inner,
                sync=sync(config.sync),
                pace=pace,
                averaging_for=averaging_for(config.fragments),
                outer_lr=config.outer_lr,
                outer_momentum=config.outer_momentum,
                nesterov=config.nesterov,
                eager="delayed" if config.eager == "delayed" else bool(config.eager),
                fragments=config.fragments,
                fragment_by="layer" if config.fragment_by is FragmentBy.layer else "strided",
                overlap_steps=config.overlap_steps,
                mixing=config.mixing,
                **options,
            )
        case CO2Config():
            return CO2(
                inner,
                sync=sync(config.sync),
                pace=pace,
                averaging=averaging(),
                outer_lr=config.outer_lr,
                outer_momentum=config.outer_momentum,
                penalty="gap" if isinstance(config.penalty, str) else config.penalty,
                clip=config.clip,
                overlap=config.overlap,
                keep_local=config.keep_local,
                **options,
            )
        case DeMoConfig():
            from swarmkit.optim import Every

            return DeMo(
                inner,
                sync=Every(config.every, total_steps),
                k=config.k,
                chunk=config.chunk,
                beta=config.beta,
                alpha=config.alpha,
                precondition=config.precondition,
                values=config.values.name,
                sign=config.sign,
                normalise=config.normalise,
                average=config.average.name,
                **options,
            )
    raise ValueError(f"strategy.name={config.name!r}: no such strategy")


def clips_itself(config: StrategyConfig) -> bool:
    """True for a strategy that clips the mean gradient, not each peer's own."""
    return isinstance(config, AllReduceConfig)
