"""A peer's endless, reproducible stream of batches, with a position that a checkpoint keeps."""

from typing import TypedDict

import numpy as np

from swarmkit.data.config import Split
from swarmkit.data.corpus import Batch, Corpus, Indices
from swarmkit.errors import DataError


class Position(TypedDict):
    """Where a stream stands: the next sample it will draw."""

    epoch: int
    sample: int


class Stream:
    """Draws batches for one slot out of `slots`.

    With split=iid all slots share one permutation of the samples per epoch, and slot k takes every slots-th from the
    k-th on: no sample is drawn twice in an epoch, whoever is slow. With the other splits each slot has a fixed set of
    its own, reshuffled every epoch. A slot at or beyond `slots` (a volunteer more than planned) draws from everything
    in an order of its own: what the planned slots draw does not change.
    """

    def __init__(
        self, corpus: Corpus, *, slot: int, slots: int, batch_size: int, seed: int, split: Split, alpha: float = 0.5
    ) -> None:
        if slot < 0 or slots < 1 or batch_size < 1:
            raise ValueError(f"slot={slot}, slots={slots}, batch_size={batch_size}: must count from 0, 1 and 1")
        self._corpus = corpus
        self._slot, self._slots, self._batch_size, self._seed = slot, slots, batch_size, seed
        self._shared = split is Split.iid and slot < slots
        count = len(corpus.domains())
        self._mine = np.arange(count, dtype=np.int64)
        if split is not Split.iid and slot < slots:
            self._mine = split_samples(corpus.domains(), split, slots, alpha, seed)[slot]
        if not len(self._mine) or (self._shared and count < slots):
            raise DataError(f"slot {slot} of {slots} has no sample: use more data, fewer peers, or data.split=iid")
        self._position = Position(epoch=0, sample=0)
        self._order = self._shuffle(0)

    def _shuffle(self, epoch: int) -> Indices:
        if self._shared:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._mine)
            return order[self._slot :: self._slots]
        return np.random.default_rng([self._seed, epoch, self._slot + 1]).permutation(self._mine)

    def next(self) -> Batch:
        """Draw the next batch; a new epoch begins where the samples end."""
        drawn: list[Indices] = []
        missing = self._batch_size
        while missing:
            start = self._position["sample"]
            taken = self._order[start : start + missing]
            drawn.append(taken)
            missing -= len(taken)
            self._position["sample"] += len(taken)
            if self._position["sample"] >= len(self._order):
                self._position = Position(epoch=self._position["epoch"] + 1, sample=0)
                self._order = self._shuffle(self._position["epoch"])
        return self._corpus.fetch(np.concatenate(drawn))

    def state(self) -> Position:
        """The position, for a checkpoint."""
        return Position(epoch=self._position["epoch"], sample=self._position["sample"])

    def load(self, state: Position) -> None:
        """Go on from a position; raises ValueError when it cannot be one of this stream's."""
        epoch, sample = int(state["epoch"]), int(state["sample"])
        order = self._shuffle(epoch) if epoch >= 0 else self._order[:0]
        if not 0 <= sample < len(order):
            raise ValueError(f"position {dict(state)} does not exist in this stream: other data, split or peers?")
        self._position, self._order = Position(epoch=epoch, sample=sample), order


def split_samples(domains: Indices, split: Split, slots: int, alpha: float, seed: int) -> list[Indices]:
    """Give every sample to one slot, by domain or by a Dirichlet mixture; the same on all peers.

    By domain, slot k has the domains k, k + slots, ...; when there are fewer domains than slots, those that share one
    deal its samples out in turn. Dirichlet as in arXiv 1909.06335: each domain is shared out in proportions drawn with
    concentration `alpha`.
    """
    rng = np.random.default_rng([seed, slots])
    shares: list[list[Indices]] = [[] for _ in range(slots)]
    present = np.unique(domains)
    for number, domain in enumerate(present):
        members = np.flatnonzero(domains == domain)
        if split is Split.domain:
            owners = [slot for slot in range(slots) if slot % len(present) == number] or [number % slots]
            for turn, owner in enumerate(owners):
                shares[owner].append(members[turn :: len(owners)])
        else:
            cuts = np.cumsum(rng.dirichlet([alpha] * slots))[:-1] * len(members)
            for slot, part in enumerate(np.split(rng.permutation(members), cuts.round().astype(np.int64))):
                shares[slot].append(part)
    return [np.concatenate(parts) if parts else np.empty(0, dtype=np.int64) for parts in shares]
