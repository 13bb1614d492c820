"""Text files as bytes: plain, gzip or xz; every path of the configuration is a domain."""

import glob
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarmkit.data.config import TextConfig
from swarmkit.data.corpus import TokenCorpus
from swarmkit.errors import DataError

_DECOMPRESSORS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}


def load_text(config: TextConfig, *, context: int) -> TokenCorpus:
    """Read every path; the last `validation` share of each domain is held out."""
    train, held_out = [], []
    for pattern in config.paths:
        domain = np.concatenate([_read(path) for path in _expand(pattern)])
        if config.max_bytes:
            domain = domain[: config.max_bytes // len(config.paths)]
        cut = len(domain) - round(config.validation * len(domain))
        train.append(domain[:cut])
        held_out.append(domain[cut:])
    return TokenCorpus(train, held_out, context=context, source=", ".join(config.paths))


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    else:
        files = [path] if path.is_file() else sorted(Path(p) for p in glob.glob(str(path), recursive=True))
        files = [p for p in files if p.is_file()]
    if not files:
        raise DataError(f"data.paths: {pattern!r} matches no file (looked in {Path.cwd()})")
    return files


def _read(path: Path) -> npt.NDArray[np.uint8]:
    decompress = _DECOMPRESSORS.get(path.suffix)
    try:
        data = path.read_bytes()
        data = decompress(data) if decompress is not None else data
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return np.frombuffer(data, dtype=np.uint8)
