"""Integers of 1 to 16 bits packed into bytes without gaps, and back."""

import math
import sys

import torch
from torch import Tensor


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` values of `bits` bits take."""
    _check_width(bits)
    return -(-count * bits // 8)


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack integers of any shape, each in [0, 2**bits), into a 1-D uint8 tensor of `packed_bytes` bytes.

    One stream of bits, lowest bit first: value i lies in the bits i * bits and up; bits left over in the last byte are
    0. Values outside the range are not checked for and spill into their neighbours.
    """
    _check_width(bits)
    if values.is_floating_point() or values.is_complex():
        raise ValueError(f"values are {values.dtype}: only integers can be packed")
    if bits == 16:
        return values.reshape(-1).to(torch.int16, copy=True).view(torch.uint8)
    # A byte is wide enough to work in when a value is: what a shift pushes out of it belongs to the next byte.
    flat = values.reshape(-1).to(torch.uint8 if bits <= 8 else torch.int32)
    if bits == 8:
        return flat.clone() if flat.data_ptr() == values.data_ptr() else flat
    group, width = _group(bits)
    size = packed_bytes(flat.numel(), bits)
    short = -flat.numel() % group
    if short:
        flat = torch.cat([flat, flat.new_zeros(short)])
    if width == 1 and sys.byteorder == "little":
        # A view as wider numbers wants to start at an even byte.
        return _halved(flat.clone() if flat.storage_offset() % 2 else flat, bits)[:size]
    columns = flat.view(-1, group)
    packed = torch.empty(columns.shape[0], width, dtype=torch.uint8, device=flat.device)
    for byte in range(width):
        whole: Tensor | None = None
        for value in range(8 * byte // bits, min(-(-8 * (byte + 1) // bits), group)):
            shift = bits * value - 8 * byte
            part = columns[:, value] << shift if shift >= 0 else columns[:, value] >> -shift
            whole = part if whole is None else whole.bitwise_or_(part)
        assert whole is not None
        packed[:, byte] = whole if bits <= 8 else whole & 255
    return packed.view(-1)[:size]


def unpack_bits(packed: Tensor, bits: int, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """The first `count` values of a `pack_bits` stream, 1-D; raises ValueError when it is not of that many bytes."""
    size = packed_bytes(count, bits)
    if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.numel() != size:
        raise ValueError(f"{count} values of {bits} bits are {size} bytes, not {packed.dtype}{list(packed.shape)}")
    if bits == 8:
        return packed.to(dtype, copy=True)
    if bits == 16:
        # A view as wider numbers wants the bytes in a storage of their own.
        return packed.clone().view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF).to(dtype)
    group, width = _group(bits)
    short = -size % width
    if short:
        packed = torch.cat([packed, packed.new_zeros(short)])
    if width == 1 and sys.byteorder == "little":
        return _doubled(packed, bits)[:count].to(dtype)
    columns = packed.view(-1, width)
    if bits > 8:
        columns = columns.to(torch.int32)
    values = torch.empty(columns.shape[0], group, dtype=dtype, device=packed.device)
    for value in range(group):
        first, last = bits * value // 8, (bits * (value + 1) - 1) // 8
        whole: Tensor | None = None
        for byte in range(first, last + 1):
            shift = bits * value - 8 * byte
            part = columns[:, byte] >> shift if shift >= 0 else columns[:, byte] << -shift
            whole = part if whole is None else whole.bitwise_or_(part)
        assert whole is not None
        values[:, value] = whole.bitwise_and_(2**bits - 1)
    return values.view(-1)[:count]


def _halved(values: Tensor, bits: int) -> Tensor:
    """Bytes of 1, 2 or 4 bits each pushed together pair by pair, until they are full."""
    while bits < 8:
        pairs = values.view(torch.int16)
        values = (pairs >> (8 - bits)).bitwise_or_(pairs).to(torch.uint8)
        bits *= 2
    return values


def _doubled(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `_halved`."""
    wide = 4
    while wide >= bits:
        pairs = packed.to(torch.int16)
        mask = 2**wide - 1
        packed = (pairs << (8 - wide)).bitwise_or_(pairs).bitwise_and_(mask << 8 | mask).view(torch.uint8)
        wide //= 2
    return packed


def _group(bits: int) -> tuple[int, int]:
    """The fewest values that fill whole bytes, and how many bytes those are."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _check_width(bits: int) -> None:
    if type(bits) is not int or not 1 <= bits <= 16:
        raise ValueError(f"bits={bits!r}: must be a number from 1 to 16")
