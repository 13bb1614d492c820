"""Random-k: a random share of the numbers, the same on all members, so that no positions travel (arXiv 1809.07599)."""

import math
from collections.abc import Generator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from swarmkit.optim.compression.codec import MIN_SIZE, Exchanged, Layout, Parameters, chosen
from swarmkit.optim.compression.sparse import DENSITIES, check_density, kept

_MAX = torch.finfo(torch.float32).max


class RandomK:
    """Sends k = round(density * n) numbers of each tensor, at least one, as float32.

    A tensor is cut into k strata as even as can be, and one number of each is drawn with a generator that all members
    have alike. With `unbiased` it is multiplied by the stratum's size, about n / k; without, it stays as it is, which
    error feedback needs. The parameter is the density.
    """

    name = "randomk"
    align = 1
    candidates: tuple[float, ...] = DENSITIES
    stages: tuple[str, ...] = ("",)

    def __init__(self, density: float = 0.01, unbiased: bool = True, *, min_size: int = MIN_SIZE) -> None:
        self.parameter: float | None = check_density(density)
        self.min_size = min_size
        self.unbiased = unbiased
        self.contractive = not unbiased

    def payload_bytes(self, shape: Sequence[int], parameter: float | None = None) -> int:
        """See Codec."""
        return 4 * kept(math.prod(shape), check_density(self.parameter if parameter is None else parameter))

    def errors(self, tensor: Tensor, candidates: Parameters) -> Tensor:
        """See Codec: a number is missed with probability 1 - k/n."""
        square = tensor.detach().to(torch.float64).square().sum().cpu()
        shares = [kept(tensor.numel(), check_density(d)) / max(tensor.numel(), 1) for d in candidates]
        left = [1 / share - 1 if self.unbiased else 1 - share for share in shares]
        return (torch.tensor(left, dtype=torch.float64) * square).sqrt_()

    def exchange(
        self,
        flat: Tensor,
        layout: Layout,
        generator: torch.Generator,
        parameters: Parameters | None = None,
        state: Sequence[Tensor] = (),
    ) -> Generator[list[Tensor], list[Tensor], Exchanged]:
        """See LinearCodec."""
        positions, sizes = self._draw(layout, generator, parameters)
        values = flat[positions]
        (mean,) = yield [values]
        factors = sizes if self.unbiased else torch.ones_like(sizes)

        def spread(numbers: Tensor) -> Tensor:
            zeros = torch.zeros(layout.total, device=layout.device)
            return zeros.index_copy_(0, positions, (numbers * factors).clamp_(-_MAX, _MAX))

        return Exchanged(spread(mean), lambda: spread(values))

    def _draw(self, layout: Layout, generator: torch.Generator, parameters: Parameters | None) -> tuple[Tensor, Tensor]:
        """One position in each stratum, int64, and the stratum's size."""
        densities = chosen(parameters, self.parameter or 0.0, layout)
        counts = [kept(n, check_density(d)) for n, d in zip(layout.sizes, densities, strict=True)]
        start, sizes = _strata(layout.offsets, layout.sizes, tuple(counts))
        # Drawn where the generator lives, which is the CPU on all members: another device draws other numbers.
        drawn = torch.rand(start.shape, generator=generator, dtype=torch.float64)
        # A product may be rounded up to the size itself.
        positions = start + torch.minimum((drawn * sizes).long(), sizes - 1)
        return positions.to(layout.device), sizes.to(layout.device, torch.float32)


@lru_cache(maxsize=8)
def _strata(offsets: tuple[int, ...], sizes: tuple[int, ...], counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Where each stratum starts and how long it is, on the CPU: the same in every round of the same tensors."""
    starts, ends = [], []
    for offset, size, count in zip(offsets, sizes, counts, strict=False):
        edges = torch.arange(count + 1, dtype=torch.int64) * size // max(count, 1) + offset
        starts.append(edges[:-1])
        ends.append(edges[1:])
    start = torch.cat(starts) if starts else torch.empty(0, dtype=torch.int64)
    return start, (torch.cat(ends) if ends else start) - start
