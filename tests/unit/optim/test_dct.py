"""Chunked DCT-II and the exact top-k: the identities of the transform, for any shapes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmkit.optim import dct
from swarmkit.optim.dct import Chunks, chunk_size, dct_basis
from swarmkit.optim.top_k import by_levels, top_k

CPU = torch.device("cpu")
SHAPES = [(130, 70), (64,), (), (5, 3, 3, 3), (0, 4), (1, 9), (300,), (64, 128), (7, 1), (127, 2)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encode(chunks: Chunks, tensors: list[Tensor]) -> list[Tensor]:
    """Coefficients by group."""
    matrices = chunks.matrices(tensors)
    return [
        torch.cat([torch.cat(list(chunks.encode(group, block, matrices)), dim=1) for block in group.blocks])
        for group in chunks.groups
    ]


def decode(chunks: Chunks, coefficients: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    found = [torch.full_like(tensor, math.nan) for tensor in like]
    outputs = chunks.outputs(found)
    for group, held in zip(chunks.groups, coefficients, strict=True):
        for block in group.blocks:
            first, second = chunks.scratch(group, block, 0), chunks.scratch(group, block, 1)
            first.copy_(held[block.start : block.start + block.count])
            chunks.store(group, block, chunks.decode_dense(group, block, first, second), outputs)
    chunks.collect(outputs, found)
    return found


@pytest.mark.parametrize("n", [*range(1, 131), 251])
def test_the_basis_is_orthonormal(n: int) -> None:
    """(1)"""
    basis = dct_basis(n, CPU).double()
    torch.testing.assert_close(basis @ basis.T, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-6)


def test_coefficients_are_the_cosine_sums_of_the_definition() -> None:
    x, n = randn(12).double(), 12
    wanted = [
        math.sqrt((1 if k == 0 else 2) / n) * sum(float(x[i]) * math.cos(math.pi * (i + 0.5) * k / n) for i in range(n))
        for k in (*range(0, n, 2), *range(1, n, 2))
    ]
    torch.testing.assert_close(
        dct_basis(n, CPU).double() @ x, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("side", [64, 48, 16, 49])
def test_a_matrix_is_transformed_chunk_by_chunk_in_both_dimensions(side: int) -> None:
    x = randn(2 * side, 3 * side)
    (found,) = encode(Chunks([x.shape], side, CPU), [x])
    basis = dct_basis(side, CPU)
    corners = [(i * side, j * side) for i in range(2) for j in range(3)]
    wanted = [basis @ x[i : i + side, j : j + side] @ basis.T for i, j in corners]
    torch.testing.assert_close(found, torch.stack(wanted).flatten(1), rtol=0, atol=1e-5)


@given(st.integers(1, 5000), st.integers(1, 256))
def test_a_side_is_padded_by_fewer_elements_than_it_has_chunks(length: int, limit: int) -> None:
    size = chunk_size(length, limit)
    count = -(-length // size)
    assert 1 <= size <= limit
    assert count == -(-length // limit)
    assert 0 <= count * size - length < count


@pytest.mark.parametrize("length", [127, 50261, 65, 64, 10, 1])
def test_a_prime_length_is_padded_rather_than_cut_to_single_elements(length: int) -> None:
    assert chunk_size(length, 64) >= min(length, 32)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 40), max_size=4), max_size=6),
    st.integers(1, 20),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_decoding_gives_back_what_was_encoded_for_any_shapes(
    shapes: list[list[int]], chunk: int, dtype: torch.dtype
) -> None:
    tensors = [randn(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    chunks = Chunks([tensor.shape for tensor in tensors], chunk, CPU)
    for found, tensor in zip(decode(chunks, encode(chunks, tensors), tensors), tensors, strict=True):
        torch.testing.assert_close(found, tensor, rtol=0, atol=2e-5 if dtype.itemsize > 2 else 0.02)


def test_tensors_that_are_not_contiguous_are_cut_by_their_shape() -> None:
    tensors = [randn(70, 130).T, randn(4, 3, 5, 5).to(memory_format=torch.channels_last), randn(40)[::2]]
    chunks = Chunks([tensor.shape for tensor in tensors], 16, CPU)
    plain = [tensor.contiguous() for tensor in tensors]
    for left, right in zip(encode(chunks, tensors), encode(chunks, plain), strict=True):
        assert torch.equal(left, right)
    for found, tensor in zip(decode(chunks, encode(chunks, tensors), tensors), tensors, strict=True):
        torch.testing.assert_close(found, tensor, rtol=0, atol=1e-5)


def test_the_transform_keeps_the_norm() -> None:
    tensors = [randn(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    found = encode(Chunks([tensor.shape for tensor in tensors], 64, CPU), tensors)
    energy = sum(float(t.double().square().sum()) for t in tensors)
    assert sum(float(t.double().square().sum()) for t in found) == pytest.approx(energy, rel=1e-6)


def test_rows_that_are_split_at_chunk_borders_have_the_same_coefficients() -> None:
    """(6)"""
    x = randn(192, 128)
    (whole,) = encode(Chunks([x.shape], 64, CPU), [x])
    (top,) = encode(Chunks([(64, 128)], 64, CPU), [x[:64]])
    (rest,) = encode(Chunks([(128, 128)], 64, CPU), [x[64:]])
    assert torch.equal(whole, torch.cat((top, rest)))


def test_the_size_of_blocks_changes_no_coefficient_beyond_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [randn(*shape, seed=i) for i, shape in enumerate([*SHAPES, (30, 500)])]
    shapes = [tensor.shape for tensor in tensors]
    whole = encode(Chunks(shapes, 16, CPU), tensors)
    monkeypatch.setattr(dct, "_CPU_BLOCK", 600)
    small = Chunks(shapes, 16, CPU)
    assert max(len(group.blocks) for group in small.groups) > 10
    for left, right in zip(encode(small, tensors), whole, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5)
    for found, tensor in zip(decode(small, encode(small, tensors), tensors), tensors, strict=True):
        torch.testing.assert_close(found, tensor, rtol=0, atol=1e-5)


def test_all_tensors_of_one_chunk_shape_are_one_group() -> None:
    chunks = Chunks([(128, 64), (64, 320), (64, 64, 1), (500,), (12,), (), (1, 30)], 64, CPU)
    assert [(g.rows, g.columns, g.count) for g in chunks.groups] == [(1, 64, 9), (64, 64, 8)]


@pytest.mark.parametrize("k", [1, 32, 96])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (1, 64), (33, 5)])
def test_a_sum_of_outer_products_is_the_dense_decoding(rows: int, columns: int, k: int) -> None:
    """(11)"""
    chunks = Chunks([(3 * rows, columns)] if rows > 1 else [(3 * columns,)], max(rows, columns), CPU)
    (group,) = chunks.groups
    (block,) = group.blocks
    index = torch.stack([torch.randperm(group.area)[: min(k, group.area)] for _ in range(group.count)])
    values = randn(*index.shape)
    dense = torch.zeros(group.count, group.area).scatter_(1, index, values)
    wanted = chunks.decode_dense(group, block, dense, torch.empty_like(dense)).clone()
    found = chunks.decode_sparse(group, index, values, torch.empty_like(wanted))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [0, -1, 257])
def test_a_chunk_that_positions_could_not_name_is_refused(chunk: int) -> None:
    with pytest.raises(ValueError, match=f"chunk={chunk}"):
        Chunks([(4, 4)], chunk, CPU)


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 5), st.sampled_from([1, 3, 16, 64, 100, 256, 1024]), st.data(), st.sampled_from([2, 10, 10**6]))
def test_top_k_by_thresholds_or_levels_takes_the_largest(
    rows: int, columns: int, data: st.DataObject, kinds: int
) -> None:
    """(10), few kinds of values make ties."""
    k = data.draw(st.integers(1, columns))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x = torch.randint(0, kinds, (rows, columns), generator=generator).float()
    wanted = x.topk(k, dim=1).values
    for found in (top_k(x, k), by_levels(x, k)):
        assert all(len(set(row)) == k for row in found.tolist())
        assert torch.equal(x.gather(1, found).sort(1, descending=True).values, wanted)
    assert bool((top_k(x, k).diff(dim=1) > 0).all())
