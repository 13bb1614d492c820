"""Top-k: the largest numbers of each tensor and where they are (Stich et al., arXiv 1809.07599)."""

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
    chosen,
    spans,
)

DENSITIES = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
_WIDTHS = (8, 10, 12, 14)  # bits of a position within its page
_SAMPLE = 2048  # numbers of a tensor that the first guess at its threshold is made from
_TINY = torch.finfo(torch.float32).tiny
_MAX = torch.finfo(torch.float32).max


class TopK:
    """Sends the round(density * n) largest numbers of each tensor, at least one; fewer when the others are zero.

    Exactly these: where several of the same size compete, the first ones are taken. Values are float16, relative to
    the largest of their tensor, or float32 (`values="float32"`). Positions take the fewest of 8, 10, 12 or 14 bits a
    number, counts for each page of that many numbers included. The parameter is the density.
    """

    name = "topk"
    unbiased = False
    contractive = True
    align = 8
    candidates: tuple[float, ...] = DENSITIES

    def __init__(self, density: float = 0.01, values: str = "float16", *, min_size: int = MIN_SIZE) -> None:
        if values not in ("float16", "float32"):
            raise ValueError(f"values={values!r}: must be 'float16' or 'float32'")
        self.parameter: float | None = check_density(density)
        self.min_size = min_size
        self.values = torch.float16 if values == "float16" else torch.float32

    def payload_bytes(self, shape: Sequence[int], parameter: float | None = None) -> int:
        """See Codec."""
        size = math.prod(shape)
        count = kept(size, check_density(self.parameter if parameter is None else parameter))
        scale = 4 if self.values == torch.float16 and size else 0
        return min(_position_bytes(width, count, size) for width in _WIDTHS) + self.values.itemsize * count + scale

    def errors(self, tensor: Tensor, candidates: Parameters) -> Tensor:
        """See Codec: the tail of one sort. Rounding of the values is not counted."""
        squares = tensor.detach().reshape(-1).to(torch.float32).abs().sort().values.double().square_()
        tails = torch.cat([squares.new_zeros(1), squares.cumsum(0)])
        size = tensor.numel()
        left = [size - kept(size, check_density(density)) for density in candidates]
        return tails[left].sqrt_().cpu()

    def encode(
        self, flat: Tensor, layout: Layout, generator: torch.Generator, parameters: Parameters | None = None
    ) -> list[Tensor]:
        """See GatherCodec: width, numbers in each page, positions within it, values, and scales for float16."""
        densities = chosen(parameters, self.parameter or 0.0, layout)
        counts = [kept(n, check_density(d)) for n, d in zip(layout.sizes, densities, strict=True)]
        positions, owners = largest(flat, layout, counts)
        values = flat[positions]
        scales = flat.new_empty(0)
        if self.values == torch.float16:
            scales = flat.new_zeros(len(counts)).scatter_reduce_(0, owners, values.abs(), "amax")
            scales = torch.where(scales >= _TINY, scales, 0.0)
            values = values * torch.where(scales > 0, scales.reciprocal(), 0.0)[owners]
        width = min(_WIDTHS, key=lambda width: _position_bytes(width, positions.numel(), layout.total))
        pages = -(-layout.total // 2**width)
        numbers = torch.bincount(positions >> width, minlength=pages).to(torch.int16)
        header = torch.tensor([width], dtype=torch.uint8, device=flat.device)
        packed = pack_bits(positions & (2**width - 1), width)
        return [header, numbers, packed, values.to(self.values), scales]

    def decode(self, payload: Sequence[Tensor], layout: Layout, out: Tensor | None = None) -> Tensor:
        """See GatherCodec."""
        header, numbers, packed, values, scales = check_parts(payload, 5, self.name)
        width = int(check_part(header, "width", torch.uint8, 1))
        if width not in _WIDTHS:
            raise ValueError(f"positions of {width} bits in the payload: must be of one of {_WIDTHS}")
        pages = check_part(numbers, "page counts", torch.int16, -(-layout.total // 2**width)).long()
        if pages.numel() and not 0 <= int(pages.min()) <= int(pages.max()) <= 2**width:
            raise ValueError("page counts of the payload are not in the page's range")
        count = int(pages.sum())
        check_part(values, "values", self.values, count)
        starts = (torch.arange(pages.numel(), device=layout.device) << width).repeat_interleave(pages)
        positions = unpack_bits(packed, width, count, torch.int64).add_(starts)
        # Ascending without repeats: where two numbers go to one place, the outcome depends on the hardware.
        if count and not (bool((positions[1:] > positions[:-1]).all()) and int(positions[-1]) < layout.total):
            raise ValueError("positions of the payload do not ascend, or leave the tensors")
        limit = 1.0 if self.values == torch.float16 else _MAX
        if count and not bool((values.abs() <= limit).all()):
            raise ValueError(f"values of the payload are beyond {limit:g} or not finite")
        numbers = values.to(torch.float32)
        if self.values == torch.float16:
            check_scales(scales, len(layout.shapes), _MAX)
            numbers = numbers * scales[layout.owners[positions // self.align]]
        out = torch.zeros(layout.total, device=layout.device) if out is None else out.zero_()
        return out.index_copy_(0, positions, numbers)


def kept(size: int, density: float) -> int:
    """How many of `size` numbers a density stands for."""
    return min(size, max(1, round(density * size)))


def check_density(density: float | None) -> float:
    """A density, or ValueError when it is no share."""
    if density is None or not 0 < density <= 1:
        raise ValueError(f"density={density!r}: must be in (0, 1]")
    return density


def largest(flat: Tensor, layout: Layout, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Positions of the `counts[i]` largest magnitudes other than zero of each tensor i, ascending, and their tensors.

    All tensors at once: a sample gives each a threshold that most likely a few more than enough exceed, and only those
    are sorted. Tensors where it was too high are done again without one.
    """
    wanted = torch.tensor(counts, device=flat.device)
    thresholds = _guess(flat, layout, counts)
    positions, owners, magnitudes = _above(flat, layout, thresholds)
    short = torch.bincount(owners, minlength=len(counts)) < wanted
    if bool((short & (thresholds > 0)).any()):
        positions, owners, magnitudes = _above(flat, layout, torch.where(short, 0.0, thresholds))
    # By tensor, and within it from the largest down; both sorts are stable, so that the first of equals come first.
    order = magnitudes.argsort(descending=True, stable=True)
    order = order[owners[order].argsort(stable=True)]
    found = torch.bincount(owners, minlength=len(counts))
    rank = torch.arange(order.numel(), device=flat.device) - (found.cumsum(0) - found).repeat_interleave(found)
    chosen = order[rank < wanted.repeat_interleave(found)].sort().values
    return positions[chosen], owners[chosen]


def _guess(flat: Tensor, layout: Layout, counts: Sequence[int]) -> Tensor:
    """A threshold for each tensor that a few more than its count should reach; 0 where a sample tells nothing."""
    sizes = torch.tensor(layout.sizes, device=flat.device)
    starts = torch.tensor(layout.offsets[:-1], device=flat.device)
    share = torch.tensor(counts, device=flat.device) / sizes.clamp(min=1)
    # Numbers at even distances, but not at a multiple of a matrix's width.
    steps = (torch.arange(_SAMPLE, device=flat.device, dtype=torch.float64) + 0.5) / _SAMPLE
    picks = (starts[:, None] + (sizes[:, None] * steps).long()).clamp_(max=max(layout.total - 1, 0))
    if not picks.numel() or not layout.total:
        return flat.new_zeros(len(counts))
    sample = flat[picks].abs_().sort(dim=1, descending=True).values
    # Four standard deviations on the safe side.
    rank = _SAMPLE * share + 4 * (_SAMPLE * share).sqrt() + 4
    found = sample.gather(1, rank.long().clamp_(max=_SAMPLE - 1)[:, None])[:, 0]
    return torch.where((rank < _SAMPLE) & (sizes > 4 * _SAMPLE), found, 0.0)


def _above(flat: Tensor, layout: Layout, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, tensors and magnitudes of what is not zero and reaches its tensor's threshold."""
    limits = thresholds.clamp(min=torch.finfo(torch.float32).smallest_normal * 2.0**-23)[layout.owners]
    found = []
    for span in spans(layout.total, layout.align, flat.device):
        runs = slice(span.start // layout.align, span.stop // layout.align)
        reached = flat[span].abs().view(-1, layout.align) >= limits[runs, None]
        found.append(reached.view(-1).nonzero().view(-1).add_(span.start))
    positions = torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=flat.device)
    return positions, layout.owners[positions // layout.align], flat[positions].abs_()


def _position_bytes(width: int, count: int, total: int) -> int:
    return packed_bytes(count, width) + 2 * -(-total // (1 << width))
