"""SyncedOptimizer: the base that every strategy shares, an ordinary torch optimizer that meets its peers in rounds."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from swarmkit.optim.anchor import Anchor
from swarmkit.optim.collective import Collective, Reduced, RoundKey
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.norms import all_finite
from swarmkit.optim.round_report import RoundReport
from swarmkit.optim.schedule import Every, Schedule
from swarmkit.optim.snapshot import (
    check_form,
    drop_broken_state,
    inner_tensors,
    load_inner_tensors,
    read_inner_state,
    read_progress,
    sort_by_kind,
    take,
)

__all__ = ["Closure", "RoundReport", "SyncedOptimizer", "parameter_names"]

Closure = Callable[[], Any]
_COUNTERS = ("round", "step_count", "_synced_step", "_window", "samples", "_unsent_steps", "needs_state", "lineage")


class SyncedOptimizer(torch.optim.Optimizer):
    """Wraps an inner optimizer and synchronises with the other replicas when the schedule says so.

    It shares the inner optimizer's parameter groups and state, so learning-rate schedulers, gradient clipping,
    closures and `torch.amp.GradScaler` work on it as on any optimizer. A failed round never raises: nothing of it is
    applied, the local work is kept and offered again in the next round, and `on_round` hears why. Frozen parameters
    (`requires_grad=False`) are neither sent nor kept.
    """

    # GradScaler then calls step() on overflow too, so that this peer still comes to the round it is expected in.
    _step_supports_amp_scaling = True
    round_name: ClassVar[str]

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        collective: Collective,
        sync: Schedule | None = None,
        names: Mapping[Tensor, str] | None = None,
        buffers: Sequence[Tensor] = (),
        offload: torch.device | str | None = None,
    ) -> None:
        """Wrap `inner`.

        `names` maps parameters to the names that snapshots and error messages use (see `parameter_names`);
        `buffers` are floating-point tensors, like BatchNorm statistics, that each round averages as they are;
        `offload` names the device that holds the anchor and the outer state.
        """
        self.inner = inner
        self.collective = collective
        self.sync: Schedule = sync if sync is not None else Every(1)
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self.state = inner.state
        self._names = names
        self._offload = torch.device(offload) if offload is not None else None
        self._buffers = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._lock = threading.RLock()
        self.round = 0
        self.lineage = ""  # hash chain over the rounds whose results this peer holds
        self.step_count = 0
        self.samples = 0.0
        self._unsent_steps = 0  # since the last round that took what this peer had
        self.needs_state = False
        self.on_round: list[Callable[[RoundReport], None]] = []
        self.last_report: RoundReport | None = None
        self._synced_step = 0  # step_count at the last closed or failed round
        self._window: int | None = None  # H of the running window; None until its first step
        self._adopt_parameters()

    # -- what a strategy defines -------------------------------------------------------------------------------------

    def _contribution(self, observe: bool) -> list[Tensor]:
        """What this peer offers to a round; zeros of the same shapes when it only observes."""
        raise NotImplementedError

    def _apply(self, mean: list[Tensor]) -> float:
        """Apply a round's mean and return the L2 norm of the averaged update; called under the lock."""
        raise NotImplementedError

    def _outer_tensors(self) -> dict[str, Tensor]:
        """Outer state by name, for snapshots."""
        return {}

    def _check_outer(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError naming what of a snapshot's outer state does not fit."""
        if tensors:
            raise ValueError(f"unknown outer state {sorted(tensors)[:3]}")

    def _load_outer(self, tensors: Mapping[str, Tensor]) -> None:
        """Adopt outer state that `_check_outer` has passed."""

    # -- an ordinary optimizer ---------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """Learning rate of the first group, which schedules look at."""
        return float(self.param_groups[0]["lr"])

    def parameters(self) -> Iterator[Tensor]:
        """The trainable parameters, each once, in order."""
        seen: set[int] = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, before the first step only: the members' payloads must stay alike."""
        if not hasattr(self, "round"):
            super().add_param_group(param_group)
            return
        if self.step_count:
            raise ValueError("parameters can only be added before the first step: peers must agree on the payload")
        self.inner.add_param_group(param_group)
        self._adopt_parameters()

    def step(self, closure: Closure | None = None) -> Any:  # noqa: ANN401 - as in torch: what the closure returns
        """Take one inner step, and synchronise when the window is full."""
        if self._window is None:
            self._window = self.sync.next_window(self.step_count, self.lr)
        loss = self._inner_step(closure)
        self.step_count += 1
        self._unsent_steps += 1
        if self.step_count - self._synced_step >= self._window:
            self._synchronise()
        return loss

    def _inner_step(self, closure: Closure | None) -> Any:  # noqa: ANN401
        if not self._unscale():
            return None
        # A closure too runs under the lock: optimizers such as LBFGS change parameters between its calls.
        with self._lock:
            return self.inner.step(closure) if closure is not None else self.inner.step()

    def _unscale(self) -> bool:
        """Undo GradScaler's scale where it has not; False when this step's gradients overflowed."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return True
        if found_inf.item() > 0:
            return False
        scale = getattr(self, "grad_scale", None)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if scale is not None and gradients:
            torch._foreach_mul_(gradients, 1.0 / scale.item())
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)

    # -- rounds ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Synchronise what no round has taken yet; nothing happens right after a round.

        A peer that was left behind offers nothing: what it has counts from an anchor that the others no longer hold.
        """
        if self._unsent_steps > 0 and not self.needs_state:
            self._synchronise()

    def observe_round(self) -> None:
        """Take part in the current round without contributing and adopt its result, after `load_snapshot`.

        The step count then is that of the others. Raises RoundFailed when the round gave no result.
        """
        if self._window is None:
            self._window = self.sync.next_window(self._synced_step, self.lr)
        self.step_count = self._synced_step + self._window
        report = self._synchronise(observe=True)
        if report.failed is not None:
            raise RoundFailed(report.failed, missed=report.missed)

    def _synchronise(self, observe: bool = False) -> RoundReport:
        contribution, weight, trouble = self._offer(observe)
        report = RoundReport(
            round=self.round, step=self.step_count, window=self.step_count - self._synced_step, weight=weight
        )
        try:
            key = RoundKey(self.round_name, self.round, self.lineage)
            reduced = self.collective.all_reduce(contribution, round=key, weight=weight).result()
        except RoundFailed as error:
            with self._lock:
                self._on_failure(contribution, weight)
                if trouble is not None:
                    self._discard()
                self._close_window()
            report = replace(report, failed=trouble or error.reason, missed=error.missed)
            self.needs_state = self.needs_state or error.missed
        else:
            report = self._on_success(reduced, report, trouble)
        self.last_report = report
        for callback in self.on_round:
            callback(report)
        return report

    def _offer(self, observe: bool) -> tuple[list[Tensor], float, str | None]:
        """This peer's contribution and weight; values that are not finite are never sent."""
        if observe:
            return self._contribution(observe=True) + [torch.zeros_like(b) for b in self._buffers], 0.0, None
        contribution = self._contribution(observe=False) + self._buffers
        if all_finite(contribution):
            return contribution, self._weight(), None
        trouble = f"values on peer {self.collective.peer_id} are not finite: it contributed nothing"
        return [torch.zeros_like(tensor) for tensor in contribution], 0.0, trouble

    def _weight(self) -> float:
        """Samples behind the contribution; steps, when nobody counts samples."""
        return self.samples if self.samples > 0 else float(self._unsent_steps)

    def _on_success(self, reduced: Reduced, report: RoundReport, trouble: str | None) -> RoundReport:
        split = len(reduced.tensors) - len(self._buffers)
        with self._lock, torch.no_grad():
            norm = self._apply(reduced.tensors[:split])
            if self._buffers:
                torch._foreach_copy_(self._buffers, reduced.tensors[split:])
            if trouble is not None:
                drop_broken_state(self.inner)
            self.samples, self._unsent_steps = 0.0, 0
            # Under the same lock as the new anchor: a snapshot must not pair it with the old round's number.
            link = f"{self.lineage}|{self.round_name}/{self.round}|{reduced.id}"
            self.lineage = hashlib.blake2b(link.encode(), digest_size=16).hexdigest()
            self._close_window()
        return replace(
            report,
            members=reduced.members,
            bytes_sent=reduced.bytes_sent,
            bytes_received=reduced.bytes_received,
            seconds=reduced.seconds,
            waited=reduced.waited,
            pseudo_gradient_norm=norm,
            failed=trouble,
        )

    def _on_failure(self, contribution: list[Tensor], weight: float) -> None:
        """Keep what a failed round did not take; parameters that drift on need nothing."""

    def _discard(self) -> None:
        """Throw away local work that is not finite: no later round could take it."""
        self._anchor.restore()
        drop_broken_state(self.inner)
        self.samples, self._unsent_steps = 0.0, 0

    def _close_window(self) -> None:
        self._window = None
        self._synced_step = self.step_count
        self.round += 1

    # -- the anchor --------------------------------------------------------------------------------------------------

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

    # -- snapshots and state -----------------------------------------------------------------------------------------

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
            }
        return tensors, meta

    def load_snapshot(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Adopt a snapshot whole, or raise ValueError naming what does not fit and change nothing."""
        if meta.get("strategy") != type(self).__name__:
            raise ValueError(f"the snapshot is of strategy {meta.get('strategy')}, this is {type(self).__name__}")
        parts = sort_by_kind(tensors)
        check_form("anchor", parts["anchor"], self.anchor())
        check_form("buffer", parts["buffer"], {str(i): buffer for i, buffer in enumerate(self._buffers)})
        self._check_outer(parts["outer"])
        named, numbers = self._anchor.named_parameters(), meta.get("inner") or {}
        read_inner_state(named, parts["inner"], numbers)
        round, step, window = read_progress(meta)
        lineage = meta.get("lineage", "")
        if not isinstance(lineage, str) or len(lineage) > 64:
            raise ValueError(f"lineage {str(lineage)[:80]!r} is not a hash")
        with self._lock, torch.no_grad():
            self._load_outer(parts["outer"])
            load_inner_tensors(self.inner, named, parts["inner"], numbers)
            self._anchor.assign([parts["anchor"][name] for name in self._anchor.names])
            self._anchor.restore()
            for i, buffer in enumerate(self._buffers):
                buffer.copy_(parts["buffer"][str(i)])
            self.round, self.step_count, self._synced_step, self._window = round, step, step, window
            self.lineage = lineage
            self.samples, self._unsent_steps = 0.0, 0
            self.needs_state = False

    def state_dict(self) -> dict[str, Any]:
        """All but the parameters: the inner optimizer's own, and under "synced" what a strategy adds to it.

        Resumes bit-exactly, in the middle of a window too.
        """
        with self._lock:
            synced = {
                "anchor": [tensor.clone() for tensor in self._anchor.tensors],
                "outer": {name: tensor.clone() for name, tensor in self._outer_tensors().items()},
                "counters": {name: getattr(self, name) for name in _COUNTERS},
            }
            return {**self.inner.state_dict(), "synced": synced}

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
        with self._lock:
            self.inner.load_state_dict({name: value for name, value in state_dict.items() if name != "synced"})
            self.param_groups = self.inner.param_groups
            self.state = self.inner.state
            self._anchor.assign(synced["anchor"])
            self._load_outer(synced["outer"])
            for name in _COUNTERS:
                setattr(self, name, synced["counters"][name])


def parameter_names(model: torch.nn.Module) -> dict[Tensor, str]:
    """Names of a model's parameters for `SyncedOptimizer(names=...)`; a tied parameter has its first name."""
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(parameter, name)
    return names
