"""Small corpora whose samples can be recognised: what the tests of streams and splits draw from."""

from collections.abc import Iterator

import numpy as np
import torch
from hypothesis import strategies as st

from swarmkit.data.config import Split
from swarmkit.data.corpus import Batch, DataSpec
from swarmkit.data.permutation import Indices
from swarmkit.data.stream import Stream


class Numbered:
    """Sample k is the number k."""

    def __init__(self, size: int, domains: list[int] | None = None) -> None:
        self.spec = DataSpec(kind="images", classes=2, shape=(1, 1, 1))
        self.size = size
        self._domains = np.array(domains if domains is not None else [0] * size, dtype=np.int64)

    def domains(self) -> Indices:
        return self._domains

    def fetch(self, indices: Indices) -> Batch:
        numbers = torch.from_numpy(indices)
        return Batch(numbers, numbers)

    def validation(self, batch_size: int, max_batches: int) -> Iterator[Batch]:
        return iter(())


def stream(
    corpus: Numbered, slot: int = 0, slots: int = 1, *, batch_size: int = 4, seed: int = 0, split: Split = Split.iid
) -> Stream:
    return Stream(corpus, slot=slot, slots=slots, batch_size=batch_size, seed=seed, split=split)


def draw(source: Stream, batches: int) -> list[int]:
    return [number for _ in range(batches) for number in source.next().inputs.tolist()]


splits = st.sampled_from(list(Split))
