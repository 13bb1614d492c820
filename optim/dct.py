"""Chunked DCT-II: tensors of any shapes as equal chunks in the frequency domain, in few batched calls."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# Elements that are worked on at once: what stays in a core's cache, and what keeps an accelerator busy.
_CPU_BLOCK = 1 << 19
_DEVICE_BLOCK = 1 << 25
_LEAST_FOLDED = 48  # side of a chunk


@lru_cache(maxsize=256)
def dct_basis(n: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II matrix [n, n], float32: `basis @ x` are the coefficients of x, `basis.T @ z` is back.

    Even frequencies come first: of an x of even length these see only the sums of mirrored elements, the odd ones only
    the differences, so that a transform is two of half the length.
    """
    k = torch.arange(n, dtype=torch.float64)
    basis = torch.cos(math.pi / n * torch.outer(k, k + 0.5)) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return torch.cat((basis[0::2], basis[1::2])).to(device=device, dtype=torch.float32)


def chunk_size(length: int, limit: int) -> int:
    """Side of the fewest chunks of at most `limit` that cover `length`: their number - 1 is the most that is padded.

    The largest divisor, which the reference takes, is 1 for a prime; here a length of 127 becomes two chunks of 64.
    """
    return math.ceil(length / math.ceil(length / limit))


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of one matrix, in whole chunks."""

    matrix: int
    rows: tuple[int, int]  # in chunks
    columns: tuple[int, int]
    start: int  # its first chunk, within the block

    @property
    def count(self) -> int:
        """Chunks in it."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


@dataclass(frozen=True, slots=True)
class Block:
    """Chunks of a group that are worked on together."""

    start: int  # within the group
    count: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """All chunks of one shape, in the order of their tensors and row by row within these."""

    rows: int
    columns: int
    count: int
    blocks: tuple[Block, ...]

    @property
    def area(self) -> int:
        """Elements of a chunk."""
        return self.rows * self.columns


class Chunks:
    """How tensors are cut into chunks of at most `chunk` by `chunk`.

    A tensor of two dimensions or more is a matrix [first dimension, all others]. Vectors, scalars and matrices that
    are but one row or column are strung together to one vector, so that many small tensors cost no more than one; its
    chunks are 1 by `chunk`. Edges are padded with zeros. Empty tensors have no chunks. The cut depends on the shapes
    alone, so peers with the same shapes have the same chunks in the same order, on whatever device.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], chunk: int, device: torch.device) -> None:
        if not 1 <= chunk <= 256:
            raise ValueError(f"chunk={chunk}: must be from 1 to 256")
        self.device = device
        self.shapes = [torch.Size(shape) for shape in shapes]
        self._vectors = [i for i, s in enumerate(self.shapes) if s.numel() and s.numel() in (max(s, default=1), 1)]
        flat = set(self._vectors)
        self._matrices = [i for i, shape in enumerate(self.shapes) if shape.numel() and i not in flat]
        self._sizes = [(self.shapes[i][0], self.shapes[i].numel() // self.shapes[i][0]) for i in self._matrices]
        total = sum(self.shapes[i].numel() for i in self._vectors)
        if total:
            self._sizes.append((1, total))
        cuts = [(chunk_size(h, chunk), chunk_size(w, chunk)) for h, w in self._sizes]
        if total > chunk:
            cuts[-1] = (1, chunk)
        self.groups = [self._group(cut, [i for i, c in enumerate(cuts) if c == cut]) for cut in sorted(set(cuts))]
        largest = max((block.count * g.area for g in self.groups for block in g.blocks), default=0)
        # Fresh temporaries would cost more in page faults than in arithmetic.
        self._scratch = torch.empty(3, largest, device=device)
        self._rows = torch.empty(2, 0, device=device)

    def _group(self, cut: tuple[int, int], matrices: list[int]) -> Group:
        limit = max(1, (_CPU_BLOCK if self.device.type == "cpu" else _DEVICE_BLOCK) // (cut[0] * cut[1]))
        blocks: list[Block] = []
        pieces: list[Piece] = []
        start = count = 0
        for piece in (p for i in matrices for p in _pieces(i, self._sizes[i], cut, limit)):
            if count + piece.count > limit:
                blocks.append(Block(start, count, tuple(pieces)))
                start, count, pieces = start + count, 0, []
            pieces.append(Piece(piece.matrix, piece.rows, piece.columns, count))
            count += piece.count
        return Group(*cut, start + count, (*blocks, Block(start, count, tuple(pieces))))

    def scratch(self, group: Group, block: Block, which: int) -> Tensor:
        """Working space [chunks, area] for a block, one of three; its content is whatever was left there."""
        return self._scratch[which, : block.count * group.area].view(block.count, group.area)

    # -- tensors to chunks and back ----------------------------------------------------------------------------------

    def matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as the matrices that are cut: views where their strides allow it."""
        found = [tensors[i].detach().reshape(size) for i, size in zip(self._matrices, self._sizes, strict=False)]
        if self._vectors:
            parts = [tensors[i].detach().reshape(-1).to(self.device, torch.float32) for i in self._vectors]
            found.append(torch.cat(parts).view(1, -1))
        return found

    def encode(self, group: Group, block: Block, matrices: Sequence[Tensor]) -> Tensor:
        """The coefficients of a block in working space, [parts, chunks, area / parts]: each chunk's parts in order."""
        first, second, third = (self.scratch(group, block, which) for which in range(3))
        self._load(group, block, matrices, first)
        rows, columns = group.rows, group.columns
        flat, basis = (-1, columns), dct_basis(columns, self.device)
        if self._folds(columns):
            halves = third.view(2, -1, columns // 2)
            _fold(first.view(flat), 1, halves)
            for half, square, out in zip(halves, _quarters(basis), second.view(flat).chunk(2, dim=1), strict=True):
                torch.mm(half, square.T, out=out)
        else:
            torch.mm(first.view(flat), basis.T, out=second.view(flat))
        if rows == 1:
            return second.unsqueeze(0)
        basis = dct_basis(rows, self.device)
        if self._folds(rows):
            halves, found = (space.view(2, block.count, rows // 2, columns) for space in (third, first))
            _fold(second.view(block.count, rows, columns), 1, halves)
            for half, square, out in zip(halves, _quarters(basis), found, strict=True):
                torch.bmm(square.expand(block.count, -1, -1), half, out=out)
            return found.flatten(2)
        shape = (block.count, rows, columns)
        torch.bmm(basis.expand(block.count, -1, -1), second.view(shape), out=first.view(shape))
        return first.unsqueeze(0)

    def _folds(self, size: int) -> bool:
        # Half the multiplications, but products of few columns run slowly, and accelerators wait for memory anyway.
        return size % 2 == 0 and size >= _LEAST_FOLDED and self.device.type == "cpu"

    def _load(self, group: Group, block: Block, matrices: Sequence[Tensor], out: Tensor) -> None:
        for piece in block.pieces:
            (top, bottom), (first, last) = piece.rows, piece.columns
            r, c = group.rows, group.columns
            part = matrices[piece.matrix][top * r : bottom * r, first * c : last * c]
            height, width = (bottom - top) * r, (last - first) * c
            if part.shape != (height, width):
                part = torch.nn.functional.pad(part, (0, width - part.shape[1], 0, height - part.shape[0]))
            _tiles(out, piece, group).copy_(part.view(bottom - top, r, last - first, c).transpose(1, 2))

    def decode_dense(self, group: Group, block: Block, coefficients: Tensor, out: Tensor) -> Tensor:
        """The chunks of coefficients [chunks, area], which are overwritten; both are working space."""
        shape = (block.count, group.rows, group.columns)
        if group.rows > 1:
            left = dct_basis(group.rows, self.device).T.expand(block.count, -1, -1)
            torch.bmm(left, coefficients.view(shape), out=out.view(shape))
            coefficients, out = out, coefficients
        torch.mm(
            coefficients.view(-1, group.columns), dct_basis(group.columns, self.device), out=out.view(-1, group.columns)
        )
        return out

    def decode_sparse(self, group: Group, index: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """The chunks of coefficients `values` [chunks, n] at positions `index`; entries at one position add up.

        A sum of n outer products of basis rows: fewer operations than two products of matrices up to about
        n = 3/4 (rows + columns).
        """
        row = torch.div(index, group.columns, rounding_mode="floor")
        right = self._basis_rows(0, group.columns, index - row * group.columns)
        left = self._basis_rows(1, group.rows, row).mul_(values.unsqueeze(2))
        torch.bmm(left.transpose(1, 2), right, out=out.view(-1, group.rows, group.columns))
        return out

    def _basis_rows(self, which: int, size: int, index: Tensor) -> Tensor:
        """Rows of a basis, [*index.shape, size]."""
        count = index.numel() * size
        if self._rows.shape[1] < count:
            self._rows = torch.empty(2, count, device=self.device)
        out = self._rows[which, :count].view(-1, size)
        torch.index_select(dct_basis(size, self.device), 0, index.reshape(-1), out=out)
        return out.view(*index.shape, size)

    def store(self, group: Group, block: Block, chunks: Tensor, matrices: Sequence[Tensor]) -> None:
        """Write chunks into the matrices, rounded to their dtypes; padding is dropped."""
        for piece in block.pieces:
            (top, bottom), (first, last) = piece.rows, piece.columns
            r, c = group.rows, group.columns
            part = matrices[piece.matrix][top * r : bottom * r, first * c : last * c]
            tiles = _tiles(chunks, piece, group)
            if part.shape == ((bottom - top) * r, (last - first) * c):
                part.view(bottom - top, r, last - first, c).transpose(1, 2).copy_(tiles)
            else:
                whole = tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)
                part.copy_(whole[: part.shape[0], : part.shape[1]])

    def outputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Matrices for `store`, which lie in the tensors themselves where strides allow it; `collect` does the rest."""
        found = []
        for i, size in zip(self._matrices, self._sizes, strict=False):
            tensor = tensors[i].detach()
            found.append(tensor.view(size) if tensor.is_contiguous() else tensor.new_empty(size))
        if self._vectors:
            found.append(torch.empty(self._sizes[-1], device=self.device))
        return found

    def collect(self, matrices: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Copy into the tensors what `outputs` could not lay in them."""
        for i, matrix in zip(self._matrices, matrices, strict=False):
            if not tensors[i].is_contiguous():
                tensors[i].detach().copy_(matrix.view(self.shapes[i]))
        if self._vectors:
            parts = torch.split(matrices[-1].view(-1), [self.shapes[i].numel() for i in self._vectors])
            shaped = [part.view(self.shapes[i]) for i, part in zip(self._vectors, parts, strict=True)]
            torch._foreach_copy_([tensors[i].detach() for i in self._vectors], shaped)


def _quarters(basis: Tensor) -> tuple[Tensor, Tensor]:
    """What a basis does to the sums and to the differences of mirrored elements."""
    half = len(basis) // 2
    return basis[:half, :half], basis[half:, :half]


def _fold(x: Tensor, dim: int, out: Tensor) -> None:
    """Sums and differences of the elements that mirror each other along a dimension, into out[0] and out[1]."""
    left, right = x.chunk(2, dim=dim)
    mirrored = right.flip(dim)
    torch.add(left, mirrored, out=out[0])
    torch.sub(left, mirrored, out=out[1])


def _tiles(chunks: Tensor, piece: Piece, group: Group) -> Tensor:
    """A piece's chunks as [chunk rows, chunk columns, rows, columns]."""
    grid = (piece.rows[1] - piece.rows[0], piece.columns[1] - piece.columns[0])
    return chunks[piece.start : piece.start + piece.count].view(*grid, group.rows, group.columns)


def _pieces(matrix: int, size: tuple[int, int], cut: tuple[int, int], limit: int) -> Iterator[Piece]:
    """Cut a matrix into rectangles of at most `limit` chunks, in the order of its chunks."""
    down, across = -(-size[0] // cut[0]), -(-size[1] // cut[1])
    if across >= limit:
        for row in range(down):
            for first in range(0, across, limit):
                yield Piece(matrix, (row, row + 1), (first, min(first + limit, across)), 0)
        return
    for row in range(0, down, limit // across):
        yield Piece(matrix, (row, min(row + limit // across, down)), (0, across), 0)
