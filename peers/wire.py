"""Control messages: bounded msgpack maps that are checked field by field before anyone uses them."""

import math
from collections.abc import Callable
from typing import TypeVar

import msgpack

from swarmkit.peers.errors import ProtocolError

MAX_MESSAGE_BYTES = 1 << 20
MAX_WEIGHT = 1e18
T = TypeVar("T")
Message = dict[str, object]


def encode(message: Message) -> bytes:
    """Serialise a control message."""
    data: bytes = msgpack.packb(message, use_bin_type=True)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"control message of {len(data)} bytes: the limit is {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """Read a control message that a stranger may have made; raises ProtocolError."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"control message of {len(data)} bytes: the limit is {MAX_MESSAGE_BYTES}")
    try:
        message = msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"not a msgpack map: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"control message is a {type(message).__name__}, not a map")
    return message


def field(message: Message, name: str, kind: type[T], check: Callable[[T], bool] | None = None) -> T:
    """Take one field of exactly this type (an int passes for a float); raises ProtocolError naming it."""
    value = message.get(name)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ProtocolError(f"field {name!r} is {type(value).__name__}, expected {kind.__name__}")
    if check is not None and not check(value):
        raise ProtocolError(f"field {name!r} is out of range: {str(value)[:80]}")
    return value


def finite(value: float) -> bool:
    """True for a usable non-negative number: seconds, counts."""
    return math.isfinite(value) and value >= 0


def is_weight(value: float) -> bool:
    """True for a weight with which sums over any number of members stay finite."""
    return 0 <= value <= MAX_WEIGHT
