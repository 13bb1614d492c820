"""The one description of every setting: dataclasses, composed by Hydra, checked as a whole before anything starts."""

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from swarmkit.checks import at_least, positive
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
from swarmkit.models.config import GPTConfig, HFModelConfig, MLPConfig, ModelConfig, ResNetConfig, ViTConfig
from swarmkit.network_config import NetworkConfig
from swarmkit.strategy import (
    AdamWConfig,
    AllReduceConfig,
    CompressionConfig,
    DiLoCoConfig,
    LocalSGDConfig,
    OptimizerConfig,
    SGDConfig,
    StrategyConfig,
)

MAX_JSON_BYTES = 128 << 10
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
    tensorboard: bool = False
    prometheus_port: int = 0  # serve metrics on loopback; 0: do not

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

    prompt: str = "def "
    tokens: int = 200
    temperature: float = 0.7
    top_k: int = 40

    def __post_init__(self) -> None:
        at_least("sample", self, 0, "tokens", "temperature")
        at_least("sample", self, 1, "top_k")


@dataclass(kw_only=True, slots=True)
class Config:
    """Everything about a run."""

    name: str = "demo"  # of the run: its folder, and its keys on the DHT
    peers: int = 4  # processes of `swarmkit local`; shares of the data
    steps: int = 400  # inner steps of each peer
    batch_size: int = 8  # samples per peer and micro-batch
    accumulate: int = 1  # micro-batches per inner step
    seed: int = 0
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto takes CUDA when there is one
    threads: int = 1  # torch threads per peer; 0 leaves torch's own choice
    stages: int = 1  # parts that the model is cut into
    out: str = "runs"  # folder for results
    resume: str | None = None  # a run's folder, or a checkpoint, to go on from
    model: ModelConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=StdlibConfig)
    strategy: StrategyConfig = field(default_factory=DiLoCoConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ValueError("\n".join(problems))


def _too_few(values: Mapping[str, int]) -> Iterator[str]:
    for name, value in values.items():
        if value < 1:
            yield f"{name}={value}: must be at least 1"


def _problems(config: Config) -> Iterator[str]:
    """Everything that cannot work although each part is fine in itself."""
    yield from _too_few({name: getattr(config, name) for name in COUNTS})
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", config.name):
        yield f"name={config.name!r}: letters, digits, - and _ only, 64 at most (it names a folder and DHT keys)"
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", config.device):
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
    if config.optimizer.warmup_steps >= config.steps >= 1:
        yield f"optimizer.warmup_steps={config.optimizer.warmup_steps}: must be below steps={config.steps}"
    if config.network.min_peers > config.peers:
        yield f"network.min_peers={config.network.min_peers}: more than peers={config.peers} will ever be there"
    yield from _misfits(config.model, config.data)


def _misfits(model: ModelConfig, data: DataConfig) -> Iterator[str]:
    """Models and data that do not fit together."""
    images = isinstance(data, DigitsConfig | FashionMNISTConfig) or (
        isinstance(data, SyntheticConfig) and data.kind is SyntheticKind.images
    )
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
    "strategy": {"allreduce": AllReduceConfig, "local_sgd": LocalSGDConfig, "diloco": DiLoCoConfig},
    "compression": {"none": CompressionConfig},
    "optimizer": {"adamw": AdamWConfig, "sgd": SGDConfig},
    "network": {"local": NetworkConfig, "wan": NetworkConfig},
}


def _register() -> None:
    store = ConfigStore.instance()
    schema = OmegaConf.structured(Config)
    for group in GROUPS:
        # Of the group's type but without a value: a default of one choice would not let another be merged in.
        schema[group] = MISSING
    store.store(name="schema", node=schema)
    for group, choices in GROUPS.items():
        for name, node in choices.items():
            # Under a name of its own: conf/<group>/<name>.yaml begins with it and says what differs.
            store.store(group=group, name=f"{name}_schema", node=node)


def load_config(overrides: Sequence[str] = ()) -> Config:
    """Compose and check the configuration; raises ConfigError naming every key, value and reason at once."""
    added = [override for override in overrides if override.startswith("+") and not override.startswith("+experiment=")]
    if added:
        key = added[0].lstrip("+").partition("=")[0]
        raise ConfigError(_unknown_key(key, overrides))
    _register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(config_module="swarmkit.conf", version_base="1.3"):
            composed = compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException, ConfigCompositionException) as error:
        raise ConfigError(_explain(error, overrides)) from error
    return _to_config(composed)


def _to_config(composed: DictConfig) -> Config:
    """Build the dataclasses part by part, so that the problems of all parts are told at once."""
    problems: list[str] = []
    for key in composed:
        part = composed[key]
        if isinstance(part, DictConfig):
            problems += _build_problems(part)
    if not problems:
        try:
            config = OmegaConf.to_object(composed)
        except (ValueError, OmegaConfBaseException) as error:
            problems += str(error).splitlines()
        else:
            assert isinstance(config, Config)
            return config
    else:
        problems += _too_few({name: composed[name] for name in COUNTS})
    raise ConfigError("\n".join(problems))


def _build_problems(part: DictConfig) -> list[str]:
    try:
        OmegaConf.to_object(part)
    except (ValueError, OmegaConfBaseException) as error:
        return str(error).splitlines()
    return []


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """One line for what Hydra says in several: the key, the value, the reason and the nearest valid key."""
    text = str(error)
    cause = error.__cause__
    if cause is not None:
        text = f"{text}\n{cause}"
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        group = key.partition("@")[0]
        if group in GROUPS and f"{group}/{value}" in text.replace("'", ""):
            return f"{override}: no such {group}; {_nearest(value, list(GROUPS[group]))}"
    match = re.search(r"Key '([^']+)' (?:is )?not in '([^']+)'", text) or re.search(
        r"Could not override '([^']+)'", text
    )
    if match is not None and ("not in" in text or "struct" in text):
        return _unknown_key(_override_key(overrides, match[1]), overrides)
    lines = [line.strip() for line in text.splitlines() if line.strip() and "full_key" not in line]
    full_key = re.search(r"full_key: (\S+)", text)
    prefix = f"{full_key[1]}: " if full_key is not None else ""
    return prefix + "; ".join(dict.fromkeys(line for line in lines if "object_type" not in line))


def _unknown_key(key: str, overrides: Sequence[str]) -> str:
    """Say that a key does not exist, and where it does or which one is near."""
    group, _, rest = key.partition(".")
    owners = [
        name
        for name, node in GROUPS.get(group, {}).items()
        if rest in {entry.name for entry in dataclasses.fields(node)}
    ]
    if owners and key not in valid_keys(overrides):
        return f"{key}: unknown key here; only {group}={' or '.join(owners)} has it"
    return f"{key}: unknown key; {_nearest(key, list(valid_keys(overrides)))}"


def _override_key(overrides: Sequence[str], name: str) -> str:
    keys = [override.lstrip("+~").partition("=")[0] for override in overrides]
    return next((key for key in keys if key == name or key.endswith(f".{name}") or name in key.split(".")), name)


def _nearest(wrong: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(wrong, valid, n=1, cutoff=0.5)
    if not close:
        # The right word in the wrong section is more likely than a far-fetched spelling.
        last = wrong.rpartition(".")[2]
        close = [key for key in valid if key.rpartition(".")[2] == last][:1]
    listed = ", ".join(valid) if len(valid) <= 12 else "see `swarmkit config`"
    return f"did you mean {close[0]}? (valid: {listed})" if close else f"valid: {listed}"


def valid_keys(overrides: Sequence[str] = ()) -> Iterator[str]:
    """Every dotted key that the choices in `overrides` leave valid."""
    chosen = {"model": "gpt", "data": "stdlib", "strategy": "diloco", "optimizer": "adamw"}
    for override in overrides:
        key, _, value = override.partition("=")
        if key in GROUPS and value in GROUPS[key]:
            chosen[key] = value

    def walk(kind: type, prefix: str) -> Iterator[str]:
        for entry in dataclasses.fields(kind):
            name = f"{prefix}{entry.name}"
            yield name
            inner = GROUPS[entry.name][chosen[entry.name]] if not prefix and entry.name in chosen else entry.type
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):
                yield from walk(inner, f"{name}.")

    yield from walk(Config, "")


def config_to_yaml(config: Config) -> str:
    """The whole configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def config_to_json(config: Config) -> str:
    """The whole configuration as JSON, for the DHT; enumerations by name."""
    return json.dumps(OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True))


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
    if "${" in text:
        raise ConfigError("the published configuration holds an interpolation, which nobody's should")
    schema = OmegaConf.structured(Config)
    try:
        for group, choices in GROUPS.items():
            name = values.get(group, {}).get("name", "") if isinstance(values.get(group), dict) else ""
            if group != "network" and name not in choices:
                raise ConfigError(f"the published configuration has {group}.name={str(name)[:40]!r}, unknown here")
            if group != "network":
                schema[group] = OmegaConf.structured(choices[name])
        OmegaConf.set_struct(schema, True)
        merged = OmegaConf.merge(schema, values)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"the published configuration does not fit this version: {str(error).splitlines()[0]}"
        ) from error
    assert isinstance(merged, DictConfig)
    return _to_config(merged)


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
    changes = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(changes, dict)
    merged = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(values), changes))
    return config_from_json(json.dumps(merged))
