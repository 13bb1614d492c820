"""E3M0: floating point of 4 bits, a sign and three bits of exponent (streaming DiLoCo, arXiv 2501.18512)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmkit.optim.compression.bits import pack_bits, unpack_bits
from swarmkit.optim.compression.codec import (
    MIN_SIZE,
    Layout,
    Parameters,
    check_part,
    check_parts,
    check_scales,
    run_tops,
    spans,
    tensor_tops,
)

_RUN = 256  # elements that share a scale, when not the whole tensor does
_SMALLEST = 2.0**-6  # magnitude of the lowest level, relative to the scale
_TINY = torch.finfo(torch.float32).tiny
_MAX = torch.finfo(torch.float32).max


class E3M0:
    """Sends 4 bits a number: zero or a sign and one of s, s/2, ..., s/64, the nearest one.

    s is the largest magnitude of the tensor, or with `block` (a multiple of 8) of that many numbers of it. A number
    of at least s/64 is off by at most a third of itself, and what is sent again stays as it is.
    """

    name = "fp4"
    unbiased = False
    contractive = True
    parameter: float | None = None
    candidates: tuple[float, ...] = ()

    def __init__(self, block: int | None = None, *, min_size: int = MIN_SIZE) -> None:
        if block is not None and (type(block) is not int or block < 8 or block % 8):
            raise ValueError(f"block={block!r}: must be a positive multiple of 8, or None")
        self.min_size = min_size
        self.block = block
        self.align = _RUN if block is None else block

    def payload_bytes(self, shape: Sequence[int], parameter: float | None = None) -> int:
        """See Codec."""
        runs = -(-math.prod(shape) // self.align)
        return runs * self.align // 2 + 4 * (runs if self.block is not None else min(runs, 1))

    def errors(self, tensor: Tensor, candidates: Parameters) -> Tensor:
        """See Codec: there is nothing to choose."""
        if len(candidates):
            raise ValueError(f"{self.name} has no parameter, got candidates {list(candidates)[:3]}")
        return torch.zeros(0, dtype=torch.float64)

    def scales(self, flat: Tensor, layout: Layout) -> Tensor:
        """One scale a block or a tensor; 0 where all is too small for levels of normal numbers."""
        top = run_tops(flat, self.block) if self.block is not None else tensor_tops(flat, layout)
        return torch.where(top >= _TINY / _SMALLEST, top, 0.0)

    def encode(
        self, flat: Tensor, layout: Layout, generator: torch.Generator, parameters: Parameters | None = None
    ) -> list[Tensor]:
        """See GatherCodec: codes with the sign in the highest bit, two a byte, and the scales."""
        scales = self.scales(flat, layout)
        inverse = self._of_runs(torch.where(scales > 0, scales.reciprocal(), 0.0), layout)
        codes = torch.empty(layout.total // 2, dtype=torch.uint8, device=flat.device)
        for span in spans(layout.total, self.align, flat.device):
            share = flat[span].view(-1, self.align) * inverse[span.start // self.align : span.stop // self.align, None]
            # Half a mantissa up carries into the exponent from 1.5 * 2**e on, the middle of two levels; the middle of
            # zero and the lowest level is a power of two instead.
            negative = (share < 0).to(torch.uint8)
            magnitude = share.abs_()
            large = (magnitude >= _SMALLEST / 2).to(torch.uint8)
            level = magnitude.clamp_(_SMALLEST, 1.0).view(torch.int32).add_(1 << 22).bitwise_right_shift_(23)
            digit = level.sub_(120).to(torch.uint8).mul_(large)
            codes[span.start // 2 : span.stop // 2] = pack_bits(digit.bitwise_or_(negative << 3), 4)
        return [codes, scales]

    def decode(self, payload: Sequence[Tensor], layout: Layout, out: Tensor | None = None) -> Tensor:
        """See GatherCodec."""
        codes, scales = check_parts(payload, 2, self.name)
        check_part(codes, "codes", torch.uint8, layout.total // 2)
        runs = layout.total // self.align
        check_scales(scales, runs if self.block is not None else len(layout.shapes), _MAX)
        if out is None:
            out = torch.empty(layout.total, device=layout.device)
        of_run = self._of_runs(scales, layout)
        levels = torch.tensor([0.0, *(2.0 ** (e - 7) for e in range(1, 8))], device=layout.device)
        table = torch.cat([levels, -levels])
        for span in spans(layout.total, self.align, layout.device):
            code = unpack_bits(codes[span.start // 2 : span.stop // 2], 4, span.stop - span.start, torch.int32)
            numbers = table.index_select(0, code).view(-1, self.align)
            run = slice(span.start // self.align, span.stop // self.align)
            torch.mul(numbers, of_run[run, None], out=out[span].view(-1, self.align))
        return out

    def _of_runs(self, scales: Tensor, layout: Layout) -> Tensor:
        return scales if self.block is not None else scales[layout.owners]
