"""DeMo's momentum: what gradients have gathered in the DCT domain, its largest entries, and the mean of several."""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from swarmkit.optim.dct import Block, Chunks, Group
from swarmkit.optim.demo_payload import Sparse
from swarmkit.optim.top_k import top_k

_LEAST = 1e-30  # norm of a chunk that can be scaled to another; those of less become 0


class Weighted(Protocol):
    """Entries by group of chunks, and what they weigh."""

    @property
    def parts(self) -> Sequence[Sparse]:
        """The entries."""
        ...

    @property
    def weight(self) -> float:
        """Positive."""
        ...


class Momentum:
    """The momentum of all tensors, float32, chunk by chunk: [chunks, area] for each group of equal chunks.

    The transform is orthonormal, so taking an entry out of the momentum here is what the paper's Algorithm 1 does by
    decoding the entry and subtracting it from the tensor.
    """

    def __init__(self, chunks: Chunks, k: int) -> None:
        self.chunks = chunks
        self.k = [entries(group, k) for group in chunks.groups]
        self.tensors = [torch.zeros(group.count, group.area, device=chunks.device) for group in chunks.groups]

    def accumulate(self, gradients: Sequence[Tensor], decay: float) -> None:
        """Multiply by `decay` and add the gradients' coefficients."""
        matrices = self.chunks.matrices(gradients)
        for group, held in zip(self.chunks.groups, self.tensors, strict=True):
            for block in group.blocks:
                found = self.chunks.encode(group, block, matrices)
                rows = held[block.start : block.start + block.count]
                for new, part in zip(found, rows.chunk(len(found), dim=1), strict=True):
                    torch.add(new, part, alpha=decay, out=part)

    def largest(self) -> list[Sparse]:
        """The k entries of every chunk that are largest in absolute value."""
        return [self._largest(*each) for each in zip(self.chunks.groups, self.tensors, self.k, strict=True)]

    def _largest(self, group: Group, held: Tensor, k: int) -> Sparse:
        index = torch.empty(group.count, k, dtype=torch.int64, device=held.device)
        for block in group.blocks:
            rows = slice(block.start, block.start + block.count)
            magnitude = torch.abs(held[rows], out=self.chunks.scratch(group, block, 0))
            index[rows] = top_k(magnitude, k)
        return Sparse(index, held.gather(1, index))

    def subtract(self, parts: Sequence[Sparse], alpha: float) -> None:
        """Take `alpha` times the entries out."""
        for held, part in zip(self.tensors, parts, strict=True):
            # Not scatter_add_, whose order is free on an accelerator; positions differ within a chunk.
            held.scatter_(1, part.index, held.gather(1, part.index).sub_(part.values, alpha=alpha))


def entries(group: Group, k: int) -> int:
    """Entries per chunk: k in a full one of 64 by 64, else in proportion to the square root of its area."""
    return max(1, min(group.area, math.ceil(k * math.sqrt(group.area) / 64)))


class Mean:
    """The mean of several members' entries, decoded into tensors block by block."""

    def __init__(self, chunks: Chunks, members: Sequence[Weighted], average: str) -> None:
        """Average over the "senders" of a coefficient, or over all "members"."""
        self._chunks = chunks
        self._members = [member.parts for member in members]
        self._weights = [member.weight for member in members]
        self._average = average

    def decode(self, tensors: Sequence[Tensor], *, sign: bool = False, normalise: bool = False) -> float:
        """Write the mean into the tensors, or its signs, or its chunks scaled to a root mean square of 1.

        Returns the L2 norm of the mean.
        """
        outputs = self._chunks.outputs(tensors)
        found: list[Tensor] = []
        for i, group in enumerate(self._chunks.groups):
            for block in group.blocks:
                chunks = self._decode(group, block, [member[i] for member in self._members])
                norms = torch.linalg.vector_norm(chunks, dim=1, keepdim=True)
                found.append(norms.norm())
                if sign:
                    chunks.sign_()
                elif normalise:
                    chunks.mul_(torch.where(norms > _LEAST, math.sqrt(group.area) / norms, 0))
                self._chunks.store(group, block, chunks, outputs)
        self._chunks.collect(outputs, tensors)
        return float(torch.stack(found).norm()) if found else 0.0

    def _decode(self, group: Group, block: Block, parts: Iterable[Sparse]) -> Tensor:
        rows = slice(block.start, block.start + block.count)
        index, values = zip(*((part.index[rows], part.values[rows]) for part in parts), strict=True)
        first, second = (self._chunks.scratch(group, block, which) for which in (0, 1))
        shares = self._shares(index, first)
        scaled = [value * share for value, share in zip(values, shares, strict=True)]
        if 4 * sum(part.shape[1] for part in index) <= 3 * (group.rows + group.columns):
            return self._chunks.decode_sparse(group, torch.cat(index, 1), torch.cat(scaled, 1), first)
        dense = first.zero_()
        # One member at a time: positions differ within a member, so each sum has one order on every device.
        for at, value in zip(index, scaled, strict=True):
            dense.scatter_(1, at, dense.gather(1, at).add_(value))
        return self._chunks.decode_dense(group, block, dense, second)

    def _shares(self, index: Sequence[Tensor], scratch: Tensor) -> Sequence[Tensor | float]:
        """What each member's entries count for in the mean."""
        if len(index) == 1 or self._average == "members":
            return [weight / math.fsum(self._weights) for weight in self._weights]
        total = scratch.zero_()
        for at, weight in zip(index, self._weights, strict=True):
            total.scatter_(1, at, total.gather(1, at).add_(weight))
        return [weight / total.gather(1, at) for at, weight in zip(index, self._weights, strict=True)]
