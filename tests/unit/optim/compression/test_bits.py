"""Bit packing: what comes back, how large it is, what it refuses."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmkit.optim.compression.bits import pack_bits, packed_bytes, unpack_bits


@given(st.integers(1, 16), st.integers(0, 70), st.integers(0, 2**31))
def test_what_is_packed_comes_back_in_the_fewest_bytes(bits: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(2**bits, (count,), generator=generator)
    packed = pack_bits(values, bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed_bytes(count, bits) == -(-count * bits // 8)
    found = unpack_bits(packed, bits, count)
    assert found.dtype == torch.int32
    assert found.tolist() == values.tolist()


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("bits", range(1, 17))
def test_the_stream_is_lowest_bit_first_without_gaps(bits: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bits < 16:
        monkeypatch.setattr(sys, "byteorder", order)
    values = [(2**bits - 1) * (i % 2) ^ (i % 2**bits) for i in range(21)]
    stream = sum(value << (bits * i) for i, value in enumerate(values))
    packed = pack_bits(torch.tensor(values), bits)
    assert bytes(packed.tolist()) == stream.to_bytes(packed_bytes(21, bits), "little")
    assert unpack_bits(packed, bits, 21).tolist() == values


def test_two_values_of_twelve_bits_are_three_bytes() -> None:
    """(13)"""
    assert pack_bits(torch.tensor([0xABC, 0x123]), 12).tolist() == [0xBC, 0x3A, 0x12]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integer_dtype_and_shape_packs_alike(dtype: torch.dtype) -> None:
    values = torch.arange(12).reshape(3, 4).t()
    assert torch.equal(pack_bits(values.to(dtype), 4), pack_bits(values.reshape(-1), 4))


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_a_view_into_the_middle_of_another_tensor_packs_and_unpacks(bits: int) -> None:
    values = torch.arange(17, dtype=torch.uint8) % 2
    packed = pack_bits(values[1:], bits)
    assert torch.equal(packed, pack_bits(values[1:].clone(), bits))
    payload = torch.cat([packed.new_zeros(3), packed])
    assert unpack_bits(payload[3:], bits, 16).tolist() == values[1:].tolist()


def test_packing_never_returns_the_input_itself() -> None:
    values = torch.arange(8, dtype=torch.uint8)
    packed = pack_bits(values, 8)
    packed.zero_()
    assert values.tolist() == list(range(8))


@pytest.mark.parametrize("bits", [0, 17, -1, 2.0, True])
def test_a_width_that_is_none_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits={bits}"):
        pack_bits(torch.zeros(3, dtype=torch.int64), bits)


def test_a_stream_of_the_wrong_length_or_dtype_is_refused() -> None:
    packed = pack_bits(torch.arange(5), 3)
    for broken in (packed[:-1], torch.cat([packed, packed]), packed.to(torch.int32), packed[None]):
        with pytest.raises(ValueError, match="5 values of 3 bits are 2 bytes"):
            unpack_bits(broken, 3, 5)
    with pytest.raises(ValueError, match="only integers"):
        pack_bits(torch.zeros(3), 3)
