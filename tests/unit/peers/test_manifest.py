"""Manifests of states, pieces, and what a download keeps of them."""

import json
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmkit.peers.download import Download
from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.manifest import DTYPES, PIECE_BYTES, Frozen, Manifest
from swarmkit.peers.rate import RateMeter, TokenBucket

from .harness_transfers import a_state, with_own

EVERY_DTYPE = {f"anchor/{name}": torch.arange(7).to(dtype) for name, dtype in DTYPES.items()}
ODD = {**EVERY_DTYPE, "anchor/empty": torch.zeros(0, 3), "anchor/number": torch.tensor(1.5)}


def fill(download: Download, frozen: Frozen) -> Download:
    download.adopt(frozen.manifest)
    for number in download.missing():
        download.put(number, frozen.piece(number), frozen.manifest)
    return download


def encoded(header: object, hashes: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + hashes


def test_header_and_payload_are_a_safetensors_file() -> None:
    frozen = Frozen((ODD, {"round": 1}))
    payload = b"".join(frozen.piece(number) for number in range(len(frozen.manifest.pieces)))
    found = safetensors.torch.load(frozen.manifest.header() + payload)
    assert found.keys() == ODD.keys()
    assert all(torch.equal(found[name], ODD[name]) and found[name].dtype == ODD[name].dtype for name in ODD)


def test_every_dtype_and_shape_arrives_in_order() -> None:
    tensors, meta = fill(Download(), Frozen((ODD, {"round": 1, "text": "x"}))).snapshot()
    assert list(tensors) == list(ODD), "digests depend on it"
    for name, tensor in ODD.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert torch.equal(tensors[name], tensor)
    assert meta == {"round": 1, "text": "x"}


@given(st.lists(st.integers(0, 3 * PIECE_BYTES // 2), max_size=6), st.integers(0, 6))
def test_pieces_tile_the_payload_and_never_cross_from_one_donors_own_to_anothers(sizes: list[int], split: int) -> None:
    tensors = {
        (f"anchor/{i}" if i < split else f"inner/{i}/exp_avg"): torch.zeros(size, dtype=torch.uint8)
        for i, size in enumerate(sizes)
    }
    manifest = Frozen((tensors, {})).manifest
    assert [start for start, _ in manifest.pieces] == [0, *(stop for _, stop in manifest.pieces)][
        : len(manifest.pieces)
    ]
    assert sum(stop - start for start, stop in manifest.pieces) == manifest.size == sum(sizes)
    assert all(0 < stop - start <= PIECE_BYTES for start, stop in manifest.pieces)
    for section in manifest.sections:
        inside = [entry for entry in manifest.entries if section.start <= entry.start and entry.stop <= section.stop]
        assert len({bool(entry.group) for entry in inside if entry.stop > entry.start}) <= 1
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_the_moments_of_a_parameter_lie_in_one_section() -> None:
    tensors = {f"inner/{name}/{key}": torch.zeros(40_000) for key in ("m", "v") for name in ("a", "b.c", "d")}
    manifest = Frozen((tensors, {})).manifest
    names = [entry.name for entry in manifest.entries]
    assert names == [f"inner/{name}/{key}" for name in ("a", "b.c", "d") for key in ("m", "v")]
    assert [section.stop - section.start for section in manifest.sections] == [320_000] * 3


def test_the_digest_sees_every_bit_and_the_shared_one_only_what_is_shared() -> None:
    base = with_own(a_state(pieces=2), seed=1)
    first = Frozen(base).manifest
    assert Frozen(base).manifest.digest == first.digest
    flipped = {name: tensor.clone() for name, tensor in base[0].items()}
    flipped["inner/p3/exp_avg_sq"][-1] += 1
    other = Frozen((flipped, base[1])).manifest
    assert (other.shared_digest, other.place) == (first.shared_digest, first.place)
    assert other.digest != first.digest
    flipped["anchor/w"].view(torch.int32)[17] ^= 1
    assert Frozen((flipped, base[1])).manifest.shared_digest != first.shared_digest
    assert Frozen((base[0], {**base[1], "round": 4})).manifest.place != first.place


GOOD: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
META = {"__metadata__": {"meta": "{}"}}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "header"),
        (b"\xff" * 40, "header"),
        (encoded([]), "safetensors header"),
        (encoded({"a": GOOD}), "safetensors header"),
        (encoded({"__metadata__": {"meta": "[1]"}}), "description"),
        (encoded({"__metadata__": {"meta": "[" * 10**5}}), "safetensors header"),
        (encoded({**META, "a": {**GOOD, "dtype": "pickle"}}), "not a tensor"),
        (encoded({**META, "a": {**GOOD, "dtype": ["F32"]}}), "not a tensor"),
        (encoded({**META, "a": {**GOOD, "shape": [-2]}}), "shape"),
        (encoded({**META, "a": {**GOOD, "shape": [True, 2]}}), "shape"),
        (encoded({**META, "a": {**GOOD, "shape": [1] * 40}}), "not a tensor"),
        (encoded({**META, "a": {**GOOD, "data_offsets": [0, 1 << 60]}}), "does not lie"),
        (encoded({**META, "a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}), "does not lie"),
        (encoded({**META, "a": 3}), "not a tensor"),
        (encoded({**META, "a": GOOD}), "0 bytes of hashes for 1 pieces"),
        (
            encoded({**META, "inner/a/m": GOOD, "b": {**GOOD, "data_offsets": [8, 16]}}, b"0" * 64),
            "after a donor's own",
        ),
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        Manifest.from_bytes(data)


def test_a_dtype_that_does_not_travel_is_named() -> None:
    with pytest.raises(ProtocolError, match="'anchor/z' has dtype torch.complex64"):
        Frozen(({"anchor/z": torch.zeros(2, dtype=torch.complex64)}, {}))


def test_a_damaged_piece_is_refused_and_an_old_one_ignored() -> None:
    one, two = Frozen(a_state(1, pieces=3)), Frozen(a_state(2, pieces=3))
    download = Download()
    download.adopt(one.manifest)
    with pytest.raises(ProtocolError, match="piece 0 is damaged"):
        download.put(0, two.piece(0), one.manifest)
    with pytest.raises(ProtocolError, match="piece 0 is damaged"):
        download.put(0, one.piece(0)[:-1], one.manifest)
    download.put(0, one.piece(0), one.manifest)
    assert download.adopt(two.manifest).lost == PIECE_BYTES
    download.put(1, one.piece(1), one.manifest)  # was on its way when the other was adopted
    assert download.done == 0
    assert torch.equal(fill(download, two).snapshot()[0]["anchor/w"], a_state(2, pieces=3)[0]["anchor/w"])


def test_frozen_parameters_are_not_fetched_again_for_a_newer_round() -> None:
    """What has not changed between two states has the same hashes in the same places."""
    base = a_state(pieces=4)[0]["anchor/w"]
    moved = base.clone()
    moved[-1] += 1
    download = fill(Download(), Frozen(({"anchor/w": base}, {"round": 1})))
    adopted = download.adopt(Frozen(({"anchor/w": moved}, {"round": 2})).manifest)
    assert (adopted.kept, adopted.lost) == (3 * PIECE_BYTES, PIECE_BYTES)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def drive(bucket: TokenBucket, counts: list[int]) -> None:
    for count in counts:
        try:
            bucket.take(count).send(None)
        except StopIteration:
            continue
        raise AssertionError("it slept on another clock")


def test_a_token_bucket_keeps_to_its_rate() -> None:
    clock, rate = Clock(), [1000.0]
    bucket = TokenBucket(lambda: rate[0], clock=clock, sleep=clock.sleep)
    drive(bucket, [100] * 51)
    # The first 200 bytes are the burst's and the one that asks when it is used up.
    assert clock.now - 100 == pytest.approx(4.9, abs=0.01)
    rate[0] = 100.0
    before = clock.now
    drive(bucket, [100] * 11)
    assert clock.now - before == pytest.approx(10.1, abs=0.02)
    rate[0] = float("inf")
    before = clock.now
    drive(bucket, [10**9] * 100)
    assert clock.now - before <= 1.0, "what was owed before, no more"


def test_a_meter_tells_the_rate_of_the_last_moments() -> None:
    clock = Clock()
    meter = RateMeter(2.0, clock=clock)
    assert meter.rate == 0.0
    meter.add(1000)
    assert meter.rate == 2000.0, "half a second at least: what a queue lets through at once says little"
    for _ in range(100):
        clock.now += 0.1
        meter.add(500)
    assert meter.rate == pytest.approx(5000, rel=0.06)
    clock.now += 3
    assert meter.rate == 0.0
