"""Corpora: windows of text and labelled images, and what they refuse."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarmkit.data.corpus import ImageCorpus, TokenCorpus, Windows, held_out_split, spread
from swarmkit.errors import DataError


def text(*lengths: int) -> list[np.ndarray]:
    """Parts whose tokens number on from part to part, so that a window shows where it comes from."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end, dtype=np.uint32) for end, length in zip(ends, lengths, strict=True)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 9))
def test_windows_cover_every_part_and_never_cross_its_end(lengths: list[int], context: int) -> None:
    parts = text(*lengths)
    windows = Windows(parts, context)
    assert windows.size == sum(max(0, (length - 1) // context) for length in lengths)
    inputs, targets = windows.fetch(np.arange(windows.size))
    expected = [part[start : start + context] for part in parts for start in range(0, len(part) - context, context)]
    assert inputs.tolist() == [one.tolist() for one in expected]
    assert torch.equal(targets, inputs + 1)
    assert windows.parts().tolist() == [
        number for number, length in enumerate(lengths) for _ in range((length - 1) // context if length else 0)
    ]


def test_windows_come_in_the_order_that_was_asked_for() -> None:
    windows = Windows(text(9, 9, 9), 4)
    assert windows.fetch(np.array([5, 0, 3, 0])).inputs[:, 0].tolist() == [22, 0, 13, 0]


def test_windows_are_int64_whatever_the_tokens_are() -> None:
    batch = Windows([np.frombuffer(b"hello world", dtype=np.uint8)], 5).fetch(np.array([0, 1]))
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert bytes(batch.inputs[1].tolist()) == b" worl"
    assert bytes(batch.targets[1].tolist()) == b"world"


@pytest.mark.parametrize("number", [-1, 4])
def test_a_window_that_does_not_exist_is_refused(number: int) -> None:
    with pytest.raises(IndexError, match="there are 4"):
        Windows(text(9, 9), 4).fetch(np.array([number]))


@pytest.mark.parametrize(
    ("train", "held", "part"), [([16], [40], "training"), ([40], [3, 16], "validation"), ([], [40], "training")]
)
def test_text_shorter_than_one_sample_is_refused(train: list[int], held: list[int], part: str) -> None:
    with pytest.raises(DataError, match=rf"poem: the {part} part has no text of context \+ 1 = 17 tokens, the longest"):
        TokenCorpus(text(*train), text(*held), context=16, source="poem")


@given(st.integers(0, 200), st.integers(1, 20), st.integers(0, 20))
def test_validation_is_spread_over_everything_and_repeats_nothing(size: int, batch: int, most: int) -> None:
    batches = list(spread(size, batch, most))
    assert len(batches) <= most
    assert all(len(one) <= batch for one in batches)
    chosen = np.concatenate([np.empty(0, dtype=np.int64), *batches])
    assert len(set(chosen.tolist())) == len(chosen) == min(size, batch * most)
    if len(chosen):
        assert chosen[0] == 0
        assert np.diff(np.append(chosen, size)).max() <= math.ceil(size / len(chosen))


def test_validation_is_the_same_every_time() -> None:
    corpus = TokenCorpus(text(100), text(100), context=4, source="x")
    one, two = ([batch.inputs.tolist() for batch in corpus.validation(4, 3)] for _ in range(2))
    assert one == two
    assert len(one) == 3


def pictures(count: int = 4) -> tuple[Tensor, Tensor]:
    return torch.arange(count * 4.0).reshape(count, 1, 2, 2), torch.arange(count) % 2


def image_corpus(images: Tensor, labels: Tensor) -> ImageCorpus:
    return ImageCorpus(images, labels, *pictures(), classes=2, source="album")


def test_images_keep_their_labels() -> None:
    corpus = image_corpus(*pictures(6))
    batch = corpus.fetch(np.array([5, 2]))
    assert batch.inputs[:, 0, 0, 0].tolist() == [20.0, 8.0]
    assert batch.targets.tolist() == [1, 0]
    assert corpus.domains().tolist() == [0, 1, 0, 1, 0, 1]
    assert corpus.spec.shape == (1, 2, 2)
    assert corpus.size == 6


def test_images_that_are_not_finite_are_refused() -> None:
    images, labels = pictures()
    images[2, 0, 1, 1] = math.nan
    images[3, 0, 0, 0] = math.inf
    with pytest.raises(DataError, match="album, training part: image 2 and 1 more hold NaN or infinity"):
        image_corpus(images, labels)


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (torch.zeros(0, 1, 2, 2), torch.zeros(0), "there is no image"),
        (torch.zeros(3, 1, 2, 2), torch.zeros(2), "3 images and 2 labels"),
        (torch.zeros(2, 1, 2, 2), torch.tensor([0, 2]), r"labels reach from 0 to 2, not within 0 \.\. 1"),
        (torch.zeros(2, 1, 2, 2), torch.tensor([-1, 0]), r"labels reach from -1 to 0"),
        (torch.zeros(2, 1, 3, 3), torch.tensor([0, 1]), r"training images are \(1, 3, 3\)"),
    ],
)
def test_images_that_make_no_sense_are_refused(images: Tensor, labels: Tensor, said: str) -> None:
    with pytest.raises(DataError, match=said):
        image_corpus(images, labels)


@given(st.integers(2, 200), st.floats(0.01, 0.9))
def test_held_out_images_are_not_trained_on(count: int, share: float) -> None:
    images = torch.arange(count, dtype=torch.float32)
    train, train_labels, held, held_labels = held_out_split(images, images.long(), share)
    assert sorted(train.tolist() + held.tolist()) == images.tolist()
    assert torch.equal(train.long(), train_labels)
    assert torch.equal(held.long(), held_labels)
    assert len(held) == max(1, round(share * count))
