"""Hugging Face data sets: a local folder or a name, read whole or streamed, tokenised or as bytes."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmkit.data.config import HFDataConfig
from swarmkit.data.corpus import TokenCorpus
from swarmkit.errors import DataError

# A streamed set has no end that one could wait for: so much of it makes the corpus unless max_bytes says otherwise.
STREAMED_BYTES = 64 << 20


def load_hf(config: HFDataConfig, *, context: int) -> TokenCorpus:
    """Read the text column of the train split; of every 1 / `validation` rows one is held out."""
    rows = _rows(config)
    encode, classes = _encoder(config)
    limit = config.max_bytes or (STREAMED_BYTES if config.streaming else 0)
    period = max(2, round(1 / config.validation))
    train: list[npt.NDArray[np.generic]] = []
    held_out: list[npt.NDArray[np.generic]] = []
    size = 0
    for number, text in enumerate(rows):
        (held_out if number % period == period - 1 else train).append(encode(text))
        size += len(text)
        if limit and size >= limit:
            break
    if not train or not held_out:
        raise DataError(f"data.path={config.path!r}: too few rows to hold one in {period} out")
    return TokenCorpus(
        [np.concatenate(train)], [np.concatenate(held_out)], context=context, classes=classes, source=config.path
    )


def _rows(config: HFDataConfig) -> Iterator[str]:
    try:
        import datasets
    except ImportError as error:
        raise DataError("data=hf needs the datasets package: pip install 'swarmkit-torch[hf]'") from error
    try:
        found = _load(datasets, config)
    except (OSError, ValueError, ConnectionError) as error:
        raise DataError(f"data.path={config.path!r} cannot be loaded: {error}") from error
    for row in found:
        if config.column not in row:
            raise DataError(f"data.column={config.column!r} is not in {config.path!r}; it has {', '.join(sorted(row))}")
        yield str(row[config.column]) + "\n"


def _load(datasets: Any, config: HFDataConfig) -> Iterable[dict[str, Any]]:  # noqa: ANN401 - an untyped package
    folder = Path(config.path).expanduser()
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(str(folder))
        rows: Iterable[dict[str, Any]] = saved["train"] if hasattr(saved, "keys") else saved
        return rows
    path = str(folder) if folder.exists() else config.path
    rows = datasets.load_dataset(path, config.subset, split="train", streaming=config.streaming)
    return rows


def _encoder(config: HFDataConfig) -> tuple[Any, int]:
    if config.tokenizer is None:
        return (lambda text: np.frombuffer(text.encode(), dtype=np.uint8)), 256
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer={config.tokenizer!r} cannot be loaded: {error}") from error
    return (lambda text: np.asarray(tokenizer(text)["input_ids"], dtype=np.uint32)), len(tokenizer)
