"""What the tests of models share: specs, seeded batches, and a short training."""

import torch
from torch import Tensor, nn

from swarmkit.data.config import DigitsConfig, Split
from swarmkit.data.corpus import Corpus, DataSpec
from swarmkit.data.sources import load_corpus
from swarmkit.data.stream import Stream


def tokens(context: int, classes: int = 256) -> DataSpec:
    return DataSpec(kind="tokens", classes=classes, shape=(context,))


def images(*shape: int) -> DataSpec:
    return DataSpec(kind="images", classes=10, shape=shape)


def random_tokens(*shape: int, classes: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def fit(model: nn.Module, inputs: Tensor, targets: Tensor, *, steps: int, lr: float) -> float:
    """Train on one batch and return its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(inputs, targets).backward()
        optimizer.step()
    return model.loss(inputs, targets).item()


def digits() -> Corpus:
    return load_corpus(DigitsConfig(), context=1)


def accuracy_on_digits(model: nn.Module, corpus: Corpus, *, steps: int, lr: float, batch: int = 64) -> float:
    """Train on digits and return the share of held-out ones that the model gets right."""
    stream = Stream(corpus, slot=0, slots=1, batch_size=batch, seed=0, split=Split.iid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(*stream.next()).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        right = [model(b.inputs).argmax(1) == b.targets for b in corpus.validation(256, 100)]
    return torch.cat(right).float().mean().item()
