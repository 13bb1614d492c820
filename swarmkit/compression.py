"""Settings of every codec, and from settings to what averages with it."""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from swarmkit.checks import at_least, positive

if TYPE_CHECKING:
    from swarmkit.optim import Collective
    from swarmkit.optim.averaging import Averaging
    from swarmkit.optim.compression.codec import Codec


@dataclass(kw_only=True, slots=True)
class LGreCoConfig:
    """Layer-wise adaptive compression: each tensor gets its own parameter (arXiv 2210.17357)."""

    period: int = 0  # rounds between two allocations; 0: all tensors have the codec's own parameter
    window: int = 10  # rounds before an allocation whose contributions it measures
    floor: float = 0.25  # smallest parameter that is chosen, as a share of the codec's own
    alpha: float = 1.0  # error that is allowed, as a share of that of the codec's own parameter
    squared: bool = False  # count squared norms of errors instead of norms

    def __post_init__(self) -> None:
        at_least("compression.lgreco", self, 0, "period")
        at_least("compression.lgreco", self, 1, "window")
        positive("compression.lgreco", self, "alpha")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"compression.lgreco.floor={self.floor}: a share, between 0 and 1")


@dataclass(kw_only=True, slots=True)
class CompressionConfig:
    """How payloads are encoded on the wire: not at all."""

    name: str = "none"


@dataclass(kw_only=True, slots=True)
class CodecConfig(CompressionConfig):
    """What all codecs have in common."""

    error_feedback: bool | None = (
        None  # add what a codec left out to the next round; null: where the codec shrinks errors
    )
    min_size: int = 1024  # values below which a tensor is sent as it is

    def __post_init__(self) -> None:
        at_least("compression", self, 0, "min_size")


class RouteName(Enum):
    """How payloads that cannot be summed travel."""

    auto = "auto"
    gather = "gather"
    sharded = "sharded"
    fp16 = "fp16"


@dataclass(kw_only=True, slots=True)
class GatherCodecConfig(CodecConfig):
    """What codecs have in common whose payloads cannot be summed."""

    # to every member, by slices through their owners, or without the codec in float16; auto: by the members' number
    route: RouteName = RouteName.auto


@dataclass(kw_only=True, slots=True)
class FP16Config(CodecConfig):
    """Half precision."""

    name: str = "fp16"


@dataclass(kw_only=True, slots=True)
class BF16Config(CodecConfig):
    """bfloat16."""

    name: str = "bf16"


@dataclass(kw_only=True, slots=True)
class Int8Config(GatherCodecConfig):
    """8 bits a value, and a scale for each block."""

    name: str = "int8"
    block: int = 256  # values that share a scale

    def __post_init__(self) -> None:
        CodecConfig.__post_init__(self)
        _check_block("block", self.block)


@dataclass(kw_only=True, slots=True)
class Int4Config(Int8Config):
    """4 bits a value, and a scale for each block."""

    name: str = "int4"


@dataclass(kw_only=True, slots=True)
class FP4Config(GatherCodecConfig):
    """E3M0: sign and exponent in 4 bits, as Streaming DiLoCo sends (arXiv 2501.18512)."""

    name: str = "fp4"
    block: int | None = None  # values that share a scale; null: a tensor's

    def __post_init__(self) -> None:
        CodecConfig.__post_init__(self)
        if self.block is not None:
            _check_block("block", self.block)


class Norm(Enum):
    """What QSGD's levels are shares of."""

    max = "max"
    l2 = "l2"


@dataclass(kw_only=True, slots=True)
class QSGDConfig(GatherCodecConfig):
    """Stochastic, unbiased rounding to a few bits (arXiv 1610.02132)."""

    name: str = "qsgd"
    bits: int = 4  # a value, sign included
    bucket: int = 512  # values that share a scale
    norm: Norm = Norm.max  # what levels are shares of
    lgreco: LGreCoConfig = field(default_factory=LGreCoConfig)

    def __post_init__(self) -> None:
        CodecConfig.__post_init__(self)
        if not 2 <= self.bits <= 8:
            raise ValueError(f"compression.bits={self.bits}: between 2 and 8")
        _check_block("bucket", self.bucket)
        if self.error_feedback:
            from swarmkit.optim.compression.qsgd import feedback_refusal

            reason = feedback_refusal(self.bits, self.norm.name)
            if reason is not None:
                raise ValueError(f"compression.error_feedback=true: {reason}")


@dataclass(kw_only=True, slots=True)
class TernaryConfig(GatherCodecConfig):
    """TernGrad: -1, 0 or 1 times a tensor's scale (arXiv 1705.07878)."""

    name: str = "ternary"
    clip: float | None = 2.5  # in standard deviations; null does not clip, which is unbiased

    def __post_init__(self) -> None:
        CodecConfig.__post_init__(self)
        if self.clip is not None:
            positive("compression", self, "clip")
        if self.error_feedback:
            from swarmkit.optim.compression.ternary import FEEDBACK_REFUSAL

            raise ValueError(f"compression.error_feedback=true: {FEEDBACK_REFUSAL}")


class Precision(Enum):
    """How kept values are sent."""

    float16 = "float16"
    float32 = "float32"


@dataclass(kw_only=True, slots=True)
class TopKConfig(GatherCodecConfig):
    """The largest values and where they are."""

    name: str = "topk"
    density: float = 0.01  # share of the values that is sent
    values: Precision = Precision.float16  # how they are sent
    lgreco: LGreCoConfig = field(default_factory=LGreCoConfig)

    def __post_init__(self) -> None:
        CodecConfig.__post_init__(self)
        _check_density(self.density)


@dataclass(kw_only=True, slots=True)
class RandomKConfig(CodecConfig):
    """Values at random places that all members know, so that no indices travel."""

    name: str = "randomk"
    density: float = 0.01  # share of the values that is sent
    unbiased: bool = True  # scale them up; without, error feedback makes up for what is left out
    lgreco: LGreCoConfig = field(default_factory=LGreCoConfig)

    def __post_init__(self) -> None:
        CodecConfig.__post_init__(self)
        _check_density(self.density)
        if self.unbiased and self.error_feedback:
            raise ValueError(
                "compression.error_feedback=true: scaled up, randomk's error exceeds the signal and would grow without "
                "end; set compression.unbiased=false"
            )


@dataclass(kw_only=True, slots=True)
class PowerSGDConfig(CodecConfig):
    """Two low-rank factors of each matrix (arXiv 1905.13727)."""

    name: str = "powersgd"
    rank: int = 4  # of the factors
    lgreco: LGreCoConfig = field(default_factory=LGreCoConfig)

    def __post_init__(self) -> None:
        CodecConfig.__post_init__(self)
        at_least("compression", self, 1, "rank")


CODEC_CONFIGS: dict[str, type[CompressionConfig]] = {
    "none": CompressionConfig,
    "fp16": FP16Config,
    "bf16": BF16Config,
    "int8": Int8Config,
    "int4": Int4Config,
    "fp4": FP4Config,
    "qsgd": QSGDConfig,
    "ternary": TernaryConfig,
    "topk": TopKConfig,
    "randomk": RandomKConfig,
    "powersgd": PowerSGDConfig,
}
_NOT_THE_CODECS = ("name", "error_feedback", "lgreco", "route")


def _check_block(key: str, value: int) -> None:
    if value < 8 or value % 8:
        raise ValueError(f"compression.{key}={value}: a multiple of 8")


def _check_density(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"compression.density={value}: a share, above 0 and at most 1")


def _build_codec(config: CodecConfig) -> "Codec":
    from swarmkit.optim.compression import make_codec

    settings: dict[str, Any] = {
        entry.name: getattr(config, entry.name) for entry in fields(config) if entry.name not in _NOT_THE_CODECS
    }
    plain = {name: value.name if isinstance(value, Enum) else value for name, value in settings.items()}
    return make_codec(config.name, **plain)


def feeds_back(config: CodecConfig) -> bool:
    """Whether what the codec leaves out is kept for the next round, with null resolved."""
    return _build_codec(config).contractive if config.error_feedback is None else config.error_feedback


def build_averaging(
    config: CompressionConfig, collective: "Collective", *, seed: int, fragment: int = 0, fragments: int = 1
) -> "Averaging | None":
    """What averages through the codec that a configuration names, one for each fragment; None for no codec."""
    if not isinstance(config, CodecConfig):
        return None
    from swarmkit.optim.compression import CompressedAveraging, LGreCo, Route

    codec = _build_codec(config)
    # A seed of its own for each fragment: equal draws would not be independent.
    name = config.route if isinstance(config, GatherCodecConfig) else RouteName.auto
    averaging = CompressedAveraging(
        codec,
        collective,
        error_feedback=feeds_back(config),
        generator=seed + 1_000_003 * fragment,
        route=None if name is RouteName.auto else Route[name.name],
    )
    lgreco: LGreCoConfig | None = getattr(config, "lgreco", None)
    if lgreco is None or not lgreco.period:
        return averaging
    assert codec.parameter is not None
    return LGreCo(
        averaging,
        period=lgreco.period,
        window=lgreco.window,
        alpha=lgreco.alpha,
        squared=lgreco.squared,
        candidates=[one for one in codec.candidates if one >= lgreco.floor * codec.parameter],
        stride=fragments,
    )
