"""Codecs: how tensors become a payload of fewer bytes, and back."""

from swarmkit.optim.compression.bits import pack_bits, packed_bytes, unpack_bits

__all__ = ["pack_bits", "packed_bytes", "unpack_bits"]
