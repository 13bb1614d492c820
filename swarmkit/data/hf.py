"""Hugging Face data sets: a local folder or a name, read whole or streamed, tokenised or as bytes."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from swarmkit.data.config import HFDataConfig
from swarmkit.data.corpus import TokenCorpus, Tokens
from swarmkit.errors import DataError

# A streamed set has no end that one could wait for: so much of it makes the corpus unless max_bytes says otherwise.
STREAMED_BYTES = 64 << 20


def load_hf(config: HFDataConfig, *, context: int) -> TokenCorpus:
    """Read the text column of the train split; of every 1 / `validation` rows one is held out."""
    encode, classes = _encoder(config)
    limit = config.max_bytes or (STREAMED_BYTES if config.streaming else 0)
    period = max(2, round(1 / config.validation))
    train: list[Tokens] = []
    held_out: list[Tokens] = []
    size = 0
    for number, text in enumerate(_texts(config)):
        (held_out if number % period == period - 1 else train).append(encode(text))
        size += len(text.encode(errors="replace"))
        if limit and size >= limit:
            break
    if not train or not held_out:
        raise DataError(
            f"data.path={config.path!r}: {len(train)} rows with text in column {config.column!r} are too few to hold "
            f"one in {period} out; use more data, another data.column or a larger data.validation"
        )
    return TokenCorpus(
        [np.concatenate(train)], [np.concatenate(held_out)], context=context, classes=classes, source=config.path
    )


def _texts(config: HFDataConfig) -> Iterator[str]:
    """Yield the column of every row that has something in it."""
    try:
        import datasets
    except ImportError as error:
        raise DataError("data=hf needs the datasets package: pip install 'swarmkit-torch[hf]'") from error
    try:
        for row in _load(datasets, config):
            if config.column not in row:
                raise DataError(
                    f"data.column={config.column!r} is not in {config.path!r}; it has {', '.join(sorted(row))}"
                )
            if row[config.column] is not None:
                yield str(row[config.column]) + "\n"
    except DataError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"data.path={config.path!r} cannot be loaded: {error}; "
            "name a folder on this machine, or a data set when it has network"
        ) from error


def _load(datasets: Any, config: HFDataConfig) -> Iterable[dict[str, Any]]:  # noqa: ANN401 - an untyped package
    folder = Path(config.path).expanduser()
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(str(folder))
        if hasattr(saved, "keys") and "train" not in saved:
            raise ValueError(f"it has no split called train, only {', '.join(sorted(saved))}")
        rows: Iterable[dict[str, Any]] = saved["train"] if hasattr(saved, "keys") else saved
        return rows
    path = str(folder) if folder.exists() else config.path
    rows = datasets.load_dataset(path, config.subset, split="train", streaming=config.streaming)
    return rows


def _encoder(config: HFDataConfig) -> tuple[Callable[[str], Tokens], int]:
    """How a text becomes tokens, and how many different ones there are."""
    if config.tokenizer is None:
        return (lambda text: np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)), 256
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise DataError("data.tokenizer needs the transformers package: pip install 'swarmkit-torch[hf]'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.tokenizer={config.tokenizer!r} cannot be loaded: {error}; leave it out to train on bytes"
        ) from error
    return (lambda text: np.asarray(tokenizer(text, verbose=False)["input_ids"], dtype=np.uint32)), len(tokenizer)
