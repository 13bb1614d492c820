"""Identities of the papers, by the numbers of the golden checks (20)-(29), and those of fp4 and error feedback."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmkit.optim.collective import RoundKey
from swarmkit.optim.compression import (
    E3M0,
    QSGD,
    Blockwise,
    CompressedAveraging,
    PowerSGD,
    RandomK,
    TernGrad,
    TopK,
    make_codec,
    round_trip,
)
from swarmkit.optim.compression.blockwise import from_grid, to_grid
from swarmkit.optim.compression.codec import Exchanged, Layout
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.compression.offers import FED

Noisy = Callable[[torch.Generator], Tensor]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moments(noisy: Noisy, trials: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each number of a noisy tensor."""
    generator = rng(7)
    found = torch.stack([noisy(generator).double() for _ in range(trials)])
    return found.mean(0), found.var(0)


def assert_unbiased(noisy: Noisy, truth: Tensor, trials: int = 800) -> None:
    """The mean of the trials is as near to the truth as their variance lets it be."""
    mean, variance = moments(noisy, trials)
    assert float((mean - truth.double()).square().sum()) <= 1.5 * float(variance.sum()) / trials


# -- PowerSGD ----------------------------------------------------------------------------------------------------------


def power(codec: PowerSGD, matrix: Tensor, state: list[Tensor]) -> Exchanged:
    """One exchange of a member alone."""
    layout = Layout.of([matrix])
    steps = codec.exchange(layout.flatten([matrix]), layout, rng(), None, state)
    offered = next(steps)
    try:
        while True:
            offered = steps.send(offered)
    except StopIteration as stop:
        found: Exchanged = stop.value
        return found


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5), (4, 3, 2, 2), (1, 7), (7, 1)])
def test_full_rank_powersgd_is_exact(shape: tuple[int, ...]) -> None:
    """(20)"""
    tensor = normal(*shape)
    codec = PowerSGD(rank=min(shape[0], math.prod(shape[1:])))
    state: list[Tensor] = []
    for _ in range(3):
        found = power(codec, tensor, state)
        assert torch.allclose(found.mean.view(shape), tensor, atol=1e-5)
        state = found.state


def test_powersgd_recovers_a_matrix_of_its_rank_at_once() -> None:
    """(21)"""
    matrix = normal(30, 3) @ normal(3, 40, seed=1)
    (found,) = round_trip(PowerSGD(rank=3), [matrix], rng())
    assert torch.allclose(found, matrix, atol=1e-4)
    (short,) = round_trip(PowerSGD(rank=2), [matrix], rng())
    assert not torch.allclose(short, matrix, atol=0.1)


def test_powersgd_projects_so_pythagoras_holds_and_the_svd_is_the_limit() -> None:
    """(22)"""
    matrix = normal(40, 30)
    (found,) = round_trip(PowerSGD(rank=4), [matrix], rng())
    error = float((matrix - found).square().sum())
    assert float(found.square().sum()) + error == pytest.approx(float(matrix.square().sum()), rel=1e-5)
    assert math.sqrt(error) >= float(PowerSGD().errors(matrix, [4])) * (1 - 1e-6)


def test_warm_starts_converge_to_the_best_approximation_of_the_rank() -> None:
    """(23)"""
    matrix = normal(40, 30) * torch.logspace(0, -2, 30)
    codec, state, errors = PowerSGD(rank=4), [], []
    for _ in range(40):
        found = power(codec, matrix, state)
        state = found.state
        errors.append(float((matrix - found.mean.view(40, 30)).norm()))
    best = float(codec.errors(matrix, [4]))
    assert errors[-1] == pytest.approx(best, rel=1e-3)
    assert errors[0] > 1.02 * best
    fresh = float((matrix - round_trip(codec, [matrix], rng())[0]).norm())
    assert fresh == pytest.approx(errors[0])


def test_a_change_of_rank_keeps_what_the_bases_have_learnt() -> None:
    matrix = normal(40, 30) * torch.logspace(0, -2, 30)
    state: list[Tensor] = []
    for _ in range(20):
        state = power(PowerSGD(rank=4), matrix, state).state
    for rank in (2, 6):
        warm = float((matrix - power(PowerSGD(rank=rank), matrix, state).mean.view(40, 30)).norm())
        cold = float((matrix - power(PowerSGD(rank=rank), matrix, []).mean.view(40, 30)).norm())
        assert warm < cold


def test_powersgd_sends_convolutions_as_output_channels_by_the_rest() -> None:
    tensor = normal(8, 4, 3, 3)
    (conv,) = round_trip(PowerSGD(rank=2), [tensor], rng())
    (flat,) = round_trip(PowerSGD(rank=2), [tensor.view(8, 36)], rng())
    assert torch.equal(conv.view(8, 36), flat)
    assert PowerSGD(rank=2).payload_bytes((8, 4, 3, 3)) == 4 * 2 * (8 + 36)


# -- error feedback ----------------------------------------------------------------------------------------------------


def fed_back(averaging: CompressedAveraging, tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of what was to be sent, of what was, and the residual, of one member alone."""
    sent = torch.zeros_like(tensors[0])
    for index, tensor in enumerate(tensors):
        pending = averaging.begin([tensor], round=RoundKey("x", index), weight=1.0)
        sent += pending.result().tensors[0]
    (residual,) = averaging.state_dict()["residual"]
    return torch.stack(tensors).sum(0), sent, residual


def telescopes(averaging: CompressedAveraging, tensors: list[Tensor]) -> bool:
    truth, sent, residual = fed_back(averaging, tensors)
    scale = float(truth.abs().max() + residual.abs().max() + sent.abs().max())
    return torch.allclose(sent, truth - residual, atol=1e-5 * scale)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(FED)), st.integers(1, 6), st.integers(0, 1000))
def test_error_feedback_telescopes_for_any_codec(name: str, rounds: int, seed: int) -> None:
    """(24) (I25) Sum of what was sent = sum of what was to be sent - residual."""
    parameters: dict[str, Any] = {"unbiased": False} if name == "randomk" else {}
    codec = make_codec(name, min_size=0, **parameters)
    averaging = CompressedAveraging(codec, LocalSwarm(1).collectives[0], error_feedback=True)
    assert telescopes(averaging, [normal(24, 20, seed=seed + i) for i in range(rounds)])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([64, 512, 4096]), st.sampled_from([4, 5, 8]), st.floats(1, 1e4), st.integers(0, 1000))
def test_residuals_of_qsgd_stay_below_a_bound_however_large_the_bucket(
    bucket: int, bits: int, outlier: float, seed: int
) -> None:
    """By the largest magnitude X of what comes in: below X / (s - 1), also where the noise has the larger norm."""
    codec = make_codec("qsgd", bits=bits, bucket=bucket, min_size=0)
    averaging = CompressedAveraging(codec, LocalSwarm(1).collectives[0], error_feedback=True, generator=seed)
    largest = 0.0
    for index in range(20):
        tensor = normal(4096, seed=seed + index)
        tensor[::512] = outlier
        largest = max(largest, float(tensor.abs().max()))
        averaging.begin([tensor], round=RoundKey("x", index), weight=1.0).result()
        (residual,) = averaging.state_dict()["residual"]
        assert float(residual.abs().max()) <= largest / (2 ** (bits - 1) - 2) * (1 + 1e-5)


@pytest.mark.parametrize("slip", ["forgets the old residual", "subtracts nothing", "feeds back twice"])
def test_the_telescope_notices_a_slip(slip: str) -> None:
    """(24) planted"""

    class Slipped(CompressedAveraging):
        def _commit(self, flat: Tensor, weight: float, outcome: Any) -> None:
            old = self._residual
            super()._commit(flat, weight, outcome)
            assert self._residual is not None
            if slip == "forgets the old residual" and old is not None:
                self._residual -= old
            elif slip == "subtracts nothing":
                self._residual += outcome.sent
            elif slip == "feeds back twice":
                self._residual *= 2

    averaging = Slipped(TopK(0.1, min_size=0), LocalSwarm(1).collectives[0], error_feedback=True)
    assert not telescopes(averaging, [normal(24, 20, seed=i) for i in range(4)])


@pytest.mark.parametrize("name", ["int4", "topk", "powersgd", "fp16"])
def test_error_feedback_telescopes_over_members_of_different_weight(name: str) -> None:
    """(24) The weighted mean of the residuals is what the means still lack."""
    weights, rounds = [1.0, 2.0, 5.0], 5

    def task(collective: LocalCollective, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        averaging = CompressedAveraging(make_codec(name, min_size=0), collective, error_feedback=True)
        sent, truth = torch.zeros(20, 24), torch.zeros(20, 24)
        for index in range(rounds):
            tensor = normal(20, 24, seed=10 * index + rank)
            truth += tensor
            pending = averaging.begin([tensor], round=RoundKey("x", index), weight=weights[rank])
            sent += pending.result().tensors[0]
        return truth, sent, averaging.state_dict()["residual"][0]

    found = LocalSwarm(3).run(task)
    mean = sum(w * (truth - residual) for w, (truth, _, residual) in zip(weights, found, strict=True)) / sum(weights)
    # float16's mean is rounded once more, which no residual knows of.
    assert torch.allclose(found[0][1], torch.as_tensor(mean), atol=5e-3 if name == "fp16" else 1e-4)


# -- sparse ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.floats(0.001, 1.0), st.integers(0, 1000), st.booleans())
def test_topk_takes_the_largest_and_contracts_by_their_share(size: int, density: float, seed: int, tied: bool) -> None:
    """(25) |x - C(x)|**2 <= (1 - k/n) |x|**2"""
    tensor = normal(size, seed=seed)
    if tied:
        tensor = tensor.round()
    (found,) = round_trip(TopK(density, values="float32"), [tensor], rng())
    count = min(size, max(1, round(density * size)))
    error = float((tensor - found).double().square().sum())
    assert error <= (1 - count / size) * float(tensor.double().square().sum()) * (1 + 1e-9)
    best = tensor.abs().sort(descending=True, stable=True)
    expected = torch.zeros_like(tensor)
    expected[best.indices[:count]] = tensor[best.indices[:count]]
    assert torch.equal(found, expected)


def test_topk_is_exact_for_large_tensors_of_very_different_make_in_one_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    normal_one = torch.randn(300, 301, generator=generator) * 1e-6
    mostly_zero = torch.zeros(50_000).index_fill_(0, torch.arange(0, 50_000, 997), 2.0)
    periodic = torch.randn(64, generator=generator).repeat(1000)
    outliers = torch.rand(40_000, generator=generator)
    outliers[::400] += 100
    given_ones = [normal_one, mostly_zero, torch.full((20_000,), 3.0), periodic, outliers]
    for density in (0.001, 0.01, 0.2):
        found = round_trip(TopK(density, values="float32"), given_ones, rng())
        for old, new in zip(given_ones, found, strict=True):
            count = max(1, round(density * old.numel()))
            order = old.reshape(-1).abs().sort(descending=True, stable=True).indices[:count]
            expected = torch.zeros(old.numel())
            expected[order] = old.reshape(-1)[order]
            assert torch.equal(new.reshape(-1), expected)


def test_randomk_is_unbiased_and_of_the_variance_of_its_density() -> None:
    tensor = normal(60, 5)
    codec = RandomK(density=0.1)
    assert codec.unbiased
    assert_unbiased(lambda g: round_trip(codec, [tensor], g)[0], tensor)
    _, variance = moments(lambda g: round_trip(codec, [tensor], g)[0], 800)
    assert float(variance.sum()) == pytest.approx(9 * float(tensor.square().sum()), rel=0.1)


def test_the_check_of_unbiasedness_notices_a_slip() -> None:
    """Planted: the factor n/k forgotten."""
    codec = RandomK(density=0.1, unbiased=False)
    with pytest.raises(AssertionError):
        assert_unbiased(lambda g: round_trip(codec, [normal(60, 5)], g)[0], normal(60, 5))


# -- quantisers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_qsgd_is_unbiased_within_its_variance_bound(bits: int, norm: str) -> None:
    """(27) E C(x) = x, E |C(x) - x|**2 <= min(n / s**2, sqrt(n) / s) |x|**2"""
    bucket, tensor = 64, normal(64, seed=bits)
    codec = QSGD(bits, bucket=bucket, norm=norm)
    assert codec.unbiased
    assert_unbiased(lambda g: round_trip(codec, [tensor], g)[0], tensor)
    _, variance = moments(lambda g: round_trip(codec, [tensor], g)[0], 800)
    steps = 2 ** (bits - 1) - 1
    bound = min(bucket / steps**2, math.sqrt(bucket) / steps) * float(tensor.square().sum())
    assert float(variance.sum()) <= 1.1 * bound
    assert float(variance.sum().sqrt()) == pytest.approx(float(codec.errors(tensor, [bits])), rel=0.1)


def test_terngrad_is_unbiased_with_the_variance_of_its_formula() -> None:
    """(28) Var = sum |v| (s - |v|)"""
    tensor = normal(30, 10)
    codec = TernGrad(clip=None)
    assert codec.unbiased
    assert_unbiased(lambda g: round_trip(codec, [tensor], g)[0], tensor)
    _, variance = moments(lambda g: round_trip(codec, [tensor], g)[0], 800)
    magnitude, scale = tensor.abs().double(), float(tensor.abs().max())
    assert float(variance.sum()) == pytest.approx(float((magnitude * (scale - magnitude)).sum()), rel=0.05)


def test_terngrad_clips_each_tensor_at_its_own_two_and_a_half_sigma() -> None:
    """(28) Three values a tensor, one of them zero, and a scale for each tensor."""
    given_ones = [normal(50, 40), 1e-3 * normal(50, 40, seed=1)]
    found = round_trip(TernGrad(), given_ones, rng())
    assert not TernGrad().unbiased
    for old, new in zip(given_ones, found, strict=True):
        scale = float(new.max())
        assert set(new.unique().tolist()) == {-scale, 0.0, scale}
        assert scale == pytest.approx(2.5 * float(old.square().mean().sqrt()), rel=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([4, 8]), st.integers(1, 700), st.integers(0, 1000), st.floats(-30, 30))
def test_blockwise_error_is_at_most_half_a_step_of_its_block(bits: int, size: int, seed: int, exponent: float) -> None:
    """(29) int8: error <= absmax / 254; int4: absmax / 14"""
    tensor = normal(size, seed=seed) * 10.0**exponent
    (found,) = round_trip(Blockwise(bits, block=64), [tensor], rng())
    for start in range(0, size, 64):
        block, error = tensor[start : start + 64], (tensor - found)[start : start + 64]
        assert float(error.abs().max()) <= float(block.abs().max()) / (2**bits - 2) * (1 + 1e-4)


@pytest.mark.parametrize("bits", range(2, 9))
def test_rounding_to_a_grid_is_off_by_at_most_half_its_range_over_its_steps(bits: int) -> None:
    """(29) range / (2**b - 2) / 2 with the symmetric grid, whose range is 2 absmax"""
    tensor = normal(512)
    codes, scales = to_grid(tensor, bits, 512)
    found = torch.empty(512)
    from_grid(codes, scales, bits, 512, found)
    assert float((found - tensor).abs().max()) <= 2 * float(tensor.abs().max()) / (2**bits - 2) / 2 * (1 + 1e-4)
    assert found.unique().numel() <= 2**bits - 1


# -- fp4 ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 900), st.integers(0, 1000), st.sampled_from([None, 64]), st.floats(-30, 30))
def test_e3m0_has_15_levels_is_idempotent_and_off_by_a_third(
    size: int, seed: int, block: int | None, exponent: float
) -> None:
    """(I30)"""
    codec = E3M0(block)
    tensor = normal(size, seed=seed) * 10.0**exponent
    (found,) = round_trip(codec, [tensor], rng())
    (again,) = round_trip(codec, [found], rng())
    assert torch.equal(found, again)
    for start in range(0, size, block or size):
        part, out = tensor[start : start + (block or size)], found[start : start + (block or size)]
        top = part.abs().max()
        assert out.unique().numel() <= 15
        in_range = part.abs() >= top / 64
        assert float(((out - part).abs() / part.abs())[in_range].max()) <= 1 / 3 + 1e-5
        # Below, the nearest of zero and the lowest level.
        assert float((out - part)[~in_range].abs().max() if bool((~in_range).any()) else 0.0) <= top / 128 * (1 + 1e-5)


def test_e3m0_takes_the_nearest_level() -> None:
    tensor = torch.tensor([1.0, 0.76, 0.74, -0.5, 0.376, 0.374, 1 / 64, 0.6 / 64, -0.4 / 64, 0.0])
    (found,) = round_trip(E3M0(), [tensor], rng())
    assert found.tolist() == [1.0, 1.0, 0.5, -0.5, 0.5, 0.25, 1 / 64, 1 / 64, 0.0, 0.0]
