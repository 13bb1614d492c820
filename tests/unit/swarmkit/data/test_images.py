"""Digits and Fashion-MNIST: the IDX format, and what is refused."""

import gzip
import struct
import sys
from pathlib import Path

import pytest
import torch

from swarmkit.data.config import DigitsConfig, FashionMNISTConfig
from swarmkit.data.digits import load_digits
from swarmkit.data.fashion_mnist import load_fashion_mnist, read_idx
from swarmkit.errors import DataError


def idx(kind: int, shape: tuple[int, ...], payload: bytes) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, kind, len(shape), *shape) + payload


GOLDEN = bytes.fromhex("00000803 00000002 00000001 00000003 01020304 05ff")


def fashion(folder: Path, *, packed: bool = False, train: int = 20, held: int = 5) -> Path:
    for prefix, count in (("train", train), ("t10k", held)):
        pixels = bytes(k % 256 for k in range(count * 784))
        files = {
            f"{prefix}-images-idx3-ubyte": idx(8, (count, 28, 28), pixels),
            f"{prefix}-labels-idx1-ubyte": idx(8, (count,), bytes(k % 10 for k in range(count))),
        }
        for name, content in files.items():
            (folder / f"{name}.gz" if packed else folder / name).write_bytes(
                gzip.compress(content) if packed else content
            )
    return folder


def load(folder: Path) -> None:
    load_fashion_mnist(FashionMNISTConfig(folder=str(folder)))


def test_a_file_written_by_hand_is_read_right(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(GOLDEN)
    (tmp_path / "x.gz").write_bytes(gzip.compress(GOLDEN))
    expected = torch.tensor([[[1, 2, 3]], [[4, 5, 255]]], dtype=torch.uint8)
    assert torch.equal(read_idx(tmp_path / "x"), expected)
    assert torch.equal(read_idx(tmp_path / "x.gz"), expected)


@pytest.mark.parametrize(
    ("kind", "code", "dtype"),
    [
        (0x09, "b", torch.int8),
        (0x0B, "h", torch.int16),
        (0x0C, "i", torch.int32),
        (0x0D, "f", torch.float32),
        (0x0E, "d", torch.float64),
    ],
)
def test_numbers_are_read_with_the_most_significant_byte_first(
    tmp_path: Path, kind: int, code: str, dtype: torch.dtype
) -> None:
    (tmp_path / "x").write_bytes(idx(kind, (3,), struct.pack(f">3{code}", 1, -2, 100)))
    values = read_idx(tmp_path / "x")
    assert values.dtype == dtype
    assert values.tolist() == [1, -2, 100]


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_of_four_files_is_a_corpus(tmp_path: Path, packed: bool) -> None:
    corpus = load_fashion_mnist(FashionMNISTConfig(folder=str(fashion(tmp_path, packed=packed))))
    assert corpus.size == 20
    assert corpus.spec.shape == (1, 28, 28)
    assert corpus.domains().tolist() == [k % 10 for k in range(20)]
    (batch,) = corpus.validation(64, 9)
    assert len(batch.targets) == 5
    assert batch.inputs.min() == -1
    assert batch.inputs.max() == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not an IDX file"),
        (b"\x89PNG....", "is not an IDX file: it begins with"),
        (b"\0\0\x07\x01\0\0\0\x01x", "is not an IDX file"),
        (GOLDEN[:9], "ends within its header"),
        (GOLDEN[:-1], "has 21 bytes, its header says 22"),
        (GOLDEN + b"x", "has 23 bytes, its header says 22"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "broken").write_bytes(content)
    with pytest.raises(DataError, match=f"broken {said}.*; copy the file again"):
        read_idx(tmp_path / "broken")


@pytest.mark.parametrize("content", [gzip.compress(GOLDEN)[:-9], GOLDEN])
def test_a_damaged_archive_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.gz cannot be read: .*; copy the file again"):
        read_idx(tmp_path / "broken.gz")


def test_a_missing_file_is_named_with_the_package_that_has_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\[\.gz\] does not exist; on Debian install"):
        load(tmp_path)


def test_images_and_labels_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    fashion(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(8, (19,), bytes(19)))
    with pytest.raises(DataError, match="20 images and 19 labels"):
        load(tmp_path)


def test_a_file_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    fashion(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes((tmp_path / "train-labels-idx1-ubyte").read_bytes())
    with pytest.raises(DataError, match="train-images-idx3-ubyte has 1 dimensions instead of 3"):
        load(tmp_path)


def test_digits_are_split_the_same_way_every_time() -> None:
    pytest.importorskip("sklearn")
    first, second = load_digits(DigitsConfig()), load_digits(DigitsConfig())
    assert first.domains().tolist() == second.domains().tolist()
    held = sum(len(batch.targets) for batch in first.validation(100, 100))
    assert (first.size, held) == (1438, 359)
    assert first.spec.shape == (1, 8, 8)
    for batch in first.validation(100, 100):
        assert -1 <= batch.inputs.min() <= batch.inputs.max() <= 1


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'swarmkit-torch\[digits\]'"):
        load_digits(DigitsConfig())
