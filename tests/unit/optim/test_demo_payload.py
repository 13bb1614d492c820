"""DeMo's payload: what comes back, what it takes, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmkit.optim.demo_payload import VALUES, GroupFormat, PayloadFormat, Sparse

CPU = torch.device("cpu")
GROUPS = (GroupFormat(9, 64, 4), GroupFormat(5, 4096, 32), GroupFormat(2, 33 * 50, 7), GroupFormat(3, 1, 1))


def make_parts(groups: tuple[GroupFormat, ...] = GROUPS, scale: float = 1.0, seed: int = 0) -> list[Sparse]:
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for group in groups:
        order = torch.rand(group.chunks, group.area, generator=generator).argsort(1)
        values = scale * torch.randn(group.chunks, group.k, generator=generator)
        parts.append(Sparse(order[:, : group.k].sort(1).values, values))
    return parts


def write(values: str, parts: list[Sparse] | None = None, flags: int = 11) -> tuple[PayloadFormat, Tensor]:
    form = PayloadFormat(GROUPS, values, flags)
    return form, form.write(parts or make_parts(), torch.arange(flags) % 3 == 0)


@pytest.mark.parametrize("values", VALUES)
def test_positions_and_flags_come_back(values: str) -> None:
    """(13)"""
    form, payload = write(values)
    assert payload.dtype == torch.uint8
    assert payload.numel() == form.num_bytes
    found, flags = form.read([payload], CPU)
    assert flags.tolist() == [i % 3 == 0 for i in range(11)]
    for part, wanted in zip(found, make_parts(), strict=True):
        assert torch.equal(part.index, wanted.index)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(VALUES), st.integers(-100, 100), st.integers(0, 50))
def test_values_come_back_within_their_precision_at_any_magnitude(values: str, exponent: int, seed: int) -> None:
    parts = make_parts(scale=2.0**exponent, seed=seed)
    form, payload = write(values, parts)
    largest = max(float(part.values.abs().max()) for part in parts)
    for found, wanted in zip(form.read([payload], CPU)[0], parts, strict=True):
        error = (found.values - wanted.values).abs()
        if values == "float32":
            assert not error.any()
        elif values == "float16":
            assert bool((error <= wanted.values.abs() * 2**-11 + largest * 2**-24).all())
        elif values == "int8":
            assert bool((error <= wanted.values.abs().amax(1, keepdim=True) / 127 * 0.76).all())
        else:
            scale = wanted.values.abs().mean(1, keepdim=True)
            torch.testing.assert_close(found.values, scale * wanted.values.sign(), rtol=2**-8, atol=0)


def test_one_bit_with_a_mean_magnitude_is_the_nearest_that_signs_can_be() -> None:
    """(26) |x - C(x)|**2 = |x|**2 - |x|_1**2 / n, the least over all scales."""
    form, payload = write("sign")
    for found, wanted in zip(form.read([payload], CPU)[0], make_parts(), strict=True):
        x = wanted.values.double()
        least = x.square().sum(1) - x.abs().sum(1).square() / x.shape[1]
        error = (x - found.values).square().sum(1)
        # The scale is sent in bfloat16, off by up to 2**-9, which counts squared.
        assert bool((error >= least * (1 - 1e-9)).all())
        assert bool((error - least <= 2**-16 * x.square().sum(1)).all())


@pytest.mark.parametrize("values", VALUES)
def test_zeros_are_sent_as_zeros(values: str) -> None:
    parts = [Sparse(part.index, torch.zeros_like(part.values)) for part in make_parts()]
    form, payload = write(values, parts)
    assert not any(part.values.any() for part in form.read([payload], CPU)[0])


def test_a_power_of_two_on_all_values_changes_no_bit_of_them() -> None:
    for values in VALUES:
        once, eight = (write(values, make_parts(scale=scale)) for scale in (1.0, 8.0))
        for left, right in zip(once[0].read([once[1]], CPU)[0], eight[0].read([eight[1]], CPU)[0], strict=True):
            assert torch.equal(8 * left.values, right.values)


@pytest.mark.parametrize(("values", "limit"), [("sign", 1.4), ("int8", 2.3), ("float16", 3.2), ("float32", 5.2)])
def test_a_coefficient_of_a_full_chunk_takes_few_bytes(values: str, limit: float) -> None:
    form = PayloadFormat((GroupFormat(1000, 4096, 32),), values, 10)
    bound = (math.log2(math.comb(4096, 32)) / 32 + (1 if values == "sign" else 8)) / 8
    assert (bound if values in ("sign", "int8") else 0) < form.num_bytes / form.coefficients <= limit


def test_no_tensors_make_an_empty_payload() -> None:
    form = PayloadFormat((), "float16", 0)
    assert form.read([form.write([], torch.zeros(0, dtype=torch.bool))], CPU)[0] == []


def test_unknown_values_are_refused() -> None:
    with pytest.raises(ValueError, match="values='int7'"):
        PayloadFormat(GROUPS, "int7", 0)


@pytest.mark.parametrize("values", VALUES)
def test_messages_of_another_form_are_refused(values: str) -> None:
    form, payload = write(values)
    for message in (
        [],
        [payload[:-1]],
        [torch.cat((payload, payload[:1]))],
        [payload.to(torch.int8)],
        [payload.view(1, -1)],
        [payload, payload],
        [torch.empty(0, dtype=torch.uint8)],
        [torch.zeros((), dtype=torch.uint8)],
    ):
        with pytest.raises(ValueError, match="a payload is"):
            form.read(message, CPU)


@pytest.mark.parametrize("k", [1, 60])
def test_positions_that_no_chunk_has_are_refused(k: int) -> None:
    form = PayloadFormat((GroupFormat(2, 33 * 50, k),), "int8", 4)
    payload = form.write(make_parts(form.groups), torch.ones(4, dtype=torch.bool))
    payload[1:4] = 0xFF
    with pytest.raises(ValueError, match="positions"):
        form.read([payload], CPU)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(values: str, poison: float) -> None:
    parts = make_parts()
    parts[1].values[2, 3] = poison
    form, payload = write(values, parts)
    with pytest.raises(ValueError, match="finite"):
        form.read([payload], CPU)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(VALUES), st.integers(0, 10**6))
def test_random_bytes_are_refused_or_read_as_finite_values_in_range(values: str, seed: int) -> None:
    form = PayloadFormat((GroupFormat(2, 50, 2),), values, 3)
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(0, 256, (form.num_bytes,), dtype=torch.uint8, generator=generator)
    try:
        (part,), _ = form.read([payload], CPU)
    except ValueError:
        return
    assert bool(part.values.isfinite().all())
    assert bool(((part.index >= 0) & (part.index < 50)).all())
