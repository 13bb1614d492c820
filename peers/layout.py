"""How a list of tensors lies in flat buffers, slices and chunks; every member derives the same layout."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarmkit.optim.shards import Wire
from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.wire import Message, field

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
MAX_TENSORS = 100_000
MAX_DIMS = 16
MAX_FORM = 64  # characters
Chunk = tuple[torch.dtype, int, int]  # dtype, first and last-plus-one element of its flat buffer


@dataclass(frozen=True, slots=True)
class Schema:
    """Dtypes and shapes of a payload."""

    entries: tuple[tuple[str, tuple[int, ...]], ...]
    form: str = ""  # of the wire that the first tensor travels through; empty: as it is

    @classmethod
    def of(cls, tensors: Sequence[Tensor], wire: Wire | None = None) -> "Schema":
        """Describe tensors."""
        entries = tuple((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors)
        return cls(entries, "" if wire is None else wire.form)

    @classmethod
    def from_message(cls, message: Message, *, max_bytes: int) -> "Schema":
        """Read a schema that a peer sent; raises ProtocolError before anything of its size is allocated."""
        entries = []
        for entry in field(message, "schema", list, lambda found: len(found) <= MAX_TENSORS):
            if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)):
                raise ProtocolError("schema entries must be [dtype, shape]")
            dtype, shape = entry
            if (
                not isinstance(dtype, str)
                or dtype not in DTYPES
                or len(shape) > MAX_DIMS
                or not all(type(size) is int and size >= 0 for size in shape)
            ):
                raise ProtocolError(f"schema entry {str(entry)[:80]} is not a tensor")
            entries.append((dtype, tuple(shape)))
        form = field(message, "form", str, lambda text: len(text) <= MAX_FORM) if "form" in message else ""
        schema = cls(tuple(entries), form)
        if schema.num_bytes > max_bytes:
            raise ProtocolError(f"payload of {schema.num_bytes} bytes: the limit is {max_bytes}")
        return schema

    def to_message(self) -> list[object]:
        """Plain lists for a control message."""
        return [[dtype, list(shape)] for dtype, shape in self.entries]

    @property
    def num_bytes(self) -> int:
        """Payload bytes."""
        return sum(DTYPES[dtype].itemsize * math.prod(shape) for dtype, shape in self.entries)

    def __str__(self) -> str:
        shown = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.entries[:4])
        how = f" through {self.form}" if self.form else ""
        return f"{len(self.entries)} tensors ({shown}{', ...' if len(self.entries) > 4 else ''}){how}"


class Layout:
    """Flat buffers, one per dtype, and the way back to the tensors."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.sizes: dict[torch.dtype, int] = {}  # elements per dtype, in order of first appearance
        for dtype, shape in schema.entries:
            kind = DTYPES[dtype]
            self.sizes[kind] = self.sizes.get(kind, 0) + math.prod(shape)

    def flatten(self, tensors: Sequence[Tensor]) -> dict[torch.dtype, Tensor]:
        """Copy tensors into one CPU buffer per dtype; a lone contiguous CPU tensor is viewed, not copied."""
        groups: dict[torch.dtype, list[Tensor]] = {dtype: [] for dtype in self.sizes}
        for tensor in tensors:
            groups[tensor.dtype].append(tensor.detach().reshape(-1))
        return {dtype: (group[0] if len(group) == 1 else torch.cat(group)).cpu() for dtype, group in groups.items()}

    def empty(self) -> dict[torch.dtype, Tensor]:
        """Allocate buffers for a result."""
        return {dtype: torch.empty(size, dtype=dtype) for dtype, size in self.sizes.items()}

    def unflatten(self, flat: dict[torch.dtype, Tensor], like: Sequence[Tensor] | None = None) -> list[Tensor]:
        """View flat buffers as the tensors they hold, on the devices of `like`."""
        offsets = dict.fromkeys(self.sizes, 0)
        tensors = []
        for index, (dtype, shape) in enumerate(self.schema.entries):
            kind = DTYPES[dtype]
            size = math.prod(shape)
            view = flat[kind][offsets[kind] : offsets[kind] + size].view(shape)
            offsets[kind] += size
            tensors.append(view if like is None else view.to(like[index].device))
        return tensors

    def chunks(self, owner: int, owners: int, chunk_bytes: int) -> Iterator[Chunk]:
        """Cut the slice of one owner out of `owners` into (dtype, start, stop) chunks, in the order they travel."""
        for dtype, size in self.sizes.items():
            start, end = size * owner // owners, size * (owner + 1) // owners
            step = max(1, chunk_bytes // dtype.itemsize)
            for position in range(start, end, step):
                yield dtype, position, min(position + step, end)


def to_bytes(flat: Tensor) -> bytes:
    """Copy a contiguous CPU tensor's memory."""
    data: bytes = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return data


def from_bytes(data: bytes, into: Tensor) -> None:
    """Copy bytes into a contiguous CPU tensor; raises ProtocolError when the sizes differ."""
    if len(data) != into.numel() * into.element_size():
        raise ProtocolError(f"chunk of {len(data)} bytes, expected {into.numel() * into.element_size()}")
    np.copyto(into.view(torch.uint8).numpy(), np.frombuffer(data, np.uint8))
