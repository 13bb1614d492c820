"""Corpora: samples that can be fetched by number, sorted into domains; what streams and splits work on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swarmkit.data.permutation import Indices, Permutation
from swarmkit.errors import DataError

Tokens = npt.NDArray[np.unsignedinteger]


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
    size: int  # training samples

    def domains(self) -> Indices:
        """The domain (file, folder, class) of every training sample."""
        ...

    def fetch(self, indices: Indices) -> Batch:
        """Get training samples by number."""
        ...

    def validation(self, batch_size: int, max_batches: int) -> Iterator[Batch]:
        """Yield the held-out samples, or `max_batches` batches spread over them; the same on all peers."""
        ...


class Windows:
    """Arrays of tokens, cut into windows of context + 1 that share one token with the next; none crosses an end.

    The arrays are used as they come, memory-mapped ones too; what is kept besides does not grow with their lengths.
    """

    def __init__(self, parts: Sequence[Tokens], context: int) -> None:
        self._parts = [np.asarray(part) for part in parts if len(part) > context]
        self._context = context
        self._numbers = np.array([n for n, part in enumerate(parts) if len(part) > context], dtype=np.int64)
        self._counts = np.array([(len(part) - 1) // context for part in self._parts], dtype=np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        self.size = int(self._counts.sum())

    def parts(self) -> Indices:
        """The part that each window comes from."""
        return np.repeat(self._numbers, self._counts)

    def fetch(self, indices: Indices) -> Batch:
        """Get windows by number as inputs and, one token later, targets."""
        if indices.size and (indices.min() < 0 or indices.max() >= self.size):
            raise IndexError(f"windows from {indices.min()} to {indices.max()}: there are {self.size}")
        owners = np.searchsorted(self._firsts, indices, side="right") - 1
        starts = (indices - self._firsts[owners]) * self._context
        tokens = np.empty((len(indices), self._context + 1), dtype=np.int64)
        reach = np.arange(self._context + 1)
        for owner in np.unique(owners):
            rows = np.flatnonzero(owners == owner)
            tokens[rows] = self._parts[owner][starts[rows, None] + reach]
        windows = torch.from_numpy(tokens)
        return Batch(windows[:, :-1], windows[:, 1:])


class TokenCorpus:
    """Text as one array of tokens per domain, cut into windows."""

    def __init__(
        self,
        train: Sequence[Tokens],
        held_out: Sequence[Tokens],
        *,
        context: int,
        classes: int = 256,
        source: str,
    ) -> None:
        self.spec = DataSpec(kind="tokens", classes=classes, shape=(context,))
        self._train, self._held_out = Windows(train, context), Windows(held_out, context)
        for part, tokens, windows in (("training", train, self._train), ("validation", held_out, self._held_out)):
            if not windows.size:
                longest = max((len(one) for one in tokens), default=0)
                raise DataError(
                    f"{source}: the {part} part has no text of context + 1 = {context + 1} tokens, the longest has "
                    f"{longest}; use more text, a smaller model.context, or another data.validation"
                )
        self.size = self._train.size

    def domains(self) -> Indices:
        """See Corpus."""
        return self._train.parts()

    def fetch(self, indices: Indices) -> Batch:
        """See Corpus."""
        return self._train.fetch(indices)

    def validation(self, batch_size: int, max_batches: int) -> Iterator[Batch]:
        """See Corpus."""
        for chosen in spread(self._held_out.size, batch_size, max_batches):
            yield self._held_out.fetch(chosen)


def spread(size: int, batch_size: int, max_batches: int) -> Iterator[Indices]:
    """Choose at most `max_batches` batches out of `size` samples, at even distances, each sample once at most."""
    count = min(size, batch_size * max_batches)
    for start in range(0, count, batch_size):
        yield np.arange(start, min(start + batch_size, count), dtype=np.int64) * size // count


class ImageCorpus:
    """Labelled images in memory; the label is the domain."""

    def __init__(
        self, images: Tensor, labels: Tensor, held_images: Tensor, held_labels: Tensor, *, classes: int, source: str
    ) -> None:
        for part, pictures, answers in (("training", images, labels), ("validation", held_images, held_labels)):
            _check_images(f"{source}, {part} part", pictures, answers, classes)
        if images.shape[1:] != held_images.shape[1:]:
            raise DataError(
                f"{source}: training images are {tuple(images.shape[1:])}, those for validation "
                f"{tuple(held_images.shape[1:])}; take both from the same set"
            )
        self.spec = DataSpec(kind="images", classes=classes, shape=tuple(images.shape[1:]))
        self.size = len(labels)
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
        for indices in spread(len(self._held_labels), batch_size, max_batches):
            chosen = torch.from_numpy(indices)
            yield Batch(self._held_images[chosen], self._held_labels[chosen])


def _check_images(source: str, images: Tensor, labels: Tensor, classes: int) -> None:
    if not len(images):
        raise DataError(f"{source}: there is no image; use more data, or another data.validation")
    if len(images) != len(labels):
        raise DataError(f"{source}: {len(images)} images and {len(labels)} labels; the files do not belong together")
    broken = ~torch.isfinite(images.flatten(1)).all(dim=1)
    if broken.any():
        raise DataError(
            f"{source}: image {int(broken.nonzero()[0])} and {int(broken.sum()) - 1} more hold NaN or infinity; "
            "repair or remove them"
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(
            f"{source}: labels reach from {int(labels.min())} to {int(labels.max())}, not within 0 .. {classes - 1}; "
            "the labels are damaged or of another set"
        )


def held_out_split(
    images: Tensor, labels: Tensor, share: float, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split labelled images into training and held-out parts by a fixed permutation, the same on all peers."""
    order = torch.from_numpy(Permutation(len(labels), seed)(np.arange(len(labels))))
    cut = max(1, round(share * len(labels)))
    held, train = order[:cut], order[cut:]
    return images[train], labels[train], images[held], labels[held]
