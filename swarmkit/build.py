"""From a configuration to a trainer: corpus, model, optimizer, strategy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarmkit.config import Config
from swarmkit.data.corpus import Batch, Corpus
from swarmkit.data.sources import load_corpus
from swarmkit.data.stream import Stream
from swarmkit.errors import ConfigError
from swarmkit.inner import build_inner
from swarmkit.models.build import build_model, context_of
from swarmkit.optim import Collective, Pace
from swarmkit.optim.synced import SyncedOptimizer, parameter_names
from swarmkit.strategy import build_strategy
from swarmkit.surroundings import Events, Source, Surroundings
from swarmkit.trainer import Trainer


class Together:
    """Several streams as one, a batch of each in turn: what a swarm reads, for a single process."""

    def __init__(self, streams: Sequence[Source]) -> None:
        self._streams = list(streams)
        self._turn = 0

    def next(self) -> Batch:
        """Draw from the stream whose turn it is."""
        batch = self._streams[self._turn].next()
        self._turn = (self._turn + 1) % len(self._streams)
        return batch

    @property
    def position(self) -> int:
        """See Source."""
        return sum(stream.position for stream in self._streams)

    def state(self) -> Mapping[str, Any]:
        """See Source."""
        return {"turn": self._turn, "streams": [dict(stream.state()) for stream in self._streams]}

    def load(self, state: Mapping[str, Any]) -> None:
        """See Source."""
        self._turn = int(state["turn"])
        for stream, position in zip(self._streams, state["streams"], strict=True):
            stream.load(position)

    def seek(self, samples: int) -> None:
        """See Source."""
        self._turn = 0
        for stream in self._streams:
            stream.seek(samples // len(self._streams))


def pick_device(name: str) -> torch.device:
    """The device that a configuration names; auto is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name}: this machine has no CUDA device that torch can use; use device=cpu or auto")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device={name}: torch finds no MPS device here; use device=cpu or auto")
    return device


def open_corpus(config: Config) -> Corpus:
    """Load the run's data."""
    return load_corpus(config.data, context=context_of(config.model))


def open_stream(config: Config, corpus: Corpus, slot: int) -> Stream:
    """The training stream of one slot."""
    return Stream(
        corpus,
        slot=slot,
        slots=config.peers,
        batch_size=config.batch_size,
        seed=config.seed,
        split=config.data.split,
        alpha=config.data.alpha,
    )


def build_optimizer(
    config: Config, model: nn.Module, collective: Collective, pace: Pace | None = None
) -> SyncedOptimizer:
    """Wrap the configured inner optimizer in the configured strategy."""
    kept = model.state_dict()
    return build_strategy(
        config.strategy,
        build_inner(config.optimizer, [p for p in model.parameters() if p.requires_grad]),
        collective=collective,
        pace=pace,
        compression=config.compression,
        clip=config.optimizer.clip or None,
        seed=config.seed,
        total_steps=config.steps,
        warmup_steps=config.optimizer.warmup(config.steps),
        names=parameter_names(model),
        # Not those that a model derives from its settings, as tables of angles.
        buffers=[buffer for name, buffer in model.named_buffers() if name in kept],
    )


def build_trainer(
    config: Config,
    *,
    collective: Collective,
    pace: Pace | None = None,
    corpus: Corpus,
    source: Source,
    events: Events,
    checkpoints: Path,
    surroundings: Surroundings | None = None,
    evaluates_alone: bool = False,
    slot: int = 0,
) -> Trainer:
    """Everything that one replica needs: the same weights on every peer, random numbers of its own (dropout)."""
    device = pick_device(config.device)
    model = build_model(config.model, corpus.spec, seed=config.seed).to(device)
    torch.manual_seed(config.seed + 1_000_003 * (slot + 1))
    return Trainer(
        config,
        model=model,
        optimizer=build_optimizer(config, model, collective, pace),
        source=source,
        corpus=corpus,
        events=events,
        checkpoints=checkpoints,
        device=device,
        surroundings=surroundings,
        evaluates_alone=evaluates_alone,
    )
