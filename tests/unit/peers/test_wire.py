"""What a stranger sends is checked before it is used."""

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.wire import MAX_MESSAGE_BYTES, decode, encode, field, finite

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_messages_survive_the_wire(message: dict[str, object]) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=400))
def test_any_bytes_give_a_map_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode(data), dict)


def test_deep_nesting_is_refused_not_followed() -> None:
    with pytest.raises(ProtocolError):
        decode(b"\x91" * 5000 + b"\xc0")


def test_extension_types_are_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb({"x": msgpack.ExtType(5, b"payload")}))


def test_oversize_messages_are_refused_on_both_sides() -> None:
    big = {"x": b"0" * MAX_MESSAGE_BYTES}
    with pytest.raises(ProtocolError, match="limit"):
        encode(big)
    with pytest.raises(ProtocolError, match="limit"):
        decode(msgpack.packb(big))


@pytest.mark.parametrize(
    ("value", "kind"), [(True, int), (1, bool), ("1", int), (1.5, int), (None, str), ([], dict), (b"x", str)]
)
def test_a_field_of_another_type_is_named(value: object, kind: type) -> None:
    with pytest.raises(ProtocolError, match="'weight'"):
        field({"weight": value}, "weight", kind)


def test_an_integer_passes_for_a_float() -> None:
    assert field({"weight": 3}, "weight", float) == 3.0


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_weights_that_would_own_the_mean_are_refused(weight: float) -> None:
    with pytest.raises(ProtocolError, match="out of range"):
        field({"weight": weight}, "weight", float, finite)
