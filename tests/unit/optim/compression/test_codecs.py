"""What all codecs have in common: forms, extreme inputs, honest sizes, refusal of what is no payload."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmkit.optim.compression import CODECS, Codec, GatherCodec, LinearCodec, decode, encode, make_codec, round_trip
from swarmkit.optim.compression.codec import Layout

GATHERED = [name for name in CODECS if isinstance(make_codec(name), GatherCodec)]
# How far what comes out may be from what went in, as a share of its norm, for normally distributed numbers.
ERROR = {
    "fp16": 5e-4, "bf16": 4e-3, "int8": 0.01, "int4": 0.2, "fp4": 0.25, "qsgd": 0.3, "ternary": 2.0, "topk": 1.0,
    "randomk": 15.0, "powersgd": 1.0,
}  # fmt: skip


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm() / left.double().norm())


def parts_for(codec: Codec, tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if codec.name != "powersgd" or tensor.dim() > 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", CODECS)
def test_tensors_come_back_in_their_shapes_and_dtypes_and_near(name: str, dtype: torch.dtype) -> None:
    codec = make_codec(name)
    given = [normal(40, 50, seed=1, dtype=dtype), normal(16, 8, 3, 3, seed=2, dtype=dtype), normal(2000, dtype=dtype)]
    given = parts_for(codec, given)
    found = round_trip(codec, given, rng())
    for old, new in zip(given, found, strict=True):
        assert new.dtype == dtype
        assert new.shape == old.shape
        assert distance(old, new) <= ERROR[name] + (0.005 if dtype in (torch.float16, torch.bfloat16) else 0)


@pytest.mark.parametrize("name", CODECS)
def test_empty_scalar_and_odd_tensors_pass(name: str) -> None:
    codec = make_codec(name)
    shapes: list[tuple[int, ...]] = [(), (0,), (1,), (3, 0, 2), (7,), (1, 1), (513,), (2, 129)]
    given = parts_for(codec, [torch.full(shape, 0.5) for shape in shapes])
    found = round_trip(codec, given, rng())
    assert [t.shape for t in found] == [t.shape for t in given]
    assert all(bool(torch.isfinite(t).all()) for t in found)
    assert round_trip(codec, [], rng()) == []


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-40, 1e-30, 1e30, 3e38])
def test_extreme_magnitudes_never_come_out_as_nan_or_infinity(name: str, scale: float) -> None:
    codec = make_codec(name)
    if name == "powersgd" and scale > 1e36:
        pytest.skip("sums of a row overflow float32, which the collective refuses")
    tensor = normal(30, 40).clamp_(-1, 1) * scale
    (found,) = round_trip(codec, [tensor], rng())
    assert bool(torch.isfinite(found).all())
    if scale == 0:
        assert not found.any()
    if 1e-30 <= scale <= 1e30 and name not in ("fp16", "bf16", "randomk"):
        (reference,) = round_trip(codec, [normal(30, 40).clamp_(-1, 1)], rng())
        assert distance(reference, found / scale) < 1e-3 or name in ("topk", "powersgd", "ternary", "qsgd")


NARROW = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("shape", [(30, 40), (1, 1), (1,)])
@pytest.mark.parametrize("kind", ["huge", "denormal", "both", "zero"])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", CODECS)
def test_the_ends_of_each_dtype_come_out_finite_and_no_larger(
    name: str, dtype: torch.dtype, kind: str, shape: tuple[int, ...]
) -> None:
    """Signs are mixed, but for single elements; denormals are the smallest numbers there are."""
    codec, limits = make_codec(name), torch.finfo(dtype)
    huge, denormal = limits.max, limits.smallest_normal * limits.eps
    if name == "powersgd":
        huge = min(huge, 1e36)  # sums of a row overflow float32, which the collective refuses
    signs = normal(*shape).sign().to(dtype)
    tensor = signs * {"huge": huge, "denormal": denormal, "both": denormal, "zero": 0.0}[kind]
    if kind == "both":
        tensor.view(-1)[0] = huge
    given = parts_for(codec, [tensor])
    for found in round_trip(codec, given, rng()):
        assert found.dtype == dtype
        assert bool(torch.isfinite(found).all())
        largest = float(tensor.abs().double().max())
        # Random-k scales up by the inverse of its density, as far as the dtype goes; low ranks err both ways.
        most = {"randomk": limits.max, "powersgd": 3 * largest}.get(name, 1.01 * largest)
        assert float(found.abs().double().max()) <= most
        if tensor.numel() == 1 and kind in ("huge", "zero") and not (name == "fp16" and dtype != torch.float16):
            # Four bits leave room at float32's own end for the lowest code, of one more step.
            assert torch.allclose(found.double(), tensor.double(), rtol=0.13 if name in ("int4", "qsgd") else 0.01)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", CODECS)
def test_an_outlier_comes_through_and_harms_no_other_tensor(name: str, dtype: torch.dtype) -> None:
    codec = make_codec(name)
    usual, other = normal(64, 64, dtype=dtype), normal(64, 64, seed=1, dtype=dtype)
    odd = usual.clone()
    odd[0, 5] = 6e4
    _, quiet = round_trip(codec, [usual, other], rng())
    found, beside = round_trip(codec, [odd, other], rng())
    assert torch.equal(quiet, beside)
    # A scaled up random-k has it a hundredfold, as far as the dtype goes, or not at all; TernGrad clips it.
    assert distance(odd, found) <= {"randomk": 100.0, "ternary": 1.5, "topk": 0.01, "powersgd": 0.01}.get(name, 0.02)


@pytest.mark.parametrize("name", ["int8", "int4", "qsgd", "fp4"])
def test_an_outlier_only_harms_what_shares_its_scale(name: str) -> None:
    parameters: dict[str, Any] = {"block": 256} if name == "fp4" else {}
    codec = make_codec(name, **parameters)
    tensor = normal(4096)
    tensor[5] = 1e6
    (found,) = round_trip(codec, [tensor], rng())
    assert abs(float(found[5]) / 1e6 - 1) < 1e-3
    assert distance(tensor[512:], found[512:]) <= ERROR[name]


@pytest.mark.parametrize("name", CODECS)
def test_the_same_draws_give_the_same_bits(name: str) -> None:
    codec = make_codec(name)
    given = [normal(64, 64), normal(33, 65, seed=1)]
    first, second = (round_trip(codec, given, rng(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", CODECS)
def test_what_lies_beside_a_tensor_does_not_change_it(name: str) -> None:
    codec = make_codec(name)
    if name in ("qsgd", "ternary", "randomk", "powersgd"):
        pytest.skip("draws depend on the position")
    tensor = normal(50, 51)
    (alone,) = round_trip(codec, [tensor], rng())
    beside = round_trip(codec, [normal(70, 3, seed=4) * 1e4, tensor, normal(9, 9, seed=5) * 1e-4], rng())
    assert torch.equal(alone, beside[1])


@pytest.mark.parametrize("name", CODECS)
def test_strided_tensors_are_sent_as_their_values(name: str) -> None:
    codec = make_codec(name)
    tensor = normal(48, 96)
    (plain,) = round_trip(codec, [tensor[:, ::2].contiguous()], rng())
    (strided,) = round_trip(codec, [tensor[:, ::2]], rng())
    assert torch.equal(plain, strided)


@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.parametrize("shape", [(1024,), (1025,), (300, 41), (64, 8, 3, 3), (5, 5)])
def test_a_payload_is_no_larger_than_it_says(name: str, shape: tuple[int, ...]) -> None:
    codec = make_codec(name)
    assert isinstance(codec, GatherCodec)
    for parameter in codec.candidates or (None,):
        parameters = None if parameter is None else [parameter]
        payload = encode(codec, [normal(*shape)], rng(), parameters)
        size = sum(part.numel() * part.element_size() for part in payload)
        # One byte says which parameter it is.
        assert codec.payload_bytes(shape, parameter) - 8 <= size <= codec.payload_bytes(shape, parameter) + 1


@pytest.mark.parametrize("name", CODECS)
def test_a_linear_codec_offers_the_bytes_it_says(name: str) -> None:
    codec = make_codec(name)
    if not isinstance(codec, LinearCodec):
        return
    layout = Layout.of([normal(40, 50)], codec.align)
    exchange = codec.exchange(layout.flatten([normal(40, 50)]), layout, rng())
    offered, size = next(exchange), 0
    try:
        while True:
            size += sum(part.numel() * part.element_size() for part in offered)
            offered = exchange.send(offered)
    except StopIteration:
        assert size == codec.payload_bytes((40, 50))


@pytest.mark.parametrize("name", ["qsgd", "topk", "randomk", "powersgd"])
def test_measured_errors_are_those_of_what_comes_out(name: str) -> None:
    codec = make_codec(name)
    tensor = normal(60, 70) * torch.logspace(0, -3, 70)
    candidates = codec.candidates[:5]
    found = codec.errors(tensor, candidates)
    assert found.dtype == torch.float64
    assert bool((found[:-1] >= found[1:]).all())
    for candidate, error in zip(candidates, found.tolist(), strict=True):
        squares = []
        for seed in range(40 if name in ("qsgd", "randomk") else 1):
            (out,) = round_trip(codec, [tensor], rng(seed), [candidate])
            squares.append(float((out - tensor).double().square().sum()))
        # A power iteration from a random start is a little worse than the singular vectors.
        slack = {"powersgd": 0.35, "randomk": 0.35, "qsgd": 0.1, "topk": 0.001}[name]
        assert math.sqrt(sum(squares) / len(squares)) == pytest.approx(error, rel=slack)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e15])
@pytest.mark.parametrize("shape", [(96, 200), (200, 96), (130, 12, 12)])
@pytest.mark.parametrize("rank", [0, 3, 20])
def test_errors_of_low_ranks_are_measured_without_all_singular_values(
    rank: int, shape: tuple[int, ...], scale: float
) -> None:
    rows, columns = shape[0], math.prod(shape[1:])
    tensor = 0.1 * normal(rows, columns) + normal(rows, rank, seed=1) @ normal(rank, columns, seed=2)
    codec = make_codec("powersgd")
    found = codec.errors((scale * tensor).view(shape), codec.candidates)
    values = torch.linalg.svdvals(tensor.double())
    best = torch.stack([values[int(candidate) :].norm() for candidate in codec.candidates])
    ratios = found / scale / best
    assert 0.999 <= float(ratios.min()) <= float(ratios.max()) <= 1.04


def test_errors_of_a_matrix_whose_rank_is_reached_are_next_to_nothing() -> None:
    tensor = normal(200, 3, seed=1) @ normal(3, 200, seed=2)
    left = make_codec("powersgd").errors(tensor, [2, 3, 8]) / tensor.norm()
    assert left[0] > 0.1
    assert float(left[1:].max()) < 2e-3


def test_errors_of_a_codec_without_a_parameter_are_none() -> None:
    for name in ("fp16", "bf16", "int8", "int4", "fp4", "ternary"):
        codec = make_codec(name)
        assert codec.parameter is None
        assert codec.errors(normal(5), ()).numel() == 0
        with pytest.raises(ValueError, match="has no parameter"):
            codec.errors(normal(5), (1.0,))


@pytest.mark.parametrize("name", ["qsgd", "topk"])
def test_each_tensor_may_have_a_parameter_of_its_own(name: str) -> None:
    codec = make_codec(name)
    assert isinstance(codec, GatherCodec)
    given = [normal(40, 50, seed=i) for i in range(3)]
    choice = [codec.candidates[0], codec.candidates[-1], codec.candidates[3]]
    mixed = decode(codec, encode(codec, given, rng(), choice), given)
    errors = [float((a - b).norm()) for a, b in zip(given, mixed, strict=True)]
    wanted = [float(codec.errors(t, [c])) for t, c in zip(given, choice, strict=True)]
    assert errors == pytest.approx(wanted, rel=0.1)
    with pytest.raises(ValueError, match="2 parameters for 3 tensors"):
        encode(codec, given, rng(), choice[:2])


def broken(payload: list[Tensor], draw: Any) -> list[Tensor]:
    """A payload as a stranger might send it."""
    found = list(payload)
    kind = draw(st.sampled_from(["drop", "add", "dtype", "shape", "size", "bytes", "nan"]))
    position = draw(st.integers(0, len(found) - 1))
    part = found[position].clone()
    if kind == "drop":
        del found[position]
        return found
    if kind == "add":
        return [*found, part]
    if kind == "dtype":
        part = part.to(draw(st.sampled_from([torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.uint8])))
    elif kind == "shape":
        part = part[None]
    elif kind == "size":
        part = torch.cat([part, part[:1]]) if draw(st.booleans()) else part[:-1]
    elif kind == "bytes" and part.numel():
        raw = part.view(torch.uint8)
        for _ in range(draw(st.integers(1, 8))):
            raw[draw(st.integers(0, raw.numel() - 1))] = draw(st.integers(0, 255))
    elif kind == "nan" and part.is_floating_point():
        value = draw(st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e38]))
        part = torch.full(part.shape, value, dtype=torch.float64).to(part.dtype)
    found[position] = part
    return found


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(GATHERED), st.data())
def test_whatever_a_stranger_sends_is_refused_in_words_or_decodes_to_finite_numbers(name: str, data: Any) -> None:
    codec = make_codec(name)
    assert isinstance(codec, GatherCodec)
    given = [normal(40, 30), normal(700, seed=1)]
    payload = broken(encode(codec, given, rng()), data.draw)
    try:
        found = decode(codec, payload, given)
    except ValueError:
        return
    assert [t.shape for t in found] == [t.shape for t in given]
    assert all(bool(torch.isfinite(t).all()) for t in found)


@pytest.mark.parametrize("name", GATHERED)
def test_a_payload_of_other_tensors_is_refused(name: str) -> None:
    codec = make_codec(name)
    assert isinstance(codec, GatherCodec)
    payload = encode(codec, [normal(40, 30)], rng())
    with pytest.raises(ValueError, match="payload|values of"):
        decode(codec, payload, [torch.empty(4000, 30)])


def test_an_unknown_codec_or_parameter_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="'intt8' is unknown: did you mean 'int8'"):
        make_codec("intt8")
    with pytest.raises(ValueError, match="'topk' has no parameter 'rank'; There are density"):
        make_codec("topk", rank=4)
    with pytest.raises(ValueError, match="'topk' has no parameter 'densty': did you mean 'density'"):
        make_codec("topk", densty=0.1)
    with pytest.raises(ValueError, match="'int8' has no parameter 'bits'"):
        make_codec("int8", bits=4)
    assert make_codec("topk", density=0.5).parameter == 0.5


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("topk", {"density": 0.0}, "density=0.0"),
        ("topk", {"values": "int8"}, "values='int8'"),
        ("randomk", {"density": 1.5}, "density=1.5"),
        ("powersgd", {"rank": 0}, "rank=0"),
        ("powersgd", {"rank": 1.5}, "rank=1.5"),
        ("qsgd", {"bits": 1}, "bits=1"),
        ("qsgd", {"norm": "l1"}, "norm='l1'"),
        ("qsgd", {"bucket": 100}, "block=100"),
        ("int8", {"block": 0}, "block=0"),
        ("fp4", {"block": 9}, "block=9"),
        ("ternary", {"clip": 0.0}, "clip=0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_codec(name, **parameters)
