"""Casting: half as many bytes in float16 or bfloat16, averaged as they are."""

import math
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from swarmkit.optim.compression.codec import MIN_SIZE, Exchanged, Layout, Parameters

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Casting:
    """Sends float16 ("fp16") or bfloat16 ("bf16") numbers, rounded to the nearest.

    What float16 cannot hold (beyond 65504) becomes its largest value. The mean is of the same dtype.
    """

    unbiased = False
    contractive = True
    align = 1
    parameter: float | None = None
    candidates: tuple[float, ...] = ()
    stages: tuple[str, ...] = ("",)

    def __init__(self, dtype: str = "fp16", *, min_size: int = MIN_SIZE) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype!r}: must be one of {sorted(_DTYPES)}")
        self.min_size = min_size
        self.name = dtype
        self.dtype = _DTYPES[dtype]

    def payload_bytes(self, shape: Sequence[int], parameter: float | None = None) -> int:
        """See Codec."""
        return 2 * math.prod(shape)

    def errors(self, tensor: Tensor, candidates: Parameters) -> Tensor:
        """See Codec: there is nothing to choose."""
        if len(candidates):
            raise ValueError(f"{self.name} has no parameter, got candidates {list(candidates)[:3]}")
        return torch.zeros(0, dtype=torch.float64)

    def cast(self, flat: Tensor) -> Tensor:
        """A buffer in the narrow dtype."""
        found = flat.to(self.dtype)
        limit = torch.finfo(self.dtype).max
        return found.clamp_(-limit, limit)

    def exchange(
        self,
        flat: Tensor,
        layout: Layout,
        generator: torch.Generator,
        parameters: Parameters | None = None,
        state: Sequence[Tensor] = (),
    ) -> Generator[list[Tensor], list[Tensor], Exchanged]:
        """See LinearCodec."""
        sent = self.cast(flat)
        (mean,) = yield [sent]
        return Exchanged(mean.to(torch.float32), lambda: sent.to(torch.float32))
