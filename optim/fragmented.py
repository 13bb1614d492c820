"""FragmentedOptimizer: the state of a strategy whose parameters synchronise in fragments, rounds in flight included."""

import threading
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from swarmkit.optim.averaging import Averaging
from swarmkit.optim.flight import Flight
from swarmkit.optim.fragments import Fragment
from swarmkit.optim.options import Windows
from swarmkit.optim.round_report import RoundReport
from swarmkit.optim.snapshot import read_lineage
from swarmkit.optim.synced import SyncedOptimizer

_NUMBERS = ("lineage", "synced_step", "samples", "steps", "observes", "others")
_LISTS = ("start", "carry", "kept")


class FragmentedOptimizer(SyncedOptimizer):
    """Keeps the fragments; what they do in rounds is up to the subclass.

    Rounds are numbered through all fragments in turn: round r is of fragment r mod k. A snapshot is of the anchor and
    the outer state alone and says which rounds it lacks because they were under way. A `state_dict` holds what was
    offered to those as well, and they begin again, under the same keys, in the next step: all peers that resume must
    resume from the same step.
    """

    _fragments: list[Fragment]
    _count: int

    def __init__(self, inner: torch.optim.Optimizer, **options: Unpack[Windows]) -> None:
        """Wrap `inner`; see SyncedOptimizer."""
        self._telling: Fragment | None = None
        self._thread = threading.get_ident()
        self._asked = False  # another thread has taken a snapshot
        self._synced_before: tuple[int, int | None] = (0, None)  # step and window that the newest boundary ended
        # Of the snapshot that was loaded last: rounds it lacks, the round that was to begin next, the newest boundary.
        self._missing: list[int] = []
        self._next_round = self._launched_step = 0
        super().__init__(inner, **options)

    def _flying(self) -> list[Fragment]:
        """Fragments with a round under way, in the order in which the rounds began."""
        flying = [(fragment.flight.key.index, fragment) for fragment in self._fragments if fragment.flight is not None]
        return [fragment for _, fragment in sorted(flying, key=lambda pair: pair[0])]

    def _averagings(self) -> list[Averaging]:
        return [fragment.averaging for fragment in self._fragments]

    def _names_sent(self) -> list[list[str]]:
        return [fragment.part.names for fragment in self._fragments]

    @property
    def lacks_rounds(self) -> bool:
        """See SyncedOptimizer."""
        return bool(self._missing)

    # -- the anchor --------------------------------------------------------------------------------------------------

    def digest(self) -> str:
        """Fingerprint of the anchor: equal on two peers exactly when the anchors are.

        While `on_round` is told of a fragment's round it is of that fragment alone: of the others one peer may hold a
        newer round than another.
        """
        if self._telling is None:
            return super().digest()
        with self._lock:
            return self._telling.part.digest()

    def _tell_of(self, fragment: Fragment, report: RoundReport) -> None:
        self._telling = fragment
        try:
            self._tell(report)
        finally:
            self._telling = None

    def _take_digest(self, round: int) -> None:
        fragment = self._telling
        if fragment is not None:
            self.digests.take(round, fragment.part.named(), lambda: fragment.lineage)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See SyncedOptimizer."""
        self._asked = self._asked or threading.get_ident() != self._thread
        return super().snapshot()

    def _snapshot_meta(self) -> dict[str, Any]:
        flights = [fragment.flight for fragment in self._flying() if fragment.flight is not None]
        missing = [flight.key.index for flight in flights if flight.report is None and not flight.applied]
        meta: dict[str, Any] = {
            "lineages": [fragment.lineage for fragment in self._fragments],
            "missing": missing,
            "next_round": self.round,
            "launched": max(fragment.synced_step for fragment in self._fragments),
        }
        if missing:
            # Whoever cannot observe a round any more does the window before it again.
            meta["round"] = missing[0]
            if self._count == 1:
                meta["step"], meta["window"] = self._synced_before
        return meta

    def _check_meta(self, meta: Mapping[str, Any]) -> None:
        lineages, missing = meta.get("lineages"), meta.get("missing")
        if not isinstance(lineages, list) or len(lineages) != self._count:
            raise ValueError(f"the snapshot is not of {self._count} fragments")
        for lineage in lineages:
            read_lineage(lineage)
        counts = [meta.get("next_round"), meta.get("launched"), *(missing if isinstance(missing, list) else [None])]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"next_round, launched and missing must be counts, got {counts}"[:200])
        if len(counts) - 2 > self._count:
            raise ValueError(f"{len(counts) - 2} rounds are missing, of {self._count} fragments")

    def _start_over(self, meta: Mapping[str, Any]) -> None:
        for fragment, lineage in zip(self._fragments, meta["lineages"], strict=True):
            if fragment.flight is not None and fragment.flight.pending is not None:
                fragment.flight.pending.cancel()
            fragment.flight, fragment.others, fragment.lineage = None, None, lineage
            fragment.synced_step = self.step_count
            fragment.forget()
        self._missing, self._next_round, self._launched_step = meta["missing"], meta["next_round"], meta["launched"]
        self._synced_before = (self._synced_step, self._window)

    # -- state_dict --------------------------------------------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        return {
            "fragments": [
                {name: getattr(fragment, name) for name in _NUMBERS}
                | {name: [tensor.clone() for tensor in getattr(fragment, name)] for name in _LISTS}
                | {"flight": None if fragment.flight is None else fragment.flight.state()}
                for fragment in self._fragments
            ],
            "synced_before": list(self._synced_before),
        }

    def _check_own_state(self, state: Mapping[str, Any]) -> None:
        if len(state.get("fragments", [])) != self._count:
            raise ValueError(f"the state is of {len(state.get('fragments', []))} fragments, this run has {self._count}")

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            for name in _NUMBERS:
                setattr(fragment, name, saved[name])
            held = fragment.part.tensors
            for name in _LISTS:
                found = [t.to(like.device, copy=True) for t, like in zip(saved[name], held, strict=False)]
                setattr(fragment, name, found)
            fragment.flight = None if saved["flight"] is None else Flight.of(saved["flight"], held)
        self._synced_before = (state["synced_before"][0], state["synced_before"][1])
