"""The Python standard library's own sources: text that every machine has."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarmkit.data.config import StdlibConfig
from swarmkit.data.corpus import TokenCorpus
from swarmkit.errors import DataError

# Installed packages differ between machines; tests and tables of text would be half of the bytes and teach little.
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "pydoc_data"}
)
# Written when this Python was built or set up, so not the same on any two machines.
_LOCAL = ("_sysconfigdata", "sitecustomize", "usercustomize")


def load_stdlib(config: StdlibConfig, *, context: int, root: Path | None = None) -> TokenCorpus:
    """Read the .py files in sorted order; a file is held out by the hash of its name, a package is a domain.

    `root` is the standard library's folder if not this Python's.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(find_sources(root))
    if not files:
        raise DataError(f"no .py files under {root}: this Python comes without its sources; use data=text instead")
    train: dict[str, list[npt.NDArray[np.uint8]]] = {}
    held_out: list[npt.NDArray[np.uint8]] = []
    room = {True: config.max_bytes * config.validation, False: config.max_bytes * (1 - config.validation)}
    for name in files:
        held = is_held_out(name, config.validation)
        if config.max_bytes and room[held] <= 0:
            continue
        content = np.frombuffer(_read(root / name), dtype=np.uint8)
        if config.max_bytes:
            content = content[: round(room[held])]
        room[held] -= len(content)
        (held_out if held else train.setdefault(name.split("/")[0], [])).append(content)
    return TokenCorpus([np.concatenate(parts) for parts in train.values()], held_out, context=context, source=str(root))


def find_sources(root: Path) -> Iterator[str]:
    """Yield the library's .py files, relative to its folder and with slashes."""
    for folder, folders, files in os.walk(root):
        # Pruned here, because what is skipped can be larger than what is read.
        folders[:] = [name for name in folders if name not in SKIPPED]
        for name in files:
            if name.endswith(".py") and not name.startswith(_LOCAL):
                yield Path(folder, name).relative_to(root).as_posix()


def is_held_out(name: str, share: float) -> bool:
    """Decide by a file's name alone, so that machines with other files agree on the ones they have in common."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) < share * 2**32


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; repair this Python, or use data=text") from error
