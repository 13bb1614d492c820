"""CompressedAveraging: the mean over members, who is in it, what is refused."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmkit.optim.averaging import Averaging
from swarmkit.optim.collective import Collective, Gathered, Reduced, RoundKey
from swarmkit.optim.compression import CODECS, CompressedAveraging, GatherCodec, make_codec
from swarmkit.optim.compression.codec import round_trip
from swarmkit.optim.errors import RoundFailed
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.compression.offers import FED, Recorder, averaging_of, contribution, exact_ones, weighted

# -- the mean ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "error_feedback"), [*((n, False) for n in CODECS), *((n, True) for n in FED)])
def test_three_replicas_get_the_same_weighted_mean_of_what_their_codecs_leave(name: str, error_feedback: bool) -> None:
    weights = [1.0, 2.0, 4.0]

    def task(collective: LocalCollective, rank: int) -> list[Reduced]:
        averaging: Averaging = averaging_of(name, collective, error_feedback=error_feedback)
        return [
            averaging.begin(
                contribution(rank, i), exact_ones(rank), round=RoundKey("x", i), weight=weights[rank]
            ).result()
            for i in range(3)
        ]

    found = LocalSwarm(3).run(task)
    for reductions in zip(*found, strict=True):
        first = reductions[0]
        assert first.members == ("local0", "local1", "local2")
        assert first.weights == (1.0, 2.0, 4.0)
        assert first.bytes_sent > 0
        for other in reductions[1:]:
            assert other.id == first.id
            assert all(torch.equal(a, b) for a, b in zip(first.tensors, other.tensors, strict=True))
    means = weighted([[*contribution(rank), *exact_ones(rank)] for rank in range(3)], weights)
    for position, (mean, out) in enumerate(zip(means, found[0][0].tensors, strict=True)):
        if position in (0, 2):  # compressed
            limit = {"fp16": 1e-3, "bf16": 1e-2, "int8": 0.02, "int4": 0.3, "fp4": 0.4, "qsgd": 0.4}.get(name, 20.0)
            assert float((out - mean).norm() / mean.norm()) <= limit
        else:
            assert torch.allclose(out.double(), mean, rtol=1e-6)
        assert out.dtype == [*contribution(0), *exact_ones(0)][position].dtype


@pytest.mark.parametrize("name", [name for name in CODECS if isinstance(make_codec(name), GatherCodec)])
def test_the_mean_is_that_of_the_members_decoded_payloads(name: str) -> None:
    """Without draws, which depend on the peer: each payload is decoded and averaged in float32 in member order."""
    if name in ("qsgd", "ternary"):
        pytest.skip("draws depend on the peer")
    codec = make_codec(name, min_size=0)
    tensors = [contribution(rank)[:1] for rank in range(3)]
    found = LocalSwarm(3).run(
        lambda c, rank: CompressedAveraging(codec, c).begin(tensors[rank], round=RoundKey("x", 0), weight=1.0).result()
    )
    decoded = [round_trip(codec, own, torch.Generator())[0] for own in tensors]
    mean = torch.zeros_like(decoded[0])
    for part in decoded:
        mean.add_(part, alpha=1 / 3)
    assert torch.equal(found[0].tensors[0], mean)


@pytest.mark.parametrize("name", ["qsgd", "ternary"])
def test_members_draw_independently_so_that_the_mean_is_nearer_than_each(name: str) -> None:
    tensor = contribution(0)[0]
    swarm = LocalSwarm(16)
    found = swarm.run(
        lambda c, rank: averaging_of(name, c).begin([tensor], round=RoundKey("x", 0), weight=1.0).result().tensors[0]
    )
    (one,) = round_trip(make_codec(name), [tensor], torch.Generator().manual_seed(1))
    if name == "qsgd":
        assert float((found[0] - tensor).norm()) < 0.5 * float((one - tensor).norm())
    assert found[0].unique().numel() > one.unique().numel()


@pytest.mark.parametrize("name", FED)
def test_a_weight_of_0_has_no_influence_and_learns_the_mean(name: str) -> None:
    def task(collective: LocalCollective, rank: int, scale: float) -> tuple[Reduced, dict[str, Any]]:
        averaging = averaging_of(name, collective, error_feedback=True)
        for index in range(2):
            tensors = contribution(rank, index, scale if rank == 2 else 1.0)
            weight = 0.0 if rank == 2 else 1.0
            found = averaging.begin(tensors, exact_ones(rank), round=RoundKey("x", index), weight=weight).result()
        return found, averaging.state_dict()

    small = LocalSwarm(3).run(lambda c, rank: task(c, rank, 1.0))
    large = LocalSwarm(3).run(lambda c, rank: task(c, rank, 1e6))
    assert small[0][0].weights == (1.0, 1.0, 0.0)
    for left, right in zip(small[0][0].tensors, large[2][0].tensors, strict=True):
        assert torch.equal(left, right)
    assert small[2][1]["residual"] == []
    assert len(small[0][1]["residual"]) == 2


def test_all_weights_0_fail_the_round() -> None:
    def task(collective: LocalCollective, rank: int) -> str:
        with pytest.raises(RoundFailed) as caught:
            averaging_of("int8", collective).begin(contribution(rank), round=RoundKey("x", 0), weight=0.0).result()
        return str(caught.value)

    assert "nobody contributed" in LocalSwarm(2).run(task)[0]


@pytest.mark.parametrize("name", ["int8", "topk", "powersgd"])
def test_small_tensors_alone_travel_exact(name: str) -> None:
    def task(collective: LocalCollective, rank: int) -> list[Tensor]:
        averaging = CompressedAveraging(make_codec(name), collective)
        pending = averaging.begin([torch.full((10,), 0.1 * rank)], round=RoundKey("x", 0), weight=1.0)
        return pending.result().tensors

    assert torch.equal(LocalSwarm(3).run(task)[0][0], torch.full((10,), 0.1))


def test_nothing_at_all_may_be_averaged() -> None:
    found = LocalSwarm(2).run(
        lambda c, _: averaging_of("int8", c).begin([], round=RoundKey("x", 0), weight=1.0).result()
    )
    assert found[0].tensors == []


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite_are_refused_by_position(value: float, position: int, dtype: torch.dtype) -> None:
    tensors, exact = [tensor.to(dtype) for tensor in contribution(0)], [torch.zeros(2, dtype=dtype)]
    [*tensors, *exact][position].view(-1)[0] = value
    for name in CODECS:
        averaging = averaging_of(name, LocalSwarm(1).collectives[0], error_feedback=name in FED)
        with pytest.raises(ValueError, match=f"tensor {position} holds values that are not finite"):
            averaging.begin(tensors, exact, round=RoundKey("x", 0), weight=1.0)


def test_what_has_no_mean_and_weights_that_are_none_are_refused() -> None:
    averaging = averaging_of("int8", LocalSwarm(1).collectives[0])
    with pytest.raises(ValueError, match="tensor 1 has dtype torch.int64"):
        averaging.begin([torch.zeros(3), torch.zeros(3, dtype=torch.int64)], round=RoundKey("x", 0), weight=1.0)
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="weight="):
            averaging.begin(contribution(0), round=RoundKey("x", 0), weight=weight)


@pytest.mark.parametrize(
    ("name", "settings", "way_out"),
    [
        ("randomk", {}, "use unbiased=False"),
        ("ternary", {}, "use topk or int4"),
        ("ternary", {"clip": None}, "use topk or int4"),
        ("qsgd", {"bits": 3}, "use at least 4 bits with norm=max"),
        ("qsgd", {"norm": "l2"}, "use at least 4 bits with norm=max"),
    ],
)
def test_error_feedback_whose_noise_grows_is_refused_with_the_reason(
    name: str, settings: dict[str, Any], way_out: str
) -> None:
    with pytest.raises(ValueError, match=f"{name} with error_feedback: .*grows without end.*{way_out}"):
        CompressedAveraging(make_codec(name, **settings), LocalSwarm(1).collectives[0], error_feedback=True)


@dataclass
class Liar(Recorder):
    """Sends something else than it was given."""

    lie: Any = None

    def all_gather(self, payload: Any, *, round: RoundKey, weight: float) -> Future[Gathered]:
        return self.inner.all_gather(self.lie(list(payload)), round=round, weight=weight)


def truncated(payload: list[Tensor]) -> list[Tensor]:
    return [*payload[:-1], payload[-1][:-1]]


def poisoned(payload: list[Tensor]) -> list[Tensor]:
    return [torch.full_like(t, float("nan")) if t.is_floating_point() else t for t in payload]


@pytest.mark.parametrize("lie", [truncated, poisoned, lambda _: [], lambda p: p[1:], lambda p: [*p, p[0]]])
@pytest.mark.parametrize("name", [name for name in CODECS if isinstance(make_codec(name), GatherCodec)])
def test_a_payload_that_is_none_is_dropped_by_all_alike(name: str, lie: Any) -> None:
    def task(collective: LocalCollective, rank: int) -> Reduced:
        mine: Collective = Liar(collective, lie=lie) if rank == 1 else collective
        averaging = averaging_of(name, mine)
        return averaging.begin(contribution(rank), round=RoundKey("x", 0), weight=1.0 + rank).result()

    def without(collective: LocalCollective, rank: int) -> Reduced:
        averaging = averaging_of(name, collective)
        weight = 0.0 if rank == 1 else 1.0 + rank
        return averaging.begin(contribution(rank), round=RoundKey("x", 0), weight=weight).result()

    found, honest = LocalSwarm(3).run(task), LocalSwarm(3).run(without)
    for reduced in found:
        assert reduced.members == ("local0", "local2")
        assert reduced.weights == (1.0, 3.0)
        for left, right in zip(reduced.tensors, honest[0].tensors, strict=True):
            assert torch.equal(left, right)


def test_a_member_whose_payload_was_garbled_keeps_all_of_it_in_its_residual() -> None:
    def task(collective: LocalCollective, rank: int) -> CompressedAveraging:
        mine: Collective = Liar(collective, lie=truncated) if rank == 1 else collective
        averaging = averaging_of("int8", mine, error_feedback=True)
        averaging.begin(contribution(rank), round=RoundKey("x", 0), weight=1.0).result()
        return averaging

    (residual, _) = LocalSwarm(2).run(task)[1].state_dict()["residual"]
    assert torch.equal(residual, contribution(1)[0])


def test_what_is_wrong_with_a_contribution_is_said_whatever_route_is_tried_first() -> None:
    averaging = averaging_of("int4", LocalSwarm(1).collectives[0])
    averaging.codec.encode = broken  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="3 parameters for 2 tensors"):
        averaging.begin(contribution(0), round=RoundKey("x", 0), weight=1.0)


def broken(*_: Any) -> list[Tensor]:
    raise ValueError("3 parameters for 2 tensors")
