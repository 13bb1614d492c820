"""Blockwise int8 and int4: each block of numbers on an even grid up to its largest (Dettmers et al., 2110.02861)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmkit.optim.compression.bits import pack_bits, packed_bytes, unpack_bits
from swarmkit.optim.compression.codec import (
    MIN_SIZE,
    Layout,
    Parameters,
    check_part,
    check_parts,
    check_scales,
    spans,
)

_TINY = torch.finfo(torch.float32).tiny
_MAX = torch.finfo(torch.float32).max


class Blockwise:
    """Sends integers of `bits` bits (8 or 4) and a float32 scale for each `block` numbers of a tensor.

    A number is off by at most half a step, absmax / (2**bits - 2) of its block: absmax / 254 with 8 bits, absmax / 14
    with 4. Blocks whose absmax is below 1.5e-36 become zeros.
    """

    unbiased = False
    contractive = True
    parameter: float | None = None
    candidates: tuple[float, ...] = ()

    def __init__(self, bits: int = 8, block: int = 256, *, min_size: int = MIN_SIZE) -> None:
        if bits not in (4, 8):
            raise ValueError(f"bits={bits!r}: must be 4 or 8")
        self.name = f"int{bits}"
        self.min_size = min_size
        self.bits = bits
        self.align = check_block(block)

    def payload_bytes(self, shape: Sequence[int], parameter: float | None = None) -> int:
        """See Codec."""
        blocks = -(-math.prod(shape) // self.align)
        return packed_bytes(blocks * self.align, self.bits) + 4 * blocks

    def errors(self, tensor: Tensor, candidates: Parameters) -> Tensor:
        """See Codec: there is nothing to choose."""
        if len(candidates):
            raise ValueError(f"{self.name} has no parameter, got candidates {list(candidates)[:3]}")
        return torch.zeros(0, dtype=torch.float64)

    def encode(
        self, flat: Tensor, layout: Layout, generator: torch.Generator, parameters: Parameters | None = None
    ) -> list[Tensor]:
        """See GatherCodec; codes in [0, 2**bits - 2], lowest bit first, and one scale a block."""
        return list(to_grid(flat, self.bits, self.align))

    def decode(self, payload: Sequence[Tensor], layout: Layout, out: Tensor | None = None) -> Tensor:
        """See GatherCodec."""
        codes, scales = check_parts(payload, 2, self.name)
        if out is None:
            out = torch.empty(layout.total, device=layout.device)
        from_grid(codes, scales, self.bits, self.align, out)
        return out


def check_block(block: int) -> int:
    """A block's size, or ValueError when no bytes can end where it does."""
    if type(block) is not int or block < 8 or block % 8:
        raise ValueError(f"block={block!r}: must be a positive multiple of 8")
    return block


def grid_levels(bits: int) -> int:
    """Steps of the grid on each side of zero."""
    return (1 << bits - 1) - 1


def largest_scale(bits: int) -> float:
    """What a scale is limited to, so that no code at all decodes to infinity."""
    return _MAX / (1 << bits - 1) * (1 - 1e-6)


def block_scales(blocks: Tensor, bits: int, norm: str = "max") -> Tensor:
    """The step of each row's grid, whose last level is the row's largest magnitude ("max") or its L2 norm ("l2")."""
    top = blocks.abs().amax(1) if norm == "max" else torch.linalg.vector_norm(blocks, dim=1)
    scales = (top / grid_levels(bits)).clamp_(max=largest_scale(bits))
    # The inverse of a smaller one is infinite.
    return torch.where(scales >= _TINY, scales, 0.0)


def to_grid(
    flat: Tensor, bits: int, block: int, *, norm: str = "max", generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Codes, packed, and scales of a buffer of whole blocks; with a generator rounded at random, unbiased."""
    levels = grid_levels(bits)
    scales = torch.empty(flat.numel() // block, device=flat.device)
    codes = torch.empty(packed_bytes(flat.numel(), bits), dtype=torch.uint8, device=flat.device)
    for span in spans(flat.numel(), block, flat.device):
        blocks = flat[span].view(-1, block)
        steps = block_scales(blocks, bits, norm)
        scales[span.start // block : span.stop // block] = steps
        inverse = torch.where(steps > 0, steps.reciprocal(), 0.0)
        scaled = blocks * inverse[:, None]
        if generator is None:
            scaled.round_()
        else:
            scaled.add_(torch.rand(scaled.shape, generator=generator, device=flat.device)).floor_()
        # Beyond the last level by rounding alone.
        scaled.clamp_(-levels, levels).add_(levels)
        part = codes[span.start * bits // 8 : span.stop * bits // 8]
        if bits == 8:
            part.copy_(scaled.view(-1))
        else:
            part.copy_(pack_bits(scaled.view(-1).to(torch.uint8), bits))
    return codes, scales


def from_grid(codes: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    """Write the numbers of `to_grid` to `out`; raises ValueError for codes and scales that are not of its size."""
    levels, total = grid_levels(bits), out.numel()
    check_part(codes, "codes", torch.uint8, packed_bytes(total, bits))
    check_scales(scales, total // block, largest_scale(bits))
    for span in spans(total, block, out.device):
        part = codes[span.start * bits // 8 : span.stop * bits // 8]
        whole = part if bits == 8 else unpack_bits(part, bits, span.stop - span.start, torch.uint8)
        numbers = whole.to(torch.float32).sub_(levels).view(-1, block)
        torch.mul(numbers, scales[span.start // block : span.stop // block, None], out=out[span].view(-1, block))
