"""PowerSGD: matrices as products of two thin ones, by a power iteration across the members (arXiv 1905.13727)."""

import math
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from swarmkit.optim.compression.codec import MIN_SIZE, Exchanged, Layout, Parameters, chosen

_SEED = 0
_MORE = 8  # columns of a power iteration beyond those whose singular values are wanted


class PowerSGD:
    """Sends P = M Q, orthogonalises its mean, sends Q = M' P; the mean of M is then P Q', of rank r.

    A tensor of two and more dimensions becomes the matrix `shape[0] x the rest`: output channels by all inputs of
    each, for linear layers and convolutions alike. Ranks of min(n, m) are exact. What has one dimension travels exact.
    The next exchange starts from this one's Q (warm start), so that P converges to the leading singular vectors over
    the rounds. A member's own share, which error feedback subtracts, is P P' M for its own M: the mean is the weighted
    mean of these whoever is in the round. The parameter is the rank.

    Members must compute alike to the last bit (same hardware, same libraries) to hold bitwise equal means: unlike the
    other codecs, the matrix products come after the last averaging. Digests notice who does not (docs/log.md).
    """

    name = "powersgd"
    unbiased = False
    contractive = True
    align = 1
    candidates: tuple[float, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    stages: tuple[str, ...] = ("/p", "/q")

    def __init__(self, rank: int = 4, *, min_size: int = MIN_SIZE) -> None:
        self.min_size = min_size
        self.parameter: float | None = _check_rank(rank)

    def payload_bytes(self, shape: Sequence[int], parameter: float | None = None) -> int:
        """See Codec: (n + m) r floats, which of what has one dimension are more than it has itself."""
        rank = _check_rank(self.parameter if parameter is None else parameter)
        rows, columns = _matrix(shape)
        return 4 * min(rank, rows, columns) * (rows + columns)

    def errors(self, tensor: Tensor, candidates: Parameters) -> Tensor:
        """See Codec: what a power iteration that has settled leaves, at most a few percent above the best."""
        ranks = [_check_rank(rank) for rank in candidates]
        matrix = tensor.detach().reshape(_matrix(tensor.shape)).to(torch.float32)
        squares = _leading(matrix, max(ranks, default=0)).double().square_().flip(0)
        rest = (matrix.double().square_().sum() - squares.sum()).clamp_(min=0.0)
        if squares.numel() == min(matrix.shape):
            rest.zero_()  # else rounding of the sum
        tails = torch.cat([squares.new_zeros(1), squares.cumsum(0)]) + rest
        left = [max(squares.numel() - rank, 0) for rank in ranks]
        return tails[left].sqrt_().cpu()

    def exchange(
        self,
        flat: Tensor,
        layout: Layout,
        generator: torch.Generator,
        parameters: Parameters | None = None,
        state: Sequence[Tensor] = (),
    ) -> Generator[list[Tensor], list[Tensor], Exchanged]:
        """See LinearCodec; the state is Q of each tensor, m x r."""
        matrices = [view.view(_matrix(view.shape)) for view in layout.views(flat)]
        ranks = [_check_rank(rank) for rank in chosen(parameters, self.parameter or 0, layout)]
        ranks = [min(rank, *matrix.shape) for rank, matrix in zip(ranks, matrices, strict=True)]
        groups = _alike(matrices, ranks)
        bases = _orthogonal(groups, _start(matrices, ranks, state))
        mean_p = yield _products(groups, matrices, bases)
        bases = _orthogonal(groups, mean_p)
        own_q = _products(groups, [matrix.t() for matrix in matrices], bases)
        mean_q = yield own_q

        def product(factors: Sequence[Tensor]) -> Tensor:
            found = torch.zeros_like(flat)
            if matrices:
                targets = [view.view(_matrix(view.shape)) for view in layout.views(found)]
                torch._foreach_copy_(targets, _products(groups, bases, [factor.t() for factor in factors]))
            return found

        return Exchanged(product(mean_q), lambda: product(own_q), list(mean_q))


def _leading(matrix: Tensor, rank: int) -> Tensor:
    """The largest singular values, more than `rank` of them, or all of a small matrix.

    Two power iterations from random columns, the same for all matrices of a width: far cheaper than all values. Those
    wanted are below the true ones by little, because there are more columns than are wanted.
    """
    columns = rank + _MORE
    if min(matrix.shape) <= 2 * columns:
        every: Tensor = torch.linalg.svdvals(matrix)
        return every
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.t()
    top = tall.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)  # squares of very large numbers overflow
    tall = tall / top
    basis = torch.randn(tall.shape[1], columns, generator=torch.Generator().manual_seed(_SEED)).to(matrix.device)
    for _ in range(2):
        basis = torch.linalg.qr(tall.t() @ torch.linalg.qr(tall @ basis).Q).Q
    found: Tensor = torch.linalg.svdvals(tall @ basis)
    return found * top


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix."""
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:])


def _check_rank(rank: float | None) -> int:
    if rank is None or rank < 1 or rank != int(rank):
        raise ValueError(f"rank={rank!r}: must be a number from 1 up")
    return int(rank)


def check_bases(state: Sequence[Tensor], shapes: Sequence[Sequence[int]] | None) -> None:
    """Raise ValueError for what are not matrices with as many rows as these tensors, where known, have columns."""
    if any(q.dim() != 2 for q in state):
        raise ValueError(f"the bases that PowerSGD starts from are {[list(q.shape) for q in state[:3]]}, not matrices")
    if state and shapes is not None and [q.shape[0] for q in state] != [_matrix(shape)[1] for shape in shapes]:
        raise ValueError("the bases that PowerSGD starts from are of other tensors")


def _alike(matrices: Sequence[Tensor], ranks: Sequence[int]) -> list[list[int]]:
    """Positions of the matrices of equal shape and rank, which are multiplied together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (matrix, rank) in enumerate(zip(matrices, ranks, strict=True)):
        groups.setdefault((*matrix.shape, rank), []).append(i)
    return list(groups.values())


def _products(groups: list[list[int]], left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """left[i] @ right[i] for all i, a batch for each group."""
    found: dict[int, Tensor] = {}
    for group in groups:
        if len(group) == 1:
            products = [left[group[0]] @ right[group[0]]]
        else:
            products = list(torch.stack([left[i] for i in group]) @ torch.stack([right[i] for i in group]))
        found.update(zip(group, products, strict=True))
    return [found[i] for i in range(len(left))]


def _orthogonal(groups: list[list[int]], columns: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormal bases of the columns, by QR; whatever completes them where the columns are dependent."""
    found: dict[int, Tensor] = {}
    for group in groups:
        # Squares of very large or small numbers would overflow or vanish.
        stacked = torch.stack([columns[i] for i in group])
        if stacked.numel():
            stacked = stacked / stacked.abs().amax((1, 2), keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
            stacked = torch.linalg.qr(stacked).Q
        found.update(zip(group, stacked, strict=True))
    return [found[i] for i in range(len(columns))]


def _start(matrices: Sequence[Tensor], ranks: Sequence[int], state: Sequence[Tensor]) -> list[Tensor]:
    """What to multiply with first: the last Q, cut or filled up with seeded columns when the rank has changed."""
    check_bases(state, [matrix.shape for matrix in matrices])
    found = []
    for i, (matrix, rank) in enumerate(zip(matrices, ranks, strict=True)):
        warm = state[i].to(matrix.device)[:, :rank] if state else matrix.new_empty(matrix.shape[1], 0)
        if warm.shape[1] < rank:
            generator = torch.Generator().manual_seed(_SEED + i)
            fresh = torch.randn(matrix.shape[1], rank, generator=generator)[:, warm.shape[1] :].to(matrix.device)
            # As long as the others, or rounding decides which of them counts.
            length = warm.norm() / math.sqrt(warm.numel()) if warm.numel() else 1.0
            warm = torch.cat([warm, fresh * length], dim=1)
        found.append(warm)
    return found
