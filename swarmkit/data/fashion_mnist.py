"""Fashion-MNIST from IDX files (arXiv 1708.07747): 70,000 images of 28 x 28 pixels in ten classes."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from swarmkit.data.config import FashionMNISTConfig
from swarmkit.data.corpus import ImageCorpus
from swarmkit.errors import DataError

_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_WAY_OUT = "copy the file again"


def load_fashion_mnist(config: FashionMNISTConfig) -> ImageCorpus:
    """Read the four files; pixels are scaled to [-1, 1], images are [1, 28, 28]; the test set is held out."""
    folder = Path(config.folder).expanduser()
    parts = []
    for prefix in ("train", "t10k"):
        images = _read(folder, f"{prefix}-images-idx3-ubyte", rank=3)
        labels = _read(folder, f"{prefix}-labels-idx1-ubyte", rank=1)
        parts += [images.float().unsqueeze(1) / 127.5 - 1, labels.long()]
    return ImageCorpus(*parts, classes=10, source=str(folder))


def _read(folder: Path, name: str, *, rank: int) -> Tensor:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            values = read_idx(path)
            if values.dim() != rank:
                raise DataError(f"{path} has {values.dim()} dimensions instead of {rank}; {_WAY_OUT}")
            return values
    raise DataError(
        f"{folder / name}[.gz] does not exist; on Debian install dataset-fashion-mnist, or set data.folder=..."
    )


def read_idx(path: Path) -> Tensor:
    """Read an IDX file, gzipped or not; raises DataError naming the file when it is not whole."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; {_WAY_OUT}") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _DTYPES:
        raise DataError(f"{path} is not an IDX file: it begins with {data[:4]!r}; {_WAY_OUT}")
    rank = data[3]
    if len(data) < 4 + 4 * rank:
        raise DataError(f"{path} ends within its header; {_WAY_OUT}")
    shape = struct.unpack(f">{rank}I", data[4 : 4 + 4 * rank])
    dtype = np.dtype(_DTYPES[data[2]])
    expected = 4 + 4 * rank + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if len(data) != expected:
        raise DataError(f"{path} has {len(data)} bytes, its header says {expected}; {_WAY_OUT}")
    values = np.frombuffer(data, dtype=dtype, offset=4 + 4 * rank).reshape(shape)
    return torch.from_numpy(values.astype(dtype.newbyteorder("=")))
