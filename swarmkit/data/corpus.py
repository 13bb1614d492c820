"""Corpora: samples that can be fetched by number, sorted into domains; what streams and splits work on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swarmkit.errors import DataError

Indices = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """Inputs and targets: int64 [batch, context] twice, or float32 [batch, channels, height, width], int64 [batch]."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """What a model must fit."""

    kind: Literal["tokens", "images"]
    classes: int  # size of the vocabulary, or number of labels
    shape: tuple[int, ...]  # of one input: (context,) or (channels, height, width)


class Corpus(Protocol):
    """Training samples numbered from 0, a domain for each, and a held-out set."""

    spec: DataSpec

    def domains(self) -> Indices:
        """The domain (file, folder, class) of every training sample."""
        ...

    def fetch(self, indices: Indices) -> Batch:
        """Get training samples by number."""
        ...

    def validation(self, batch_size: int, max_batches: int) -> Iterator[Batch]:
        """Yield the held-out samples, or the first `max_batches` batches of them; the same on all peers."""
        ...


class TokenCorpus:
    """Text as one array of tokens per domain, cut into windows that do not overlap."""

    def __init__(
        self,
        train: Sequence[npt.NDArray[np.generic]],
        held_out: Sequence[npt.NDArray[np.generic]],
        *,
        context: int,
        classes: int = 256,
        source: str,
    ) -> None:
        self.spec = DataSpec(kind="tokens", classes=classes, shape=(context,))
        self._train, self._train_starts, self._domains = _cut(train, context)
        self._held_out, self._held_out_starts, _ = _cut(held_out, context)
        for part, starts in (("training", self._train_starts), ("validation", self._held_out_starts)):
            if not len(starts):
                raise DataError(
                    f"{source}: the {part} part has no window of context + 1 = {context + 1} tokens; "
                    "use more text, a smaller model.context, or another data.validation"
                )

    def domains(self) -> Indices:
        """See Corpus."""
        return self._domains

    def fetch(self, indices: Indices) -> Batch:
        """See Corpus."""
        return self._windows(self._train, self._train_starts[indices])

    def validation(self, batch_size: int, max_batches: int) -> Iterator[Batch]:
        """See Corpus; windows are spread evenly over the held-out text."""
        count = min(len(self._held_out_starts), batch_size * max_batches)
        chosen = np.linspace(0, len(self._held_out_starts) - 1, count).astype(np.int64)
        for start in range(0, count, batch_size):
            yield self._windows(self._held_out, self._held_out_starts[chosen[start : start + batch_size]])

    def _windows(self, tokens: npt.NDArray[np.generic], starts: Indices) -> Batch:
        context = self.spec.shape[0]
        windows = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
        return Batch(windows[:, :-1], windows[:, 1:])


def _cut(parts: Sequence[npt.NDArray[np.generic]], context: int) -> tuple[npt.NDArray[np.generic], Indices, Indices]:
    """Join parts and return all tokens, the start of every window, and each window's part; none crosses a border."""
    starts, domains, offset = [], [], 0
    for number, part in enumerate(parts):
        count = max(0, (len(part) - 1) // context)
        starts.append(offset + context * np.arange(count, dtype=np.int64))
        domains.append(np.full(count, number, dtype=np.int64))
        offset += len(part)
    empty = np.empty(0, dtype=np.int64)
    joined = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)
    return joined, np.concatenate([empty, *starts]), np.concatenate([empty, *domains])


class ImageCorpus:
    """Labelled images in memory; the label is the domain."""

    def __init__(
        self, images: Tensor, labels: Tensor, held_images: Tensor, held_labels: Tensor, *, classes: int, source: str
    ) -> None:
        for part, pictures, answers in (("training", images, labels), ("validation", held_images, held_labels)):
            if not len(pictures) or len(pictures) != len(answers):
                raise DataError(f"{source}: {len(pictures)} {part} images and {len(answers)} labels")
            if not torch.isfinite(pictures).all():
                raise DataError(f"{source}: a {part} image holds values that are not finite")
            if answers.min() < 0 or answers.max() >= classes:
                raise DataError(f"{source}: {part} labels reach from {answers.min()} to {answers.max()}")
        self.spec = DataSpec(kind="images", classes=classes, shape=tuple(images.shape[1:]))
        self._images, self._labels = images.float(), labels.long()
        self._held_images, self._held_labels = held_images.float(), held_labels.long()

    def domains(self) -> Indices:
        """See Corpus."""
        labels: Indices = self._labels.numpy()
        return labels

    def fetch(self, indices: Indices) -> Batch:
        """See Corpus."""
        chosen = torch.from_numpy(indices)
        return Batch(self._images[chosen], self._labels[chosen])

    def validation(self, batch_size: int, max_batches: int) -> Iterator[Batch]:
        """See Corpus."""
        count = min(len(self._held_labels), batch_size * max_batches)
        for start in range(0, count, batch_size):
            stop = min(start + batch_size, count)
            yield Batch(self._held_images[start:stop], self._held_labels[start:stop])


def held_out_split(
    images: Tensor, labels: Tensor, share: float, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split labelled images into training and held-out parts by a fixed permutation, the same on all peers."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    cut = max(1, round(share * len(labels)))
    held, train = order[:cut], order[cut:]
    return images[train], labels[train], images[held], labels[held]
