"""Which training samples each peer has when they are not drawn from everything: by domain or by Dirichlet mixtures."""

import numpy as np

from swarmkit.data.config import Split
from swarmkit.data.permutation import Indices, Permutation

# A mixture that leaves a slot without any sample is drawn anew so many times.
_DRAWS = 100


def split_samples(domains: Indices, split: Split, slots: int, alpha: float, seed: int) -> list[Indices]:
    """Give every sample to exactly one slot; the same on all peers.

    `domains` holds the domain of each sample. A slot's share is empty only when that cannot be helped: fewer samples
    than slots, or a very small `alpha`.
    """
    if split is Split.domain:
        return _by_domain(domains, slots)
    if split is Split.dirichlet:
        return _by_mixture(domains, slots, alpha, seed)
    everything = np.arange(len(domains), dtype=np.int64)
    return [everything[slot::slots] for slot in range(slots)]


def _by_domain(domains: Indices, slots: int) -> list[Indices]:
    """Slot k has the domains k, k + slots, ...; where domains are fewer than slots, sharers deal a domain out."""
    shares: list[list[Indices]] = [[] for _ in range(slots)]
    present = np.unique(domains)
    for number, domain in enumerate(present):
        members = np.flatnonzero(domains == domain)
        owners = [slot for slot in range(slots) if slot % len(present) == number] or [number % slots]
        for turn, owner in enumerate(owners):
            shares[owner].append(members[turn :: len(owners)])
    return _join(shares)


def _by_mixture(domains: Indices, slots: int, alpha: float, seed: int) -> list[Indices]:
    """Each domain is shared out in proportions from a Dirichlet distribution (arXiv 1905.12022, section 4)."""
    rng = np.random.default_rng([seed, slots])
    members = [np.flatnonzero(domains == domain) for domain in np.unique(domains)]
    shuffled = [one[Permutation(len(one), seed, n)(np.arange(len(one)))] for n, one in enumerate(members)]
    for _ in range(_DRAWS):
        shares: list[list[Indices]] = [[] for _ in range(slots)]
        for one in shuffled:
            cuts = np.cumsum(rng.dirichlet([alpha] * slots))[:-1] * len(one)
            for slot, part in enumerate(np.split(one, cuts.round().astype(np.int64))):
                shares[slot].append(part)
        if all(sum(map(len, parts)) for parts in shares):
            break
    return _join(shares)


def _join(shares: list[list[Indices]]) -> list[Indices]:
    return [np.concatenate(parts) if parts else np.empty(0, dtype=np.int64) for parts in shares]
