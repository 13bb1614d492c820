"""SyncedOptimizer: the base that every strategy shares, an ordinary torch optimizer that meets its peers in rounds."""

import copy
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from swarmkit.optim.agreement import EVERY_ROUNDS
from swarmkit.optim.anchor import Anchor
from swarmkit.optim.averaging import Averaging, PlainAveraging
from swarmkit.optim.collective import Collective, Reduced, RoundKey
from swarmkit.optim.compression.codec import Codec
from swarmkit.optim.compression.compressed import CompressedAveraging
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.norms import all_finite
from swarmkit.optim.offer import Offer, can_be_sent, not_finite
from swarmkit.optim.options import check_options, signature
from swarmkit.optim.pace import Pace
from swarmkit.optim.round_report import RoundReport
from swarmkit.optim.schedule import Every, Schedule
from swarmkit.optim.snapshot import drop_broken_state
from swarmkit.optim.stateful import StatefulOptimizer

__all__ = ["Closure", "RoundReport", "SyncedOptimizer", "next_lineage", "parameter_names"]

Closure = Callable[[], Any]


def next_lineage(lineage: str, key: RoundKey, id: str) -> str:
    """The hash chain after the round `key` that closed under `id`."""
    link = f"{lineage}|{key}|{id}"
    return hashlib.blake2b(link.encode(), digest_size=16).hexdigest()


def first_lineage(form: str, anchor: Anchor) -> str:
    """The hash chain before any round: members must begin with equal parameters and outer steps."""
    return hashlib.blake2b(f"{form}|{anchor.digest()}".encode(), digest_size=16).hexdigest()


class SyncedOptimizer(StatefulOptimizer):
    """Wraps an inner optimizer and synchronises with the other replicas when the schedule says so.

    It shares the inner optimizer's parameter groups and state, so learning-rate schedulers, gradient clipping,
    closures and `torch.amp.GradScaler` work on it as on any optimizer. A failed round never raises: nothing of it is
    applied, the local work is kept and offered again in the next round, and `on_round` hears why. Frozen parameters
    (`requires_grad=False`) are neither sent nor kept.
    """

    # GradScaler then calls step() on overflow too, so that this peer still comes to the round it is expected in.
    _step_supports_amp_scaling = True
    round_name: ClassVar[str]
    _not_here: ClassVar[Mapping[str, str]] = {}  # options that other strategies have, and why this one has not

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__signature__ = signature(cls)  # type: ignore[attr-defined]

    def __new__(cls, *arguments: object, **options: object) -> Self:
        """Refuse an option that there is not, and name the nearest one."""
        check_options(cls, options, cls._not_here)
        return super().__new__(cls)

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        collective: Collective,
        averaging: Averaging | None = None,
        compression: Codec | None = None,
        sync: Schedule | None = None,
        pace: Pace | None = None,
        names: Mapping[Tensor, str] | None = None,
        buffers: Sequence[Tensor] = (),
        offload: torch.device | str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Wrap `inner`.

        `sync` says how long windows are, and `pace` whose steps fill them; without one it is this replica's own.
        `compression` is the codec that what is averaged is sent through, with error feedback where the codec shrinks
        errors (`Codec.contractive`); without one it is sent as it is. For other ways, as L-GreCo, give the `averaging`
        itself. `names` maps parameters to
        the names that snapshots and error messages use (see `parameter_names`); `buffers` are floating-point tensors,
        like BatchNorm statistics, that each round averages as they are; `offload` names the device that holds the
        anchor and the outer state, and `clock` tells the seconds for reports.
        """
        self._clock = clock
        if compression is not None:
            if averaging is not None:
                raise ValueError("compression: give a codec, or an averaging that has one, not both")
            averaging = CompressedAveraging(compression, collective, error_feedback=compression.contractive)
        self.sync: Schedule = sync if sync is not None else Every(1)
        self.pace = pace
        self.on_round: list[Callable[[RoundReport], None]] = []
        self.last_report: RoundReport | None = None
        super().__init__(
            inner, collective=collective, averaging=averaging, names=names, buffers=buffers, offload=offload
        )

    # -- what a strategy defines -------------------------------------------------------------------------------------

    def _contribution(self, observe: bool) -> list[Tensor]:
        """What this peer offers to a round; zeros of the same shapes when it only observes."""
        raise NotImplementedError

    def _exact_contribution(self, observe: bool) -> list[Tensor]:
        """What of it no codec may touch, buffers aside."""
        return []

    def _apply(self, mean: list[Tensor], exact: list[Tensor]) -> float:
        """Apply a round's means and return the L2 norm of the averaged update; called under the lock."""
        raise NotImplementedError

    @property
    def is_plain(self) -> bool:
        """True when no codec compresses what is sent."""
        return isinstance(self.averaging, PlainAveraging)

    # -- an ordinary optimizer ---------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """Learning rate of the first group, which schedules look at."""
        return float(self.param_groups[0]["lr"])

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
        self._unsent_steps += 1
        self._count_step()
        self._meet_if_due()
        return loss

    def _count_step(self) -> None:
        """Count an inner step that was just taken, in the swarm's steps where there is a pace."""
        if self.pace is None:
            self.step_count += 1
            return
        start, done = self._paced
        done = done + 1 if start == self._synced_step else 1
        self._paced = (self._synced_step, done)
        due = self._synced_step + self._next_meeting()
        step = self.pace.advance(self._synced_step, done, due)
        self.step_count = max(self.step_count, min(step, due))

    def _next_meeting(self) -> int:
        """How many steps after the start of the running window the next round begins."""
        assert self._window is not None
        return self._window

    def _meet_if_due(self) -> None:
        """Synchronise if the step that was just taken ends a window."""
        if self.step_count - self._synced_step >= self._next_meeting():
            self._synchronise()

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

    def rejoin(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> float:
        """Adopt a snapshot as `load_snapshot` does, and take along what this peer did since its own anchor.

        That work counts from an anchor that the others have left k rounds ago, so 1 / (1 + k) of it is kept, and of its
        weight; the inner optimizer's state stays this peer's own. Returns that share. It is 0, and nothing is kept,
        when this peer's past is not the snapshot's (a partition, another run), when rounds overlap, or when the codec
        lacks what the others share. Bring the work in with `observe_round(contribute=True)`.
        """
        work, lineage = self._local_work(), self._present_lineage()
        samples, steps = self._unsent()
        if work is None or not steps or not all_finite(work):
            self.load_snapshot(tensors, meta)
            return 0.0
        inner = copy.deepcopy(self.inner.state_dict())
        self.load_snapshot(tensors, meta)
        if lineage not in self._past or self.averaging.is_behind:
            return 0.0
        share = 1.0 / (len(self._past) - list(self._past).index(lineage))
        with self._lock, torch.no_grad():
            self.inner.load_state_dict(inner)
            self.param_groups, self.state = self.inner.param_groups, self.inner.state
            parameters = self._anchor.parameters
            torch._foreach_add_(parameters, [w.to(p) for w, p in zip(work, parameters, strict=True)], alpha=share)
            self._resend(share * samples, max(1, round(share * steps)))
        return share

    def _local_work(self) -> list[Tensor] | None:
        """How far the parameters have come from the anchor; None when that is not all that this peer has of its own."""
        return list(torch._foreach_sub(self._anchor.local(), self._anchor.rounded()))

    def _present_lineage(self) -> str:
        """The hash chain over the rounds that the anchor holds."""
        return self.lineage

    def _unsent(self) -> tuple[float, int]:
        """Samples and steps behind the local work."""
        return self.samples, self._unsent_steps

    def _resend(self, samples: float, steps: int) -> None:
        """Count local work that survived a change of the anchor."""
        self.samples, self._unsent_steps = samples, steps

    @property
    def lacks_rounds(self) -> bool:
        """True when the snapshot that was loaded last was taken while rounds were under way: observe those first."""
        return False

    def observe_round(self, *, contribute: bool = False) -> None:
        """Take part in the current round and adopt its result, after `load_snapshot`.

        Without contributing, unless `rejoin` has kept something that is to be. The step count then is that of the
        others. Raises RoundFailed when the round gave no result.
        """
        if self._window is None:
            self._window = self.sync.next_window(self._synced_step, self.lr)
        self.step_count = self._synced_step + self._window
        report = self._synchronise(observe=not contribute)
        if report.failed is not None:
            raise RoundFailed(report.failed, missed=report.missed)

    def _synchronise(self, observe: bool = False) -> RoundReport:
        offer = self._offer(observe)
        report = RoundReport(
            round=self.round, step=self.step_count, window=self.step_count - self._synced_step, weight=offer.weight
        )
        try:
            lineage = self._begun_lineage()
            key = RoundKey(self.round_name, self.round, lineage, self.digests.of(lineage))
            started = self._clock()
            pending = self.averaging.begin(offer.tensors, offer.exact, round=key, weight=offer.weight)
            report = replace(report, exposed=self._clock() - started)  # the codec's share, before the round
            reduced = pending.result()
        except RoundFailed as error:
            with self._lock:
                self._on_failure(offer)
                if offer.trouble is not None:
                    self._discard()
                self._close_window()
            if error.diverged:
                self.digests.note_outcome(diverged=True)
            report = replace(report, failed=offer.trouble or error.reason, missed=error.missed, diverged=error.diverged)
            self.needs_state = self.needs_state or error.missed
        else:
            report = self._on_success(key, reduced, report, offer)
        self._tell(report)
        return report

    def _begun_lineage(self) -> str:
        if not self.lineage:
            self.lineage = first_lineage(self._form(), self._anchor)
        return self.lineage

    def _form(self) -> str:
        """What members must have alike besides parameters, or they would drift apart though all rounds close."""
        return type(self).__name__

    def _tell(self, report: RoundReport) -> None:
        self.last_report = report
        if report.failed is None and not report.missed:
            self._past.append(self._present_lineage())
        if report.members and (report.window > 1 or report.round % EVERY_ROUNDS == 0):
            self._take_digest(report.round)
        for callback in self.on_round:
            callback(report)

    def _take_digest(self, round: int) -> None:
        """Find out what digest the anchor has after a round, for the next round's hello and for the others."""
        self.digests.take(round, self.anchor(), lambda: self.lineage)

    def _offer(self, observe: bool) -> Offer:
        """This peer's contribution and weight; values that are not finite are never sent."""
        tensors, exact = self._contribution(observe), self._exact_contribution(observe)
        if observe:
            return Offer(tensors, exact + [torch.zeros_like(b) for b in self._buffers])
        exact = exact + self._buffers
        if can_be_sent(tensors, exact, coded=not self.is_plain):
            return Offer(tensors, exact, self._weight())
        return Offer.of_zeros(tensors, exact, not_finite("values", self.collective.peer_id))

    def _weight(self) -> float:
        """Samples behind the contribution; steps, when nobody counts samples."""
        return self.samples if self.samples > 0 else float(self._unsent_steps)

    def _on_success(self, key: RoundKey, reduced: Reduced, report: RoundReport, offer: Offer) -> RoundReport:
        if key.digest:
            self.digests.note_outcome(diverged=False)
        split, end = len(offer.tensors), len(reduced.tensors) - len(self._buffers)
        with self._lock, torch.no_grad():
            norm = self._apply(reduced.tensors[:split], reduced.tensors[split:end])
            if self._buffers:
                torch._foreach_copy_(self._buffers, reduced.tensors[end:])
            if offer.trouble is not None:
                drop_broken_state(self.inner)
            self.samples, self._unsent_steps = 0.0, 0
            # Under the same lock as the new anchor: a snapshot must not pair it with the old round's number.
            self.lineage = next_lineage(self.lineage, key, reduced.id)
            self._close_window()
        return report.closed(
            reduced, exposed=report.exposed + reduced.seconds, pseudo_gradient_norm=norm, failed=offer.trouble
        )

    def _on_failure(self, offer: Offer) -> None:
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


def parameter_names(model: torch.nn.Module) -> dict[Tensor, str]:
    """Names of a model's parameters for `SyncedOptimizer(names=...)`; a tied parameter has its first name."""
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(parameter, name)
    return names
