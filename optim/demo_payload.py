"""DeMo's payload: positions in few bits (Elias-Fano) and their values in four precisions, one message."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmkit.optim.compression.bits import pack_bits, packed_bytes, unpack_bits
from swarmkit.optim.compression.positions import position_bytes, read_positions, write_positions

VALUES = ("float32", "float16", "int8", "sign")


@dataclass(frozen=True, slots=True)
class Sparse:
    """Entries of a group of chunks."""

    index: Tensor  # int64 [chunks, k], ascending within a chunk
    values: Tensor  # float32 [chunks, k]


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """What a payload holds of one group of chunks."""

    chunks: int
    area: int  # elements of a chunk
    k: int  # entries per chunk


@dataclass(frozen=True, slots=True)
class PayloadFormat:
    """Writes and reads payloads; its size depends on nothing but the format, so a reader knows it.

    `float16` is relative to one power of two for the message, since gradients may be smaller than float16's least.
    `int8` and `sign` have a bfloat16 scale per chunk: the largest value over 127, and the mean of the absolute values,
    which is the L2-optimal scale of signs.
    """

    groups: tuple[GroupFormat, ...]
    values: str
    flags: int  # yes-or-no marks that the message begins with

    def __post_init__(self) -> None:
        if self.values not in VALUES:
            raise ValueError(f"values={self.values!r}: must be one of {', '.join(VALUES)}")

    @property
    def num_bytes(self) -> int:
        """Size of a payload."""
        return sum(self._sizes())

    @property
    def coefficients(self) -> int:
        """Entries in a payload."""
        return sum(group.chunks * group.k for group in self.groups)

    def _sizes(self) -> list[int]:
        sizes = [packed_bytes(self.flags, 1), 4 if self.values == "float16" else 0]
        for group in self.groups:
            count = group.chunks * group.k
            values = {"float32": 4 * count, "float16": 2 * count, "int8": count, "sign": packed_bytes(count, 1)}
            scales = 2 * group.chunks if self.values in ("int8", "sign") else 0
            sizes += [position_bytes(group.chunks, group.area, group.k), values[self.values], scales]
        return sizes

    def write(self, parts: Sequence[Sparse], flags: Tensor) -> Tensor:
        """The payload, uint8 on the CPU."""
        unit = _power_of_two(parts) if self.values == "float16" else torch.ones(0)
        found = [pack_bits(flags.to(torch.uint8), 1), _bytes(unit)]
        for part, group in zip(parts, self.groups, strict=True):
            values, scales = _quantise(part.values, self.values, unit)
            found += [write_positions(part.index, group.area), values, scales]
        return torch.cat([part.cpu() for part in found])

    def read(self, payload: Sequence[Tensor], device: torch.device) -> tuple[list[Sparse], Tensor]:
        """Entries by group and the flags of what any peer may have sent; raises ValueError for what is no payload."""
        if len(payload) != 1 or payload[0].dtype != torch.uint8 or payload[0].shape != (self.num_bytes,):
            forms = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in payload[:3]]
            raise ValueError(f"a payload is {self.num_bytes} bytes, not {', '.join(forms) or 'nothing'}")
        flags, unit, *rest = torch.split(payload[0].to(device), self._sizes())
        scale = _numbers(unit, torch.float32) if self.values == "float16" else torch.ones(1, device=device)
        parts = []
        for i, group in enumerate(self.groups):
            shape = (group.chunks, group.k)
            index = read_positions(rest[3 * i], group.chunks, group.area, group.k)
            values = self._read_values(rest[3 * i + 1], rest[3 * i + 2], scale, shape)
            if not bool(values.isfinite().all()):
                raise ValueError("a value is not finite")
            parts.append(Sparse(index, values))
        return parts, unpack_bits(flags, 1, self.flags, torch.bool)

    def _read_values(self, raw: Tensor, scales: Tensor, unit: Tensor, shape: tuple[int, int]) -> Tensor:
        if self.values == "float32":
            return _numbers(raw, torch.float32).view(shape)
        if self.values == "float16":
            return _numbers(raw, torch.float16).float().mul_(unit).view(shape)
        scale = _numbers(scales, torch.bfloat16).float().unsqueeze(1)
        if self.values == "int8":
            return _numbers(raw, torch.int8).float().view(shape).mul_(scale)
        negative = unpack_bits(raw, 1, shape[0] * shape[1], torch.float32)
        return negative.mul_(-2).add_(1).view(shape).mul_(scale)


def _quantise(values: Tensor, kind: str, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Values [chunks, k] as bytes, and the bytes of their scales."""
    nothing = values.new_empty(0, dtype=torch.uint8)
    if kind == "float32":
        return _bytes(values), nothing
    if kind == "float16":
        return _bytes((values / unit).half()), nothing
    magnitude = values.abs()
    if kind == "sign":
        return pack_bits(values.signbit().to(torch.uint8), 1), _bytes(magnitude.mean(1).bfloat16())
    scale = (magnitude.amax(1) / 127).bfloat16()
    divisor = scale.float().unsqueeze(1)
    steps = torch.where(divisor > 0, values / divisor, 0).round_().clamp_(-127, 127)
    return _bytes(steps.to(torch.int8)), _bytes(scale)


def _power_of_two(parts: Sequence[Sparse]) -> Tensor:
    """The least power of two that is larger than all values, float32 [1]; 1 when all are 0."""
    largest = torch.stack([part.values.abs().amax() for part in parts]).amax().reshape(1) if parts else torch.zeros(1)
    exponent = torch.frexp(largest).exponent.clamp(-126, 127)
    return torch.ldexp(torch.ones_like(largest), exponent)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _numbers(raw: Tensor, dtype: torch.dtype) -> Tensor:
    # A copy: a slice of the message need not be aligned.
    return raw.clone().view(dtype)
