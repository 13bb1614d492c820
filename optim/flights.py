"""FlyingOptimizer: how a fragment's round begins, ends and reaches the anchor and then the parameters."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim.collective import Reduced, RoundKey
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.flight import Flight
from swarmkit.optim.fragmented import FragmentedOptimizer
from swarmkit.optim.fragments import Fragment
from swarmkit.optim.lead import Lead
from swarmkit.optim.offer import Offer, can_be_sent, not_finite
from swarmkit.optim.round_report import RoundReport
from swarmkit.optim.synced import first_lineage, next_lineage


class FlyingOptimizer(FragmentedOptimizer):
    """Rounds in three steps: launch (offer), settle (the anchor takes the result), land (tell it and adopt it)."""

    _delay: int | None  # inner steps from launch to landing; None: until the fragment's next launch
    _mixing: float
    _lead: Lead

    # -- what a strategy defines -------------------------------------------------------------------------------------

    def _outer_step(self, fragment: Fragment, mean: list[Tensor], exact: list[Tensor]) -> float:
        """Move a fragment's anchor by a round's mean and return the norm of the update; called under the lock."""
        raise NotImplementedError

    def _offered(self, fragment: Fragment) -> list[Tensor]:
        """What is averaged; owned by the round."""
        return fragment.progress()

    def _report_fields(self) -> dict[str, Any]:
        """What a strategy adds to the report of the outer step it has just taken."""
        return {}

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _launch(self, fragment: Fragment, *, observe: bool = False) -> Flight:
        """Begin the next round with a fragment."""
        offer = self._make_offer(fragment, observe or fragment.observes)
        with self._lock:
            for other in self._fragments:
                other.samples += self.samples
            self.samples, self._unsent_steps = 0.0, 0
            if offer.trouble is not None:
                self._discard()
            elif not (observe or fragment.observes):
                offer.weight = fragment.samples if fragment.samples > 0 else float(fragment.steps)
            fragment.flight = Flight(
                key=self._key(fragment, self.round),
                offer=offer,
                step=self.step_count,
                window=self.step_count - fragment.synced_step,
                samples=fragment.samples,
                steps=fragment.steps,
            )
            fragment.samples, fragment.steps, fragment.kept, fragment.observes = 0.0, 0, [], False
            fragment.synced_step = self.step_count
            self._count_round()
        fragment.flight.begin(fragment.averaging, self._clock)
        return fragment.flight

    def _count_round(self) -> None:
        if self.round % self._count == 0:
            self._synced_before = (self._synced_step, self.step_count - self._synced_step)
            self._synced_step, self._window = self.step_count, None
        self.round += 1

    def _make_offer(self, fragment: Fragment, observe: bool) -> Offer:
        exact = self._exact_contribution(observe)
        if fragment.number == 0:
            exact = exact + [buffer.clone() for buffer in self._buffers]
        tensors = self._offered(fragment)
        if observe:
            return Offer.of_zeros(tensors, exact)
        if can_be_sent(tensors, exact, coded=not self.is_plain):
            return Offer(tensors, exact)
        return Offer.of_zeros(tensors, exact, not_finite("values", self.collective.peer_id))

    def _settle(self, fragment: Fragment) -> None:
        """Wait for a fragment's round and let its anchor take the result; parameters stay as they are."""
        flight = fragment.flight
        assert flight is not None
        if flight.report is not None:
            return
        flight.begin(fragment.averaging, self._clock)
        assert flight.pending is not None
        started = self._clock()
        report = RoundReport(round=flight.key.index, step=flight.step, window=flight.window, weight=flight.offer.weight)
        try:
            reduced = flight.pending.result()
        except RoundFailed as error:
            with self._lock:
                fragment.samples += flight.samples
                fragment.steps += flight.steps
                if self._delay is None and flight.offer.weight > 0:
                    fragment.kept = flight.offer.tensors
                self._on_failure(flight.offer)
                if error.diverged:
                    self.digests.note_outcome(diverged=True)
                failed = flight.offer.trouble or error.reason
                flight.report = replace(report, failed=failed, missed=error.missed, diverged=error.diverged)
            self.needs_state = self.needs_state or error.missed
        else:
            flight.report = self._take(fragment, flight, reduced, report)
        flight.exposed += self._clock() - started

    def _take(self, fragment: Fragment, flight: Flight, reduced: Reduced, report: RoundReport) -> RoundReport:
        if flight.key.digest:
            self.digests.note_outcome(diverged=False)
        split = len(flight.offer.tensors)
        end = len(reduced.tensors) - (len(self._buffers) if fragment.number == 0 else 0)
        with self._lock, torch.no_grad():
            norm = self._outer_step(fragment, reduced.tensors[:split], reduced.tensors[split:end])
            flight.buffers = reduced.tensors[end:]
            weights = dict(zip(reduced.members, reduced.weights, strict=True))
            # A contribution that was left out is no part of the mean, whatever it offered.
            own = weights.pop(self.collective.peer_id, 0.0)
            fragment.others = sum(weights.values())
            share = self._lead.share(own, fragment.others)
            fragment.carry = self._lead.carried(flight.offer.tensors, fragment.carry, share)
            # Under the same lock as the new anchor: a snapshot must not pair it with the old round's number.
            fragment.lineage = next_lineage(fragment.lineage, flight.key, reduced.id)
            if self._count == 1:
                self.lineage = fragment.lineage
            flight.applied = True
        more = self._report_fields()
        return report.closed(reduced, pseudo_gradient_norm=norm, failed=flight.offer.trouble, **more)

    def _land(self, fragment: Fragment) -> RoundReport:
        """End a fragment's round: tell it, and where it was not replaced by a newer start, adopt it."""
        self._settle(fragment)
        flight = fragment.flight
        assert flight is not None
        assert flight.report is not None
        with self._lock, torch.no_grad():
            fragment.flight = None
            if flight.applied:
                if flight.buffers:
                    torch._foreach_copy_(self._buffers, flight.buffers)
                if self._delay is not None:
                    self._mix(fragment)
        waited = min(flight.exposed, flight.report.seconds) if self._delay != 0 else flight.report.seconds
        report = replace(
            flight.report,
            step=self.step_count,
            exposed=flight.encoding + waited,
            overlap=1 - waited / flight.report.seconds if flight.report.seconds > 0 else 0.0,
        )
        self._tell_of(fragment, report)
        return report

    def _mix(self, fragment: Fragment) -> None:
        """Parameters <- mixing * parameters + (1 - mixing) * anchor."""
        part, mixing = fragment.part, self._mixing
        if mixing == 0:
            part.restore()
        elif mixing < 1:
            mixed = torch._foreach_mul(part.local(), mixing)
            torch._foreach_add_(mixed, part.tensors, alpha=1 - mixing)
            torch._foreach_copy_(part.parameters, mixed)

    def _key(self, fragment: Fragment, index: int) -> RoundKey:
        name = self.round_name if self._count == 1 else f"{self.round_name}-{fragment.number}-of-{self._count}"
        if not fragment.lineage:
            fragment.lineage = first_lineage(self._form(), fragment.part)
        return RoundKey(name, index, fragment.lineage, self.digests.of(fragment.lineage))

    def _restart(self, fragment: Fragment) -> None:
        """Count the progress from the parameters as they are now."""
        part = fragment.part
        pairs = zip(part.parameters, part.tensors, strict=True)
        fragment.start = [p.detach().to(held.device, copy=True) for p, held in pairs]

    def _discard(self) -> None:
        super()._discard()
        for fragment in self._fragments:
            fragment.samples, fragment.steps, fragment.kept = 0.0, 0, []
            if self._delay is None:
                self._restart(fragment)
