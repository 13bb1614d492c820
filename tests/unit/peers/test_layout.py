"""Tensors go through flat buffers, slices and chunks and come back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.layout import DTYPES, Layout, Schema, from_bytes, to_bytes

SHAPES = st.lists(st.integers(0, 5), max_size=3)
ENTRIES = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=6)


def make(entries: list[tuple[str, list[int]]]) -> list[torch.Tensor]:
    counter = torch.arange(200)
    return [counter[: math.prod(shape)].reshape(shape).to(DTYPES[dtype]) for dtype, shape in entries]


@given(ENTRIES)
def test_tensors_survive_flattening(entries: list[tuple[str, list[int]]]) -> None:
    tensors = make(entries)
    layout = Layout(Schema.of(tensors))
    back = layout.unflatten(layout.flatten(tensors))
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape for a, b in zip(tensors, back, strict=True)
    )


@given(ENTRIES, st.integers(1, 7), st.integers(1, 64))
def test_chunks_of_all_owners_tile_every_buffer_once(
    entries: list[tuple[str, list[int]]], owners: int, chunk_bytes: int
) -> None:
    layout = Layout(Schema.of(make(entries)))
    seen = {dtype: torch.zeros(size) for dtype, size in layout.sizes.items()}
    for owner in range(owners):
        for dtype, start, stop in layout.chunks(owner, owners, chunk_bytes):
            assert 0 < stop - start <= max(1, chunk_bytes // dtype.itemsize)
            seen[dtype][start:stop] += 1
    assert all(bool((count == 1).all()) for count in seen.values())


@given(ENTRIES)
def test_bytes_survive_the_wire(entries: list[tuple[str, list[int]]]) -> None:
    for tensor in make(entries):
        flat = tensor.reshape(-1)
        back = torch.empty_like(flat)
        from_bytes(to_bytes(flat), back)
        assert torch.equal(flat, back)


def test_a_chunk_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ProtocolError, match="expected 8"):
        from_bytes(b"1234567", torch.empty(2))


@given(ENTRIES)
def test_schemas_survive_the_wire(entries: list[tuple[str, list[int]]]) -> None:
    schema = Schema.of(make(entries))
    assert Schema.from_message({"schema": schema.to_message()}, max_bytes=1 << 20) == schema


@pytest.mark.parametrize(
    "entry",
    [
        ["float32", [-1]],
        ["object", [1]],
        ["float32", 3],
        ["float32", [1.5]],
        ["float32", [1] * 17],
        "float32",
        [[[]], [1]],
    ],
)
def test_a_schema_that_is_no_tensor_is_refused(entry: object) -> None:
    with pytest.raises(ProtocolError):
        Schema.from_message({"schema": [entry]}, max_bytes=1 << 20)


def test_a_huge_declared_payload_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        Schema.from_message({"schema": [["float32", [1 << 40, 1 << 20]]]}, max_bytes=1 << 30)
