"""Made-up data: the same everywhere, and with the structure that it promises."""

import numpy as np
import pytest
import torch

from swarmkit.data.config import SyntheticConfig, SyntheticKind
from swarmkit.data.corpus import ImageCorpus, TokenCorpus
from swarmkit.data.synthetic import load_synthetic

IMAGES = SyntheticConfig(kind=SyntheticKind.images, samples=1000)
TOKENS = SyntheticConfig(samples=100)


@pytest.mark.parametrize("config", [IMAGES, TOKENS], ids=["images", "tokens"])
def test_it_is_the_same_on_all_peers(config: SyntheticConfig) -> None:
    one, two = (load_synthetic(config, context=16).fetch(np.arange(50)) for _ in range(2))
    assert torch.equal(one.inputs, two.inputs)
    assert torch.equal(one.targets, two.targets)


def test_tokens_leave_as_much_to_chance_as_is_said() -> None:
    corpus = load_synthetic(TOKENS, context=64)
    assert isinstance(corpus, TokenCorpus)
    batch = corpus.fetch(np.arange(corpus.size))
    pairs = torch.zeros(10, 10).index_put_((batch.inputs, batch.targets), torch.tensor(1.0), accumulate=True)
    odds = pairs / pairs.sum(dim=1, keepdim=True)
    bits = -(pairs / pairs.sum() * odds.clamp(min=1e-12).log2()).sum()
    assert 0.45 < bits < 0.56
    assert set(batch.inputs.flatten().tolist()) == set(range(10))


def test_images_are_told_apart_by_their_class_means() -> None:
    corpus = load_synthetic(IMAGES, context=1)
    assert isinstance(corpus, ImageCorpus)
    batch = corpus.fetch(np.arange(corpus.size))
    means = torch.stack([batch.inputs[batch.targets == label].mean(0) for label in range(10)]).flatten(1)
    (held,) = corpus.validation(1000, 1)
    nearest = torch.cdist(held.inputs.flatten(1), means).argmin(1)
    assert (nearest == held.targets).float().mean() > 0.95
