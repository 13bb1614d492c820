"""Validation loss and generated text, at the anchor rather than at one peer's own parameters."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from swarmkit.config import SampleConfig
from swarmkit.data.corpus import Batch
from swarmkit.models.build import TextModel
from swarmkit.optim.synced import SyncedOptimizer, parameter_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well a model predicts held-out data."""

    loss: float  # mean cross entropy in nats
    accuracy: float  # share of predictions whose best guess is right
    targets: int  # predictions scored

    @property
    def bpb(self) -> float:
        """Bits per prediction; per byte when the model reads bytes."""
        return self.loss / math.log(2)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> Score:
    """Score a model on batches, each prediction counting once."""
    was_training = model.training
    model.eval()
    nats, right, count = 0.0, 0, 0
    try:
        for batch in batches:
            targets = batch.targets.to(device).reshape(-1)
            logits = model(batch.inputs.to(device)).reshape(len(targets), -1).float()
            nats += nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            right += int((logits.argmax(-1) == targets).sum())
            count += len(targets)
    finally:
        model.train(was_training)
    if not count:
        raise ValueError("nothing to evaluate: there was no validation batch")
    return Score(loss=nats / count, accuracy=right / count, targets=count)


@contextmanager
def at_anchor(model: nn.Module, optimizer: SyncedOptimizer) -> Iterator[None]:
    """Give the model the parameters that all peers agreed on last, for a while."""
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    anchor = optimizer.anchor()
    with torch.no_grad():
        for parameter, name in parameter_names(model).items():
            if name in anchor:
                own.append((parameter, parameter.detach().clone()))
                parameter.copy_(anchor[name])
        try:
            yield
        finally:
            for parameter, value in own:
                parameter.copy_(value)


def continue_text(model: nn.Module, settings: SampleConfig, *, seed: int, device: torch.device) -> str:
    """Let a model of bytes go on from the prompt, the same for the same seed."""
    # A prompt of any bytes can be typed; those that are no UTF-8 reach Python as surrogates.
    typed = settings.prompt.encode(errors="surrogateescape")
    prompt = torch.tensor(list(typed) or [10], dtype=torch.long, device=device)
    tokens = cast(TextModel, model).generate(
        prompt,
        settings.tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        generator=torch.Generator(device).manual_seed(seed),
    )
    return bytes(tokens.tolist()).decode(errors="replace")
