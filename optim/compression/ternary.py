"""TernGrad: each number is -1, 0 or 1 times its tensor's scale, unbiased (arXiv 1705.07878)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmkit.optim.compression.codec import (
    MIN_SIZE,
    Layout,
    Parameters,
    check_part,
    check_parts,
    check_scales,
    spans,
    tensor_tops,
)

_RUN = 320  # elements of a tensor's share of the buffer: of whole bytes, five numbers each
_TINY = torch.finfo(torch.float32).tiny
_MAX = torch.finfo(torch.float32).max
FEEDBACK_REFUSAL = (
    "TernGrad's noise exceeds the signal, and fed back it grows without end; leave it off, or use topk or int4"
)


class TernGrad:
    """Sends a tensor x as s * sign(x) * Bernoulli(|x| / s), five numbers a byte, with one scale s a tensor.

    First x is clipped at `clip` times its root mean square (the paper's standard deviation, for tensors centred at
    zero), or with None not at all; s is the largest magnitude left. What is not clipped has expectation x and variance
    |x| (s - |x|). The paper's workers agree on the largest s; here each sends its own, which is as unbiased.
    """

    name = "ternary"
    align = _RUN
    parameter: float | None = None
    candidates: tuple[float, ...] = ()
    # The noise exceeds the signal, and fed back it would grow without end.
    contractive = False

    def __init__(self, clip: float | None = 2.5, *, min_size: int = MIN_SIZE) -> None:
        if clip is not None and not (math.isfinite(clip) and clip > 0):
            raise ValueError(f"clip={clip!r}: must be positive, or None")
        self.min_size = min_size
        self.clip = clip
        self.unbiased = clip is None

    def payload_bytes(self, shape: Sequence[int], parameter: float | None = None) -> int:
        """See Codec."""
        runs = -(-math.prod(shape) // _RUN)
        return runs * _RUN // 5 + (4 if runs else 0)

    def errors(self, tensor: Tensor, candidates: Parameters) -> Tensor:
        """See Codec: there is nothing to choose."""
        if len(candidates):
            raise ValueError(f"{self.name} has no parameter, got candidates {list(candidates)[:3]}")
        return torch.zeros(0, dtype=torch.float64)

    def scales(self, flat: Tensor, layout: Layout) -> Tensor:
        """One scale a tensor."""
        top = tensor_tops(flat, layout)
        if self.clip is not None:
            squares = torch.empty(layout.owners.numel(), dtype=torch.float64, device=flat.device)
            # Relative to the largest, so that no square overflows or vanishes.
            inverse = torch.where(top >= _TINY, top, 1.0).reciprocal()[layout.owners]
            for span in spans(layout.total, _RUN, flat.device):
                runs = slice(span.start // _RUN, span.stop // _RUN)
                squares[runs] = (flat[span].view(-1, _RUN) * inverse[runs, None]).square_().sum(1)
            # Differences of one running sum: adding up by tensor has no fixed order on some devices.
            ends = torch.tensor(layout.offsets, device=flat.device) // _RUN
            sums = torch.cat([squares.new_zeros(1), squares.cumsum(0)])[ends].diff()
            sizes = torch.tensor(layout.sizes, device=flat.device).clamp(min=1)
            top = torch.minimum(top, self.clip * (sums / sizes).sqrt().float() * top)
        # The inverse of a smaller one is infinite.
        return torch.where(top >= _TINY, top, 0.0)

    def encode(
        self, flat: Tensor, layout: Layout, generator: torch.Generator, parameters: Parameters | None = None
    ) -> list[Tensor]:
        """See GatherCodec: bytes of five digits to the base 3, lowest first, and the scales."""
        scales = self.scales(flat, layout)
        inverse = torch.where(scales > 0, scales.reciprocal(), 0.0)[layout.owners]
        codes = torch.empty(layout.total // 5, dtype=torch.uint8, device=flat.device)
        weights = torch.tensor([1, 3, 9, 27, 81], dtype=torch.float32, device=flat.device)
        for span in spans(layout.total, _RUN, flat.device):
            share = flat[span].view(-1, _RUN) * inverse[span.start // _RUN : span.stop // _RUN, None]
            chance = torch.rand(share.shape, generator=generator, device=flat.device)
            digits = share.sign().mul_(chance < share.abs()).add_(1)
            codes[span.start // 5 : span.stop // 5] = digits.view(-1, 5) @ weights
        return [codes, scales]

    def decode(self, payload: Sequence[Tensor], layout: Layout, out: Tensor | None = None) -> Tensor:
        """See GatherCodec."""
        codes, scales = check_parts(payload, 2, self.name)
        check_part(codes, "codes", torch.uint8, layout.total // 5)
        check_scales(scales, len(layout.shapes), _MAX)
        if codes.numel() and int(codes.max()) >= 3**5:
            raise ValueError(f"code {int(codes.max())} of the payload is not of five digits to the base 3")
        if out is None:
            out = torch.empty(layout.total, device=layout.device)
        digits = torch.arange(3**5, device=layout.device)[:, None] // torch.tensor(
            [1, 3, 9, 27, 81], device=layout.device
        )
        table = (digits % 3 - 1).to(torch.float32)
        of_run = scales[layout.owners]
        for span in spans(layout.total, _RUN, layout.device):
            numbers = table[codes[span.start // 5 : span.stop // 5].int()].view(-1, _RUN)
            torch.mul(numbers, of_run[span.start // _RUN : span.stop // _RUN, None], out=out[span].view(-1, _RUN))
        return out
