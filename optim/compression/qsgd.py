"""QSGD: stochastic, unbiased rounding to a few bits in buckets (arXiv 1610.02132)."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from swarmkit.optim.compression.bits import packed_bytes
from swarmkit.optim.compression.blockwise import block_scales, check_block, from_grid, to_grid
from swarmkit.optim.compression.codec import MIN_SIZE, Layout, Parameters, check_part, check_parts, chosen


class QSGD:
    """Sends integers of 2 to 8 bits and a float32 scale for each bucket of a tensor, rounded at random.

    With s = 2**(bits - 1) - 1 steps between zero and the bucket's scale, the variance is at most
    min(n / s**2, sqrt(n) / s) * |x|**2. The scale is the largest magnitude (`norm="max"`, as in the paper's
    experiments: fewer zeros) or the L2 norm (`norm="l2"`, as in its theory). The parameter is the number of bits.
    """

    name = "qsgd"
    unbiased = True
    candidates: tuple[float, ...] = (2, 3, 4, 5, 6, 7, 8)

    def __init__(self, bits: int = 4, bucket: int = 512, norm: str = "max", *, min_size: int = MIN_SIZE) -> None:
        if norm not in ("max", "l2"):
            raise ValueError(f"norm={norm!r}: must be 'max' or 'l2'")
        self.parameter: float | None = _check_bits(bits)
        self.align = check_block(bucket)
        self.min_size = min_size
        self.norm = norm
        # With few levels the noise exceeds the signal, and fed back it would grow without end.
        self.contractive = False

    def payload_bytes(self, shape: Sequence[int], parameter: float | None = None) -> int:
        """See Codec."""
        bits = _check_bits(self.parameter if parameter is None else parameter)
        buckets = -(-math.prod(shape) // self.align)
        return packed_bytes(buckets * self.align, bits) + 4 * buckets

    def errors(self, tensor: Tensor, candidates: Parameters) -> Tensor:
        """See Codec: step**2 * p * (1 - p) for a number that is p steps above a level."""
        layout = Layout.of([tensor], self.align)
        buckets = layout.flatten([tensor]).view(-1, self.align)
        found = torch.zeros(len(candidates), dtype=torch.float64)
        for i, bits in enumerate(candidates):
            steps = block_scales(buckets, _check_bits(bits), self.norm)[:, None]
            above = (buckets / torch.where(steps > 0, steps, 1.0)).frac_().abs_()
            variances = (above * (1 - above)).sum(1).double() * steps[:, 0].double() ** 2
            found[i] = variances.sum().sqrt()
        return found

    def encode(
        self, flat: Tensor, layout: Layout, generator: torch.Generator, parameters: Parameters | None = None
    ) -> list[Tensor]:
        """See GatherCodec: bits of each tensor, codes and scales; those of tensors with fewest bits first."""
        widths = [_check_bits(bits) for bits in chosen(parameters, self.parameter or 0, layout)]
        found = []
        for bits, buckets in self._groups(widths, layout):
            part = flat if buckets is None else flat.view(-1, self.align)[buckets].view(-1)
            found.append(to_grid(part, bits, self.align, norm=self.norm, generator=generator))
        header = torch.tensor(widths, dtype=torch.uint8, device=flat.device)
        codes, scales = zip(*found, strict=True) if found else ((flat.new_empty(0).byte(),), (flat.new_empty(0),))
        return [header, torch.cat(codes), torch.cat(scales)]

    def decode(self, payload: Sequence[Tensor], layout: Layout, out: Tensor | None = None) -> Tensor:
        """See GatherCodec."""
        header, codes, scales = check_parts(payload, 3, self.name)
        widths = [_check_bits(b) for b in check_part(header, "bits", torch.uint8, len(layout.shapes)).tolist()]
        if out is None:
            out = torch.empty(layout.total, device=layout.device)
        sizes = [b - a for a, b in zip(layout.offsets, layout.offsets[1:], strict=False)]
        check_part(codes, "codes", torch.uint8, sum(n * b // 8 for n, b in zip(sizes, widths, strict=True)))
        check_part(scales, "scales", torch.float32, layout.total // self.align)
        for bits, buckets in self._groups(widths, layout):
            count = layout.total if buckets is None else buckets.numel() * self.align
            part = out if buckets is None else torch.empty(count, device=layout.device)
            mine = codes[: count * bits // 8], scales[: count // self.align]
            codes, scales = codes[count * bits // 8 :], scales[count // self.align :]
            from_grid(*mine, bits, self.align, part)
            if buckets is not None:
                out.view(-1, self.align)[buckets] = part.view(-1, self.align)
        return out

    def _groups(self, widths: list[int], layout: Layout) -> Iterator[tuple[int, Tensor | None]]:
        """The buckets of each width that occurs, None for all of them."""
        if len(set(widths)) == 1:
            yield widths[0], None
        elif widths:
            of_bucket = torch.tensor(widths, device=layout.device)[layout.owners]
            for bits in sorted(set(widths)):
                yield bits, (of_bucket == bits).nonzero().view(-1)


def feedback_refusal(bits: float, norm: str) -> str | None:
    """Why error feedback of so many bits is refused: each rounding adds more than it removes. None: it is not.

    With the largest magnitude as the scale each residual is below a step, so in the largest magnitude X of what comes
    in they stay below X / (s - 1), however large the bucket. With the L2 norm nothing holds them from s**2 numbers on.
    """
    if bits >= 4 and norm == "max":
        return None
    return (
        f"with {bits:g} bits and norm={norm} QSGD's noise exceeds the signal, and fed back it grows without end; "
        "use at least 4 bits with norm=max, or int4"
    )


def _check_bits(bits: float | None) -> int:
    if bits not in (2, 3, 4, 5, 6, 7, 8):
        raise ValueError(f"bits={bits!r}: must be a number from 2 to 8")
    return int(bits)
