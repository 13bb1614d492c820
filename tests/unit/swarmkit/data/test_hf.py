"""Hugging Face data sets: local folders, saved or of text files, whole or streamed; offline."""

import sys
from pathlib import Path

import numpy as np
import pytest

from swarmkit.data.config import HFDataConfig
from swarmkit.data.corpus import TokenCorpus
from swarmkit.data.hf import load_hf
from swarmkit.errors import DataError

datasets = pytest.importorskip("datasets")

ROWS = [f"row number {k} of the set" for k in range(100)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    datasets.Dataset.from_dict({"text": ROWS, "label": list(range(100))}).save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.txt").write_text("\n".join(ROWS) + "\n")
    return tmp_path / "folder"


def load(path: Path, **settings: object) -> TokenCorpus:
    return load_hf(HFDataConfig(path=str(path), **{"validation": 0.1, **settings}), context=8)


def trained_on(corpus: TokenCorpus) -> bytes:
    return b"".join(bytes(row) for row in corpus.fetch(np.arange(corpus.size)).inputs.tolist())


def held_out(corpus: TokenCorpus) -> bytes:
    return b"".join(bytes(row) for batch in corpus.validation(64, 100) for row in batch.inputs.tolist())


def test_a_saved_set_becomes_bytes_with_every_tenth_row_held_out(saved: Path) -> None:
    corpus = load(saved)
    train = "".join(row + "\n" for k, row in enumerate(ROWS) if k % 10 != 9).encode()
    held = "".join(row + "\n" for k, row in enumerate(ROWS) if k % 10 == 9).encode()
    assert train.startswith(trained_on(corpus))
    assert held.startswith(held_out(corpus))
    assert len(train) - len(trained_on(corpus)) <= 8
    assert corpus.spec.classes == 256


def test_a_streamed_folder_equals_a_saved_set(saved: Path, folder: Path) -> None:
    assert trained_on(load(folder, streaming=True)) == trained_on(load(saved))


def test_a_stream_is_read_no_further_than_asked(folder: Path) -> None:
    corpus = load(folder, streaming=True, max_bytes=1000)
    assert 700 < len(trained_on(corpus)) < 1000


def test_rows_without_text_are_left_out(tmp_path: Path) -> None:
    rows = [None if k % 2 else ROWS[k] for k in range(100)]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(str(tmp_path))
    assert b"None" not in trained_on(load(tmp_path))


def test_a_tokenizer_from_a_folder_is_used(saved: Path, tmp_path: Path) -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = ["[UNK]", *sorted({word for row in ROWS for word in row.split()})]
    model = tokenizers.models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(str(tmp_path / "tokens"))
    corpus = load(saved, tokenizer=str(tmp_path / "tokens"))
    assert corpus.spec.classes == len(words)
    said = [words[k] for k in corpus.fetch(np.array([0])).inputs[0].tolist()]
    assert said == ["row", "number", "0", "of", "the", "set", "row", "number"]


def test_a_column_that_is_not_there_is_named_with_those_that_are(saved: Path) -> None:
    with pytest.raises(DataError, match=r"data\.column='body' is not in '.*'; it has label, text"):
        load(saved, column="body")


def test_a_split_that_is_not_there_is_named(tmp_path: Path) -> None:
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ROWS})}).save_to_disk(str(tmp_path))
    with pytest.raises(DataError, match="it has no split called train, only test"):
        load(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path='.*' cannot be loaded"):
        load(tmp_path, streaming=True)


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ROWS[:3]}).save_to_disk(str(tmp_path))
    with pytest.raises(DataError, match="3 rows with text in column 'text' are too few to hold one in 10 out"):
        load(tmp_path)


def test_a_missing_tokenizer_is_named(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(DataError, match=r"data\.tokenizer='.*' cannot be loaded"):
        load(saved, tokenizer=str(tmp_path))


def test_without_the_package_the_error_names_the_extra(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'swarmkit-torch\[hf\]'"):
        load(saved)


def test_no_path_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.path=''"):
        HFDataConfig()
