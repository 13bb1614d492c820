"""Splits: every sample has one owner, and the shares look as their names say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmkit.data.config import Split
from swarmkit.data.permutation import Indices
from swarmkit.data.split import split_samples
from tests.unit.swarmkit.data.harness_corpora import splits


def mixtures(shares: list[Indices], domains: Indices) -> np.ndarray:
    """[slot, domain]: which share of the domain the slot has."""
    counts = np.array([np.bincount(domains[share], minlength=domains.max() + 1) for share in shares])
    return counts / counts.sum(axis=0)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=200),
    splits,
    st.integers(1, 12),
    st.floats(0.01, 100),
    st.integers(0, 99),
)
def test_every_sample_has_exactly_one_owner(
    domains: list[int], split: Split, slots: int, alpha: float, seed: int
) -> None:
    shares = split_samples(np.array(domains), split, slots, alpha, seed)
    assert len(shares) == slots
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(domains)))


@pytest.mark.parametrize("split", list(Split))
def test_all_peers_compute_the_same_shares(split: Split) -> None:
    domains = np.arange(300) % 7
    one, two = (split_samples(domains, split, 4, 0.5, seed=3) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_with_as_many_domains_as_slots_each_has_one() -> None:
    domains = np.repeat([2, 5, 9], [10, 20, 30])
    assert [share.tolist() for share in split_samples(domains, Split.domain, 3, 0.5, 0)] == [
        list(range(10)),
        list(range(10, 30)),
        list(range(30, 60)),
    ]


def test_with_more_domains_than_slots_they_are_dealt_out_in_turn() -> None:
    domains = np.repeat(np.arange(5), 10)
    shares = split_samples(domains, Split.domain, 2, 0.5, 0)
    assert [sorted(set(domains[share].tolist())) for share in shares] == [[0, 2, 4], [1, 3]]


def test_with_fewer_domains_than_slots_a_domain_is_shared_evenly() -> None:
    domains = np.repeat([0, 1], 100)
    shares = split_samples(domains, Split.domain, 5, 0.5, 0)
    assert [sorted(set(domains[share].tolist())) for share in shares] == [[0], [1], [0], [1], [0]]
    assert [len(share) for share in shares] == [34, 50, 33, 50, 33]


def test_a_large_alpha_is_nearly_iid() -> None:
    domains = np.repeat(np.arange(10), 1000)
    shares = mixtures(split_samples(domains, Split.dirichlet, 4, 1e4, 0), domains)
    assert np.abs(shares - 0.25).max() < 0.02


def test_a_small_alpha_gives_nearly_all_of_a_domain_to_one_slot() -> None:
    domains = np.repeat(np.arange(40), 100)
    shares = mixtures(split_samples(domains, Split.dirichlet, 4, 0.02, 0), domains)
    assert np.median(shares.max(axis=0)) > 0.99


@pytest.mark.parametrize("alpha", [0.3, 1.0, 5.0])
def test_shares_have_the_mean_and_the_spread_of_a_dirichlet_distribution(alpha: float) -> None:
    slots, count = 4, 2000
    domains = np.repeat(np.arange(count), 200)
    shares = mixtures(split_samples(domains, Split.dirichlet, slots, alpha, 0), domains)
    variance = (1 / slots) * (1 - 1 / slots) / (slots * alpha + 1)
    assert np.abs(shares.mean(axis=1) - 1 / slots).max() < 0.02
    assert np.abs(shares.var(axis=1) / variance - 1).max() < 0.12


def test_a_mixture_is_drawn_anew_until_nobody_is_left_with_nothing() -> None:
    domains = np.repeat([0, 1, 2], 100)
    for seed in range(30):
        assert min(map(len, split_samples(domains, Split.dirichlet, 4, 0.3, seed))) > 0
