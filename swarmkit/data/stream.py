"""A peer's endless, reproducible stream of batches, with a position that a checkpoint keeps."""

from collections.abc import Mapping
from typing import TypedDict

import numpy as np

from swarmkit.data.config import Split
from swarmkit.data.corpus import Batch, Corpus
from swarmkit.data.permutation import Indices, Permutation
from swarmkit.data.split import split_samples
from swarmkit.errors import DataError


class Position(TypedDict):
    """Where a stream stands: the next sample it will draw."""

    epoch: int
    sample: int  # of the slot's own, in this epoch
    slots: int  # among which the samples of an epoch are dealt out


class Stream:
    """Draws batches for one slot out of `slots`.

    With split=iid all slots share one permutation of the samples per epoch, and slot k takes every slots-th from the
    k-th on: no sample is drawn twice in an epoch, whoever is slow, and nothing is stored. With the other splits each
    slot has a fixed set of its own, reshuffled every epoch. A slot at or beyond `slots` (a volunteer more than
    planned) draws from everything in an order of its own: the planned slots stay disjoint among themselves, and what
    they draw does not change; what the volunteer draws, one of them draws too.
    """

    def __init__(
        self, corpus: Corpus, *, slot: int, slots: int, batch_size: int, seed: int, split: Split, alpha: float = 0.5
    ) -> None:
        if slot < 0 or slots < 1 or batch_size < 1:
            raise ValueError(f"slot={slot}, slots={slots}, batch_size={batch_size}: must count from 0, 1 and 1")
        self._corpus = corpus
        self._slot, self._slots, self._batch_size, self._seed = slot, slots, batch_size, seed
        self._shared = split is Split.iid and slot < slots
        self._own: Indices | None = None  # None: all samples
        if split is not Split.iid and slot < slots:
            self._own = split_samples(corpus.domains(), split, slots, alpha, seed)[slot]
            self._count = len(self._own)
        else:
            self._count = len(range(slot, corpus.size, slots)) if self._shared else corpus.size
        if not self._count:
            raise DataError(
                f"slot {slot} of {slots} has no sample with data.split={split.name}: "
                "use more data, fewer peers, a larger data.alpha, or data.split=iid"
            )
        self._go_to(0, 0)

    def _go_to(self, epoch: int, sample: int) -> None:
        self._epoch, self._sample = epoch, sample
        if self._shared:
            self._order = Permutation(self._corpus.size, self._seed, epoch)
        else:
            self._order = Permutation(self._count, self._seed, epoch, self._slot)

    def _numbers(self, start: int, stop: int) -> Indices:
        """The corpus's numbers of this epoch's samples from `start` to `stop`."""
        positions = np.arange(start, stop, dtype=np.int64)
        if self._shared:
            return self._order(self._slot + self._slots * positions)
        drawn = self._order(positions)
        return drawn if self._own is None else self._own[drawn]

    def next(self) -> Batch:
        """Draw the next batch; a new epoch begins where the samples end."""
        drawn: list[Indices] = []
        missing = self._batch_size
        while missing:
            stop = min(self._sample + missing, self._count)
            drawn.append(self._numbers(self._sample, stop))
            missing -= stop - self._sample
            if stop < self._count:
                self._sample = stop
            else:
                self._go_to(self._epoch + 1, 0)
        return self._corpus.fetch(np.concatenate(drawn))

    def seek(self, samples: int) -> None:
        """Go to where this stream stands after drawing so many samples: for a peer that takes a slot over."""
        if samples < 0:
            raise ValueError(f"samples={samples}: must not be negative")
        self._go_to(*divmod(samples, self._count))

    @property
    def position(self) -> int:
        """Samples of this share that come before the next one, through all epochs."""
        return self._epoch * self._count + self._sample

    def state(self) -> Position:
        """The position, for a checkpoint."""
        return Position(epoch=self._epoch, sample=self._sample, slots=self._slots)

    def load(self, state: Mapping[str, int]) -> None:
        """Go on from a position; raises ValueError when there is no such position in this stream.

        A position among another number of slots, all of which stood there, is translated: with split=iid nothing that
        they drew in this epoch is drawn again before the next, and less than one sample per slot is left out.
        """
        epoch, sample, slots = int(state["epoch"]), int(state["sample"]), int(state.get("slots", self._slots))
        if epoch < 0 or sample < 0 or slots < 1:
            raise ValueError(f"position {dict(state)}: must not be negative")
        if slots != self._slots:
            sample = -(-sample * slots // self._slots)
            if sample >= self._count:
                epoch, sample = epoch + 1, 0
        if sample >= self._count:
            raise ValueError(
                f"position {dict(state)}: this stream has {self._count} samples in an epoch; "
                "the data, data.split or the number of peers have changed since the checkpoint"
            )
        self._go_to(epoch, sample)
