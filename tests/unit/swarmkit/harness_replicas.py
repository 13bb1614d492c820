"""Small replicas for the tests of training: a model that learns in a second, data that need no file."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmkit.build import build_trainer, open_corpus, open_stream
from swarmkit.config import CheckpointConfig, Config, EvalConfig, LogConfig, SampleConfig
from swarmkit.data.config import SyntheticConfig
from swarmkit.inner import AdamWConfig
from swarmkit.models.config import GPTConfig
from swarmkit.optim import Collective
from swarmkit.strategy import (
    AllReduceConfig,
    CO2Config,
    DeMoConfig,
    DiLoCoConfig,
    LocalSGDConfig,
    StrategyConfig,
    SyncConfig,
)
from swarmkit.surroundings import Surroundings
from swarmkit.trainer import Trainer


class Recorder:
    """Keeps events in memory."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def emit(self, kind: str, **fields: object) -> None:
        self.events.append({"kind": kind, **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


class Donor(Surroundings):
    """A swarm in which the state comes from a given function."""

    def __init__(self, fetch: Callable[[], tuple[dict[str, Tensor], Mapping[str, Any]]]) -> None:
        self._fetch = fetch
        self.fetched = 0
        self.said: list[str] = []  # states that the others were told

    def fetch_state(self) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
        self.fetched += 1
        self.said.append("downloading")
        return self._fetch()

    def change_state(self, state: str) -> None:
        self.said.append(state)


STRATEGIES: dict[str, StrategyConfig] = {
    "allreduce": AllReduceConfig(),
    "local_sgd": LocalSGDConfig(sync=SyncConfig(h=4)),
    "diloco": DiLoCoConfig(sync=SyncConfig(h=4), outer_lr=0.7, outer_momentum=0.6),
    "eager": DiLoCoConfig(sync=SyncConfig(h=4), outer_lr=0.4, outer_momentum=0.6, eager=True),
    "streaming": DiLoCoConfig(sync=SyncConfig(h=4), outer_lr=0.7, fragments=2, overlap_steps=1, mixing=0.5),
    "co2": CO2Config(sync=SyncConfig(h=4)),
    "demo": DeMoConfig(chunk=16, k=4),
}


def small_config(strategy: str = "diloco", **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "peers": 2,
        "steps": 16,
        "batch_size": 8,
        "device": "cpu",
        "model": GPTConfig(layers=1, dim=16, heads=2, context=16),
        "data": SyntheticConfig(samples=8, classes=16),
        "strategy": STRATEGIES[strategy],
        "optimizer": AdamWConfig(lr=1e-2, warmup_steps=2),
        "eval": EvalConfig(every=0, batches=4),
        "checkpoint": CheckpointConfig(every=8, keep=4),
        "log": LogConfig(every=4),
        "sample": SampleConfig(tokens=8),
    }
    return Config(**{**settings, **changes})


def small_trainer(
    config: Config,
    collective: Collective,
    rank: int,
    folder: Path,
    *,
    events: Recorder | None = None,
    surroundings: Surroundings | None = None,
) -> Trainer:
    torch.set_num_threads(1)
    corpus = open_corpus(config)
    return build_trainer(
        config,
        collective=collective,
        corpus=corpus,
        source=open_stream(config, corpus, rank),
        events=events or Recorder(),
        checkpoints=folder / f"peer-{rank}" / "checkpoints",
        surroundings=surroundings,
        slot=rank,
    )
