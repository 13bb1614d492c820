"""CodecWire: a gather codec as the wire of a sharded reduction, slice by slice."""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from swarmkit.optim.compression.codec import GatherCodec, Layout, Parameters, chosen
from swarmkit.optim.compression.seeds import number

_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float32)
_MAX_PARTS = 16


class CodecWire:
    """Encodes slices of a codec's buffer; see Wire.

    Slices end at multiples of the codec's `align`, so blocks stay whole. Where a tensor is cut its pieces count as
    tensors: what a codec keeps for each tensor (a scale, the k largest) it keeps for each piece. All slices take about
    as many bytes. Draws depend on the seed, the slice, and whether it is a mean.
    """

    def __init__(self, codec: GatherCodec, layout: Layout, parameters: Parameters | None, seed: str) -> None:
        self._codec = codec
        self._layout = layout
        self._seed = seed
        self._parameters = parameters
        given = chosen(parameters, float("nan"), layout) if parameters is not None else [None] * len(layout.shapes)
        self._bytes = [max(1, codec.payload_bytes(*form)) for form in zip(layout.shapes, given, strict=True)]
        # The size of a payload tells settings of a codec apart that its name does not.
        said = f"{codec.align}|{layout.shapes}|{given}|{self._bytes}"
        self.form = f"{codec.name[:24]}/{hashlib.blake2b(said.encode(), digest_size=8).hexdigest()}"
        self._piece = lru_cache(maxsize=256)(self._find_piece)

    def cut(self, owners: int) -> list[int]:
        """See Wire. Whole numbers only, so that all machines cut alike."""
        ends = [0]
        for size in self._bytes:
            ends.append(ends[-1] + size * owners)
        found = [0]
        for owner in range(1, owners):
            aim = ends[-1] // owners * owner
            i = min(bisect_right(ends, aim), len(self._bytes)) - 1
            first, last = self._layout.offsets[i : i + 2]
            runs = (last - first) // self._layout.align
            passed = (aim - ends[i]) * runs // (self._bytes[i] * owners)
            found.append(first + passed * self._layout.align)
        return [*found, self._layout.total]

    def limit(self, start: int, stop: int) -> int:
        """See Wire. Twice what the codec says, as top-k's positions take one width for all pieces (of 8 to 14 bits)."""
        layout, parameters = self._piece(start, stop)
        given = [None] * len(layout.shapes) if parameters is None else parameters
        sizes = (self._codec.payload_bytes(*form) for form in zip(layout.shapes, given, strict=True))
        return 2 * sum(sizes) + len(layout.shapes) + 1 + 5 * _MAX_PARTS

    def encode(self, part: Tensor, start: int, *, is_mean: bool) -> Tensor:
        """See Wire."""
        layout, parameters = self._piece(start, start + part.numel())
        seed = number(f"{self._seed}|{start}|{is_mean}")
        generator = torch.Generator(device=part.device).manual_seed(seed)
        return _pack(self._codec.encode(part, layout, generator, parameters))

    def decode(self, data: Tensor, start: int, stop: int) -> Tensor:
        """See Wire."""
        return self._codec.decode(_unpack(data), self._piece(start, stop)[0])

    def _find_piece(self, start: int, stop: int) -> tuple[Layout, list[float] | None]:
        """The layout of a slice and the parameters of its tensors."""
        layout, tensors = self._layout.part(start, stop)
        return layout, None if self._parameters is None else [float(self._parameters[i]) for i in tensors]


def _pack(parts: Sequence[Tensor]) -> Tensor:
    """A payload as one tensor of bytes: the number of parts, the dtype and size of each, and what they hold."""
    head = bytearray([len(parts)])
    for part in parts:
        head += bytes([_DTYPES.index(part.dtype)]) + part.numel().to_bytes(4, "little")
    flat = torch.frombuffer(head, dtype=torch.uint8).to(parts[0].device)
    return torch.cat([flat, *(part.contiguous().view(torch.uint8) for part in parts)])


def _unpack(data: Tensor) -> list[Tensor]:
    """The parts of `_pack`; raises ValueError for what it does not make."""
    count = int(data[0]) if data.numel() else 0
    start = 1 + 5 * count
    if not 0 < count <= _MAX_PARTS or data.numel() < start:
        raise ValueError(f"{data.numel()} bytes that begin with no table of parts")
    head = bytes(data[1:start].cpu().numpy())
    found = []
    for i in range(count):
        kind, size = head[5 * i], int.from_bytes(head[5 * i + 1 : 5 * i + 5], "little")
        if kind >= len(_DTYPES) or start + size * _DTYPES[kind].itemsize > data.numel():
            raise ValueError(f"part {i} is of no known dtype, or reaches beyond the end")
        stop = start + size * _DTYPES[kind].itemsize
        # A view as wider numbers wants the bytes in a storage of their own.
        found.append(data[start:stop].clone().view(_DTYPES[kind]))
        start = stop
    if start != data.numel():
        raise ValueError(f"{data.numel() - start} bytes after the last part")
    return found
