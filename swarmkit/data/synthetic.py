"""Made-up data with structure that can be learnt: a Markov chain of symbols, or noisy class prototypes."""

import numpy as np
import torch

from swarmkit.data.config import SyntheticConfig, SyntheticKind
from swarmkit.data.corpus import ImageCorpus, TokenCorpus, held_out_split


def load_synthetic(config: SyntheticConfig, *, context: int) -> TokenCorpus | ImageCorpus:
    """Make the data of `config`, the same on all peers."""
    return _tokens(config, context) if config.kind is SyntheticKind.tokens else _images(config)


def _tokens(config: SyntheticConfig, context: int) -> TokenCorpus:
    """Each symbol is followed by one of two, with odds of 9 to 1: about 0.47 bits per symbol are left to chance."""
    rng = np.random.default_rng(0)
    likely = rng.permutation(config.classes)
    rare = likely[(np.arange(config.classes) + 1) % config.classes]
    # Many chains side by side, because one cannot be vectorised; each makes a thousand tokens in a row.
    chains = np.empty((config.samples, 1000), dtype=np.uint32)
    chains[:, 0] = rng.integers(config.classes, size=config.samples)
    for step in range(1, 1000):
        last = chains[:, step - 1]
        chains[:, step] = np.where(rng.random(config.samples) < 0.1, rare[last], likely[last])
    tokens = chains.reshape(-1)
    cut = round((1 - config.validation) * len(tokens))
    return TokenCorpus([tokens[:cut]], [tokens[cut:]], context=context, classes=config.classes, source="synthetic")


def _images(config: SyntheticConfig) -> ImageCorpus:
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(config.classes, 1, config.side, config.side, generator=generator)
    labels = torch.randint(config.classes, (config.samples,), generator=generator)
    images = prototypes[labels] + 0.7 * torch.randn(config.samples, 1, config.side, config.side, generator=generator)
    parts = held_out_split(images, labels, config.validation)
    return ImageCorpus(*parts, classes=config.classes, source="synthetic")
