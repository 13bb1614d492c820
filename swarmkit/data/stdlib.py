"""The Python standard library's own sources: text that every machine has."""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarmkit.data.config import StdlibConfig
from swarmkit.data.corpus import TokenCorpus
from swarmkit.errors import DataError

# Tests and generated tables would be a third of the bytes and teach nothing that the rest does not.
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "pydoc_data"}
)


def load_stdlib(config: StdlibConfig, *, context: int) -> TokenCorpus:
    """Read the .py files in sorted order; a file is held out by the hash of its name, a package is a domain."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not SKIPPED.intersection(p.relative_to(root).parts))
    if not files:
        raise DataError(f"no .py files under {root}: this Python comes without its sources; use data=text instead")
    train: dict[str, list[npt.NDArray[np.uint8]]] = {}
    held_out: list[npt.NDArray[np.uint8]] = []
    total = 0
    for path in files:
        name = path.relative_to(root).as_posix()
        content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        if is_held_out(name, config.validation):
            held_out.append(content)
        else:
            train.setdefault(name.split("/")[0], []).append(content)
        total += len(content)
        if config.max_bytes and total >= config.max_bytes:
            break
    return TokenCorpus([np.concatenate(parts) for parts in train.values()], held_out, context=context, source=str(root))


def is_held_out(name: str, share: float) -> bool:
    """Decide by a file's name alone, so that machines with other files agree on the ones they have in common."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) < share * 2**32
