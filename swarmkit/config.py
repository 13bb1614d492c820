"""The one description of every setting: dataclasses, checked as a whole before anything starts."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from swarmkit.checks import at_least, positive
from swarmkit.compression import CODEC_CONFIGS, CompressionConfig
from swarmkit.control_config import ControlConfig
from swarmkit.data.config import (
    DataConfig,
    DigitsConfig,
    FashionMNISTConfig,
    HFDataConfig,
    StdlibConfig,
    SyntheticConfig,
    SyntheticKind,
    TextConfig,
)
from swarmkit.errors import ConfigError
from swarmkit.inner import AdamWConfig, OptimizerConfig, SGDConfig
from swarmkit.models.config import GPTConfig, HFModelConfig, MLPConfig, ModelConfig, ResNetConfig, ViTConfig
from swarmkit.network_config import NetworkConfig
from swarmkit.preemption import PreemptionConfig
from swarmkit.strategy import (
    DEVICES,
    AllReduceConfig,
    CO2Config,
    DeMoConfig,
    DiLoCoConfig,
    LocalSGDConfig,
    StrategyConfig,
)

MAX_JSON_BYTES = 128 << 10
MAX_JSON_DEPTH = 8  # the deepest setting lies at 3
MAX_NUMBER = 1 << 53  # beyond, a float no longer holds every integer
COUNTS = ("peers", "steps", "batch_size", "accumulate", "stages")


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """When and on how much the held-out loss is measured."""

    every: int = 100  # inner steps; 0: only at the end
    batches: int = 16  # of batch_size samples each

    def __post_init__(self) -> None:
        at_least("eval", self, 0, "every")
        at_least("eval", self, 1, "batches")


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When checkpoints are written and how many stay."""

    every: int = 0  # inner steps, rounded up to the end of a round; 0: only at the end
    keep: int = 2  # the newest so many

    def __post_init__(self) -> None:
        at_least("checkpoint", self, 0, "every")
        at_least("checkpoint", self, 1, "keep")


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """Where metrics go besides events.jsonl."""

    every: int = 10  # inner steps between two train events
    tensorboard: bool = False  # also write TensorBoard files; needs the tensorboard extra
    prometheus_port: int = 0  # serve metrics on loopback; 0: do not
    plots: bool = True  # in the report, which takes two seconds; needs the plots extra

    def __post_init__(self) -> None:
        at_least("log", self, 1, "every")
        if not 0 <= self.prometheus_port < 65536:
            raise ValueError(f"log.prometheus_port={self.prometheus_port}: not a port")


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """How `swarmkit local` supervises its peers."""

    restart: bool = False  # start a peer that died again
    baseline: bool = True  # also train one process on the same number of tokens, to compare with
    grace_s: float = 15.0  # from the first Ctrl-C until what still runs is killed

    def __post_init__(self) -> None:
        positive("launch", self, "grace_s")


@dataclass(kw_only=True, slots=True)
class SampleConfig:
    """The text that a text model writes at the end of a run."""

    prompt: str = "def "  # what it continues
    tokens: int = 200  # to write; 0 writes no sample
    temperature: float = 0.7  # 0 always takes the likeliest token
    top_k: int = 40  # chooses among so many of the likeliest tokens

    def __post_init__(self) -> None:
        at_least("sample", self, 0, "tokens", "temperature")
        at_least("sample", self, 1, "top_k")


@dataclass(kw_only=True, slots=True)
class Config:
    """Everything about a run."""

    name: str = "demo"  # of the run: its folder, and its keys on the DHT
    peers: int = 4  # processes of `swarmkit local`; shares of the data
    steps: int = 240  # inner steps of each peer
    batch_size: int = 8  # samples per peer and micro-batch
    accumulate: int = 1  # micro-batches per inner step
    seed: int = 0  # of the initial parameters, of the data's order and of the sample
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto takes CUDA when there is one
    threads: int = 1  # torch threads per peer; 0 leaves torch's own choice
    stages: int = 1  # parts that the model is cut into
    out: str = "runs"  # folder for results
    resume: str | None = None  # a run's folder, or a checkpoint, to go on from
    model: ModelConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=StdlibConfig)
    strategy: StrategyConfig = field(default_factory=LocalSGDConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ValueError("\n".join(problems))


def _out_of_range(values: Mapping[str, int]) -> Iterator[str]:
    for name, value in values.items():
        if value < 1:
            yield f"{name}={value}: must be at least 1"
        elif value >= MAX_NUMBER:
            yield f"{name}: must be below 2^53"


def _problems(config: Config) -> Iterator[str]:
    """Everything that cannot work although each part is fine in itself."""
    yield from _out_of_range({name: getattr(config, name) for name in COUNTS})
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", config.name):
        yield f"name={config.name!r}: letters, digits, - and _ only, 64 at most (it names a folder and DHT keys)"
    if not re.fullmatch(f"auto|{DEVICES}", config.device):
        yield f"device={config.device!r}: must be auto, cpu, cuda, cuda:N or mps"
    if config.threads < 0:
        yield f"threads={config.threads}: must be 0 or more"
    layers = getattr(config.model, "layers", None)
    if config.stages > 1 and layers is not None and config.stages > layers:
        yield f"stages={config.stages}: the model has only {layers} layers (model.layers); a stage needs at least one"
    elif config.stages > 1:
        yield f"stages={config.stages}: pipelines are not part of this version; use stages=1"
    sync = getattr(config.strategy, "sync", None)
    if sync is not None and config.steps >= 1 and sync.h > config.steps:
        yield (
            f"strategy.sync.h={sync.h}: longer than the whole training (steps={config.steps}); "
            "the peers would meet only once, at the end"
        )
    is_reduced = config.compression.name in ("none", "fp16", "bf16") and not isinstance(config.strategy, DeMoConfig)
    if config.network.trim > 0 and not is_reduced:
        yield (
            f"network.trim={config.network.trim}: only what is reduced as it is can be trimmed; "
            "use compression=none, fp16 or bf16, and not strategy=demo"
        )
    if isinstance(config.strategy, DeMoConfig) and config.compression.name != "none":
        yield (
            f"compression={config.compression.name}: strategy=demo sends DCT coefficients, which no codec takes; "
            "set strategy.values and strategy.k instead, with compression=none"
        )
    if config.optimizer.warmup(config.steps) >= config.steps >= 1:
        yield f"optimizer.warmup_steps={config.optimizer.warmup_steps}: must be below steps={config.steps}"
    if not 0 <= config.seed < MAX_NUMBER:
        yield f"seed={config.seed}: must be at least 0 and below 2^53"
    if config.network.min_peers > config.peers >= 1:
        yield f"network.min_peers={config.network.min_peers}: more than peers={config.peers} will ever be there"
    yield from _misfits(config.model, config.data)


def has_images(data: DataConfig) -> bool:
    """True for a source of images, False for one of tokens."""
    if isinstance(data, SyntheticConfig):
        return data.kind is SyntheticKind.images
    return isinstance(data, DigitsConfig | FashionMNISTConfig)


def _misfits(model: ModelConfig, data: DataConfig) -> Iterator[str]:
    """Models and data that do not fit together."""
    images = has_images(data)
    wants_images = isinstance(model, MLPConfig | ResNetConfig | ViTConfig)
    if images != wants_images:
        have, want = ("images", "tokens") if images else ("tokens", "images")
        fitting = "model=mlp, resnet or vit" if images else "data=digits or fashion_mnist"
        yield f"model={model.name}: it learns from {want}, data={data.name} has {have}; use {fitting}"
    side = {"digits": 8, "fashion_mnist": 28}.get(data.name, getattr(data, "side", 0))
    if images and isinstance(model, ViTConfig) and side % model.patch:
        yield f"model.patch={model.patch}: must divide the images' {side} pixels"


GROUPS: dict[str, dict[str, type]] = {
    "model": {"gpt": GPTConfig, "mlp": MLPConfig, "resnet": ResNetConfig, "vit": ViTConfig, "hf": HFModelConfig},
    "data": {
        "stdlib": StdlibConfig,
        "text": TextConfig,
        "digits": DigitsConfig,
        "fashion_mnist": FashionMNISTConfig,
        "hf": HFDataConfig,
        "synthetic": SyntheticConfig,
    },
    "strategy": {
        "allreduce": AllReduceConfig,
        "local_sgd": LocalSGDConfig,
        "diloco": DiLoCoConfig,
        "co2": CO2Config,
        "demo": DeMoConfig,
    },
    "compression": CODEC_CONFIGS,
    "optimizer": {"adamw": AdamWConfig, "sgd": SGDConfig},
    "network": {"local": NetworkConfig, "lan": NetworkConfig, "wan": NetworkConfig},
}


def to_config(composed: DictConfig) -> Config:
    """Build the dataclasses part by part, so that the problems of all parts are told at once; raises ConfigError."""
    problems: list[str] = []
    for key in composed:
        if OmegaConf.is_missing(composed, key):
            problems.append(f"{key!s}: has no value")
        elif isinstance(part := composed[key], DictConfig):
            problems += _build_problems(part)
    if not problems:
        try:
            config = OmegaConf.to_object(composed)
        except ValueError as error:
            problems += str(error).splitlines()
        else:
            assert isinstance(config, Config)
            return config
    else:
        problems += _out_of_range({name: composed[name] for name in COUNTS if not OmegaConf.is_missing(composed, name)})
    raise ConfigError("\n".join(problems))


def _build_problems(part: DictConfig) -> list[str]:
    try:
        OmegaConf.to_object(part)
    except MissingMandatoryValue as error:
        return [f"{error.full_key}: has no value"]
    except ValueError as error:
        return str(error).splitlines()
    except OmegaConfBaseException as error:
        # Such as a list within a list of numbers, which no check of ours expects.
        return [f"{part._get_full_key(None)}: {str(error).splitlines()[0][:300]}"]
    return []


def config_to_yaml(config: Config) -> str:
    """The whole configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def config_to_json(config: Config) -> str:
    """The whole configuration as JSON, for the DHT; enumerations by name."""
    return json.dumps(OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True))


def config_to_publish(config: Config) -> str:
    """The configuration that joiners get: without the paths, commands and ports of this machine's own services."""
    return config_to_json(replace(config, control=ControlConfig(), preemption=PreemptionConfig()))


def config_from_json(text: str) -> Config:
    """Read a configuration that another peer published; raises ConfigError. Nothing in it is executed or resolved."""
    if len(text) > MAX_JSON_BYTES:
        raise ConfigError(f"configuration of {len(text)} characters: the limit is {MAX_JSON_BYTES}")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the published configuration is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("the published configuration is not a JSON object")
    _refuse_unsafe(values)
    schema = OmegaConf.structured(Config)
    try:
        for group, choices in GROUPS.items():
            section = values.get(group)
            name = section.get("name") if isinstance(section, dict) else None
            if group == "network":
                continue
            if not isinstance(name, str) or name not in choices:
                raise ConfigError(f"the published configuration has {group}.name={str(name)[:40]!r}, unknown here")
            schema[group] = OmegaConf.structured(choices[name])
        OmegaConf.set_struct(schema, True)
        merged = OmegaConf.merge(schema, values)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0][:300]
        raise ConfigError(f"the published configuration does not fit this version: {reason}") from error
    assert isinstance(merged, DictConfig)
    return to_config(merged)


def _refuse_unsafe(value: object, depth: int = 0) -> None:
    """Raise ConfigError for an interpolation, however it was escaped, and for nesting that no configuration has."""
    if depth > MAX_JSON_DEPTH:
        raise ConfigError("the published configuration is nested too deeply")
    if isinstance(value, str) and ("${" in value or value == "???"):
        raise ConfigError("the published configuration holds an interpolation or a missing value")
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    for item in inner:
        _refuse_unsafe(item, depth + 1)


def as_dict(config: Config) -> dict[str, Any]:
    """Plain containers, for manifests and events."""
    values = json.loads(config_to_json(config))
    assert isinstance(values, dict)
    return values


def with_own_settings(config: Config, overrides: Sequence[str], allowed: Sequence[str]) -> Config:
    """Apply overrides that may only touch the keys and sections in `allowed`; raises ConfigError."""
    values = as_dict(config)
    for override in overrides:
        key, equals, _ = override.lstrip("+").partition("=")
        if not equals or not any(key == name or key.startswith(f"{name}.") for name in allowed):
            raise ConfigError(f"{override}: only {', '.join(allowed)} can be set here")
    # Here, because peers read configurations too, and have no overrides to parse.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    changed = OmegaConf.create(values)
    try:
        for change in OverridesParser.create().parse_overrides(list(overrides)):
            OmegaConf.update(changed, change.key_or_group, change.value())
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from error
    return config_from_json(json.dumps(OmegaConf.to_container(changed)))
