"""Text files as bytes: plain, gzip or xz; every file or folder that is named or matched is a domain."""

import glob
import gzip
import lzma
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarmkit.data.config import TextConfig
from swarmkit.data.corpus import TokenCorpus
from swarmkit.errors import DataError

_DECOMPRESSORS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}


def load_text(config: TextConfig, *, context: int) -> TokenCorpus:
    """Read every domain; the last `validation` share of each is held out.

    A domain that is one plain file is memory-mapped, so it may be larger than the memory; all else is read.
    """
    domains = find_domains(config.paths)
    train, held_out = [], []
    for files in domains:
        text = _read(files[0]) if len(files) == 1 else np.concatenate([_read(path) for path in files])
        if config.max_bytes:
            text = text[: config.max_bytes // len(domains)]
        cut = len(text) - round(config.validation * len(text))
        train.append(text[:cut])
        held_out.append(text[cut:])
    return TokenCorpus(train, held_out, context=context, source=", ".join(config.paths))


def find_domains(patterns: Sequence[str]) -> list[list[Path]]:
    """Sort the files that the patterns name into domains; a file counts once, in the first domain that has it."""
    domains: list[list[Path]] = []
    seen: set[Path] = set()
    for pattern in patterns:
        found = False
        for match in _expand(pattern):
            files = _files(match)
            found = found or bool(files)
            new = [path for path in files if path.resolve() not in seen]
            seen.update(path.resolve() for path in new)
            if new:
                domains.append(new)
        if not found:
            raise DataError(
                f"data.paths: {pattern!r} matches no file, looked for from {Path.cwd()}; "
                "correct the path (hidden files are left out)"
            )
    return domains


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    return [path] if path.exists() else sorted(Path(match) for match in glob.glob(str(path), recursive=True))


def _files(path: Path) -> list[Path]:
    """The file itself, or all files in a folder but hidden ones, in an order that is the same everywhere."""
    if not path.is_dir():
        return [path]
    inside = ((found, found.relative_to(path).parts) for found in path.rglob("*"))
    visible = [(parts, found) for found, parts in inside if not any(part.startswith(".") for part in parts)]
    return [found for _, found in sorted(visible) if found.is_file()]


def _read(path: Path) -> npt.NDArray[np.uint8]:
    decompress = _DECOMPRESSORS.get(path.suffix)
    try:
        if decompress is not None:
            return np.frombuffer(decompress(path.read_bytes()), dtype=np.uint8)
        if path.stat().st_size:
            return np.memmap(path, dtype=np.uint8, mode="r")
        return np.empty(0, dtype=np.uint8)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; fetch it again or leave it out of data.paths") from error
