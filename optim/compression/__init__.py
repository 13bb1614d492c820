"""Codecs: how tensors become a payload of fewer bytes, and back."""

from swarmkit.optim.compression.bits import pack_bits, packed_bytes, unpack_bits
from swarmkit.optim.compression.blockwise import Blockwise
from swarmkit.optim.compression.casting import Casting
from swarmkit.optim.compression.codec import Codec, GatherCodec, Layout, LinearCodec, decode, encode, round_trip
from swarmkit.optim.compression.compressed import CompressedAveraging
from swarmkit.optim.compression.lgreco import LGreCo
from swarmkit.optim.compression.minifloat import E3M0
from swarmkit.optim.compression.powersgd import PowerSGD
from swarmkit.optim.compression.qsgd import QSGD
from swarmkit.optim.compression.random_k import RandomK
from swarmkit.optim.compression.registry import CODECS, make_codec
from swarmkit.optim.compression.route import Route
from swarmkit.optim.compression.slices import CodecWire
from swarmkit.optim.compression.sparse import TopK
from swarmkit.optim.compression.ternary import TernGrad

__all__ = [
    "CODECS",
    "Blockwise",
    "Casting",
    "Codec",
    "CodecWire",
    "CompressedAveraging",
    "E3M0",
    "GatherCodec",
    "LGreCo",
    "Layout",
    "LinearCodec",
    "PowerSGD",
    "QSGD",
    "RandomK",
    "Route",
    "TernGrad",
    "TopK",
    "decode",
    "encode",
    "make_codec",
    "pack_bits",
    "packed_bytes",
    "round_trip",
    "unpack_bits",
]
