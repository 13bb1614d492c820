"""StatefulOptimizer: what a strategy shares with others and what it resumes from: anchor, snapshots, state_dict."""

import json
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from swarmkit.optim.agreement import Digests
from swarmkit.optim.anchor import Anchor
from swarmkit.optim.averaging import Adaptive, Averaging, Expecting, PlainAveraging, TensorChoice
from swarmkit.optim.collective import Collective
from swarmkit.optim.snapshot import (
    ANCESTORS,
    check_form,
    inner_tensors,
    load_inner_tensors,
    read_ancestors,
    read_inner_state,
    read_lineage,
    read_progress,
    sort_by_kind,
    take,
)

_COUNTERS = (
    "round",
    "step_count",
    "_synced_step",
    "_window",
    "_paced",
    "samples",
    "_unsent_steps",
    "needs_state",
    "lineage",
)


class StatefulOptimizer(torch.optim.Optimizer):
    """The state of a `SyncedOptimizer`: what all members agree on, and what only this one has."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        collective: Collective,
        averaging: Averaging | None = None,
        names: Mapping[Tensor, str] | None = None,
        buffers: Sequence[Tensor] = (),
        offload: torch.device | str | None = None,
    ) -> None:
        """See SyncedOptimizer."""
        self.inner = inner
        self.collective = collective
        self.averaging: Averaging = averaging if averaging is not None else PlainAveraging(collective)
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self.state = inner.state
        self._names = names
        self._offload = torch.device(offload) if offload is not None else None
        self._buffers = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._lock = threading.RLock()
        self.digests = Digests(self._lock)
        self.round = 0
        self.lineage = ""  # hash chain over the rounds whose results this peer holds
        self.step_count = 0
        self.samples = 0.0
        self._unsent_steps = 0  # since the last round that took what this peer had
        self.needs_state = False
        self._past: deque[str] = deque(maxlen=ANCESTORS)  # lineages after the last rounds, this one's included
        self._synced_step = 0  # step_count at the last closed or failed round
        self._window: int | None = None  # H of the running window; None until its first step
        self._paced = (0, 0)  # with a pace: the step that a window began at, and this replica's own steps in it
        if not any(True for _ in self.parameters()):
            raise ValueError("no parameter has requires_grad=True: there is nothing to train, and nothing to average")
        self._adopt_parameters()

    # -- what a strategy defines -------------------------------------------------------------------------------------

    def _outer_tensors(self) -> dict[str, Tensor]:
        """Outer state by name, for snapshots."""
        return {}

    def _check_outer(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError naming what of a snapshot's outer state does not fit."""
        if tensors:
            raise ValueError(f"unknown outer state {sorted(tensors)[:3]}")

    def _load_outer(self, tensors: Mapping[str, Tensor]) -> None:
        """Adopt outer state that `_check_outer` has passed."""

    # -- the anchor --------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[Tensor]:
        """The trainable parameters, each once, in order."""
        seen: set[int] = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def _adopt_parameters(self) -> None:
        """Make the present parameters the anchor."""
        self._anchor = Anchor(list(self.parameters()), names=self._names, offload=self._offload)

    def anchor(self) -> dict[str, Tensor]:
        """What all members agreed on last, by parameter name: views, not to be written to."""
        return self._anchor.named()

    def digest(self) -> str:
        """Fingerprint of the anchor: equal on two peers exactly when the anchors are."""
        with self._lock:
            return self._anchor.digest()

    # -- snapshots: what is shared -----------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A consistent copy of the shared state, for a joiner or a checkpoint that any number of peers can resume.

        It holds the anchor, the outer state, buffers and, as a good start for a joiner's own, the inner state. Safe to
        call from another thread; training goes on while a round is waited for.
        """
        with self._lock:
            tensors = {f"anchor/{name}": take(tensor) for name, tensor in self.anchor().items()}
            tensors |= {f"outer/{name}": take(tensor) for name, tensor in self._outer_tensors().items()}
            tensors |= {f"buffer/{i}": take(buffer) for i, buffer in enumerate(self._buffers)}
            inner, numbers = inner_tensors(self.inner, self._anchor.named_parameters())
            tensors |= {f"inner/{name}": tensor for name, tensor in inner.items()}
            meta = {
                "strategy": type(self).__name__,
                "round": self.round,
                "lineage": self.lineage,
                "step": self._synced_step,
                "window": self._window,
                "inner": numbers,
                "ancestors": list(self._past),
                "averaging": [averaging.shared_state() for averaging in self._averagings()],
                **self._snapshot_meta(),
            }
        return tensors, meta

    def version(self) -> str:
        """Names the shared state that a snapshot would hold now, without the cost of one."""
        with self._lock:
            return json.dumps([self.round, self.lineage, self._synced_step, self._window, self._snapshot_meta()])

    def _snapshot_meta(self) -> dict[str, Any]:
        """What a strategy adds to a snapshot's numbers; called under the lock."""
        return {}

    def _check_meta(self, meta: Mapping[str, Any]) -> None:
        """Raise ValueError naming what of `_snapshot_meta` does not fit; it came from another peer."""

    def load_snapshot(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Adopt a snapshot whole, or raise ValueError naming what does not fit and change nothing."""
        if meta.get("strategy") != type(self).__name__:
            raise ValueError(f"the snapshot is of strategy {meta.get('strategy')}, this is {type(self).__name__}")
        parts = sort_by_kind(tensors)
        check_form("anchor", parts["anchor"], self.anchor())
        check_form("buffer", parts["buffer"], {str(i): buffer for i, buffer in enumerate(self._buffers)})
        self._check_outer(parts["outer"])
        self._check_meta(meta)
        named, numbers = self._anchor.named_parameters(), meta.get("inner") or {}
        read_inner_state(named, parts["inner"], numbers)
        round, step, window = read_progress(meta)
        ancestors = read_ancestors(meta.get("ancestors", []))
        lineage = read_lineage(meta.get("lineage", ""))
        self._load_shared(meta.get("averaging", []))
        with self._lock, torch.no_grad():
            self._load_outer(parts["outer"])
            load_inner_tensors(self.inner, named, parts["inner"], numbers)
            self._anchor.assign([parts["anchor"][name] for name in self._anchor.names])
            self._anchor.restore()
            for i, buffer in enumerate(self._buffers):
                buffer.copy_(parts["buffer"][str(i)])
            self.round, self.step_count, self._synced_step, self._window = round, step, step, window
            self._paced = (step, 0)
            self.lineage = lineage
            self._past = deque(ancestors, ANCESTORS)
            self.samples, self._unsent_steps = 0.0, 0
            self.needs_state = False
            self.digests.forget()
            self._start_over(meta)

    def _load_shared(self, states: object) -> None:
        averagings = self._averagings()
        fits = isinstance(states, list) and len(states) == len(averagings)
        if not (fits and all(isinstance(state, Mapping) for state in cast(list[object], states))):
            raise ValueError(f"the snapshot's averaging is not a list of {len(averagings)} states")
        self._tell_shapes()
        before = [averaging.shared_state() for averaging in averagings]
        try:
            for averaging, state in zip(averagings, cast(list[Mapping[str, Any]], states), strict=True):
                averaging.load_shared_state(state)
        except ValueError:
            for averaging, state in zip(averagings, before, strict=True):
                averaging.load_shared_state(state)
            raise

    def _tell_shapes(self) -> None:
        """Let each averaging know what it will be given: states that come from elsewhere are checked against that."""
        parameters = self._anchor.named_parameters()
        for averaging, names in zip(self._averagings(), self._names_sent(), strict=True):
            if isinstance(averaging, Expecting):
                averaging.expect([parameters[name] for name in names])

    def _start_over(self, meta: Mapping[str, Any]) -> None:
        """Drop what belongs to parameters that a snapshot has just replaced; called under the lock."""

    # -- state_dict: all that this peer has --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All but the parameters: the inner optimizer's own, and under "synced" what a strategy adds to it.

        Resumes bit-exactly, in the middle of a window too.
        """
        with self._lock:
            synced = {
                "anchor": [tensor.clone() for tensor in self._anchor.tensors],
                "outer": {name: tensor.clone() for name, tensor in self._outer_tensors().items()},
                "averaging": [averaging.state_dict() for averaging in self._averagings()],
                "ancestors": list(self._past),
                "counters": {name: getattr(self, name) for name in _COUNTERS},
                **self._own_state(),
            }
            return {**self.inner.state_dict(), "synced": synced}

    def allocations(self) -> list[TensorChoice]:
        """What an adaptive codec (L-GreCo) sends each parameter with, by name; empty before it has chosen."""
        return [
            replace(row, tensor=names[int(row.tensor)])
            for averaging, names in zip(self._averagings(), self._names_sent(), strict=True)
            if isinstance(averaging, Adaptive)
            for row in averaging.table
        ]

    def _names_sent(self) -> list[list[str]]:
        """Names of the parameters that each averaging gets."""
        return [self._anchor.names]

    def _averagings(self) -> list[Averaging]:
        """Every averaging that this strategy uses, in a fixed order."""
        return [self.averaging]

    def _own_state(self) -> dict[str, Any]:
        """What a strategy adds to "synced"; called under the lock."""
        return {}

    def _check_own_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError naming what of `_own_state` does not fit."""

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        """Adopt what `_own_state` gave, out of "synced"; called under the lock."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adopt a `state_dict`; the parameters come from the model's own."""
        if "synced" not in state_dict:
            raise ValueError("the state is of a bare optimizer: load it into the inner one")
        synced = state_dict["synced"]
        if len(synced["anchor"]) != len(self._anchor.names):
            raise ValueError(
                f"state of {len(synced['anchor'])} parameters, this optimizer has {len(self._anchor.names)}"
            )
        check_form("anchor", dict(zip(self._anchor.names, synced["anchor"], strict=True)), self.anchor())
        self._check_outer(synced["outer"])
        self._check_own_state(synced)
        ancestors = read_ancestors(synced["ancestors"])
        averagings = self._averagings()
        if len(synced["averaging"]) != len(averagings):
            raise ValueError(f"state of {len(synced['averaging'])} averagings, this optimizer has {len(averagings)}")
        self._tell_shapes()
        with self._lock:
            for averaging, state in zip(averagings, synced["averaging"], strict=True):
                averaging.load_state_dict(state)
            self.inner.load_state_dict({name: value for name, value in state_dict.items() if name != "synced"})
            self.param_groups = self.inner.param_groups
            self.state = self.inner.state
            self._anchor.assign(synced["anchor"])
            self._load_outer(synced["outer"])
            for name in _COUNTERS:
                setattr(self, name, synced["counters"][name])
            self._past = deque(ancestors, ANCESTORS)
            self._load_own_state(synced)
            self.digests.forget()
