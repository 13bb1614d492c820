"""OverlappedOptimizer: rounds of pseudo-gradients that fly while training goes on, of a whole model or of fragments."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from swarmkit.optim.averaging import Averaging, PlainAveraging
from swarmkit.optim.collective import Collective
from swarmkit.optim.compression.codec import Codec
from swarmkit.optim.compression.compressed import CompressedAveraging
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.flights import FlyingOptimizer
from swarmkit.optim.fragments import Fragment
from swarmkit.optim.lead import Lead, LeadOf
from swarmkit.optim.options import Windows
from swarmkit.optim.partition import FragmentBy, layer_of, partition
from swarmkit.optim.synced import Closure

logger = logging.getLogger(__name__)
_UNEVEN = 1.5  # the largest fragment, beside an even share, from which it is worth a word


class OverlappedOptimizer(FlyingOptimizer):
    """The anchor moves by an outer step on each round's mean; how late that reaches the parameters is a choice.

    With `delay` 0 training waits for every round, with `delay` d the result is adopted d inner steps after the round
    began, and with None when the next round of the same fragment begins. In the last case the shared state (anchor and
    outer state, equal on all members) runs one round late, and a peer trains from it plus a term of its own: what the
    outer steps will have made of its own newest contributions, weighted by its share in the round or whole (`lead`).
    Only the shared state is evaluated, hashed, checkpointed for others and given to joiners.

    A round carries the lineage of its fragment's anchor when the round began, and begins only after the fragment's
    previous one has ended, so members agree on it however early each learnt of a result.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        outer_lr: float,
        outer_momentum: float,
        nesterov: bool,
        delay: int | None = 0,
        mixing: float = 0.0,
        lead: LeadOf = "nothing",
        fragments: int = 1,
        fragment_by: FragmentBy = "strided",
        staggered: bool = True,
        averaging_for: Callable[[int], Averaging] | None = None,
        **options: Unpack[Windows],
    ) -> None:
        """Wrap `inner`; see the strategies for what the options mean, and SyncedOptimizer for the others."""
        if not outer_lr >= 0:
            raise ValueError(f"outer_lr={outer_lr}: must not be negative")
        if not 0 <= outer_momentum < 1:
            raise ValueError(f"outer_momentum={outer_momentum}: must be at least 0 and below 1")
        if delay is not None and delay < 0:
            raise ValueError(f"overlap_steps={delay}: must not be negative")
        if not 0 <= mixing <= 1:
            raise ValueError(f"mixing={mixing}: must be between 0 (adopt the round) and 1 (keep the local parameters)")
        codec, compression = options.get("averaging"), options.get("compression")
        if averaging_for is not None and (codec is not None or compression is not None):
            raise ValueError("averaging_for: of this, averaging and compression only one can be given")
        if fragments > 1 and compression is not None and codec is None:
            averaging_for = _Coded(compression, options["collective"])
            del options["compression"]
        if fragments < 1:
            raise ValueError(f"fragments={fragments}: must be at least 1")
        if fragments > 1 and codec is not None and not isinstance(codec, PlainAveraging):
            raise ValueError("averaging: a codec has state of its own for each fragment, so give averaging_for")
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.nesterov = nesterov and outer_momentum > 0
        self._delay, self._mixing = delay, mixing
        self._lead = Lead(of=lead, lr=outer_lr, momentum=outer_momentum, nesterov=self.nesterov)
        self._count, self._by, self._staggered = fragments, fragment_by, staggered
        self._averaging_for = averaging_for
        self._made: dict[int, Averaging] = {}
        super().__init__(inner, **options)
        self._tell_of_uneven()

    # -- fragments ---------------------------------------------------------------------------------------------------

    def _adopt_parameters(self) -> None:
        super()._adopt_parameters()
        names, sizes = self._anchor.names, [held.numel() for held in self._anchor.tensors]
        groups = partition(names, sizes, self._count, self._by) if self._count > 1 else [list(range(len(names)))]
        self._fragments = [
            Fragment(number=i, part=self._anchor.part(group), averaging=self._averaging_of(i))
            for i, group in enumerate(groups)
        ]

    @property
    def fragment_shares(self) -> list[float]:
        """The share of the model that each fragment has; the largest says what is left of the peak."""
        sizes = [sum(held.numel() for held in fragment.part.tensors) for fragment in self._fragments]
        return [size / (sum(sizes) or 1) for size in sizes]

    def _tell_of_uneven(self) -> None:
        shares = self.fragment_shares
        most = max(shares)
        if most * self._count < _UNEVEN:
            return
        part = self._fragments[shares.index(most)].part
        name, _ = max(zip(part.names, part.tensors, strict=True), key=lambda pair: pair[1].numel())
        logger.warning(
            "fragments=%d: the largest has %.0f %% of the model, because layer %r is not cut; its rounds take as long "
            "as with %d fragments",
            *(self._count, 100 * most, layer_of(name), max(1, round(1 / most))),
        )

    def _averaging_of(self, number: int) -> Averaging:
        if self._averaging_for is None:
            return self.averaging
        if number not in self._made:
            self._made[number] = self._averaging_for(number)
        return self._made[number]

    def _form(self) -> str:
        return f"{type(self).__name__}|{self.outer_lr}|{self.outer_momentum}|{self.nesterov}|{self._delay is None}"

    @property
    def is_plain(self) -> bool:
        """See SyncedOptimizer."""
        return all(isinstance(averaging, PlainAveraging) for averaging in self._averagings())

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, closure: Closure | None = None) -> Any:  # noqa: ANN401
        """Take one inner step; rounds begin, and their results are adopted, when that is due."""
        for fragment in self._flying():  # those of a state that was loaded
            assert fragment.flight is not None
            fragment.flight.begin(fragment.averaging, self._clock)
        return super().step(closure)

    def _meet_if_due(self) -> None:
        for fragment in self._fragments:
            fragment.steps += 1
        self._poll()
        for fragment in self._flying():
            assert fragment.flight is not None
            if self._delay is not None and self.step_count >= fragment.flight.step + self._delay:
                self._land(fragment)
        while self._is_due():
            self._meet(self._fragments[self.round % self._count])

    def _is_due(self) -> bool:
        """Fragment p meets p / k of a window after fragment 0, from the second window on (Alg. 2 has t - t_p)."""
        position, done = self.round % self._count, self.step_count - self._synced_step
        if position > 0 and not self._staggered:
            return True
        return self._window is not None and done >= self._next_meeting()

    def _next_meeting(self) -> int:
        assert self._window is not None
        position = self.round % self._count
        return position * self._window // self._count if position and self._staggered else self._window

    def _meet(self, fragment: Fragment) -> None:
        if fragment.flight is not None:
            self._land(fragment)
        self._launch(fragment)
        if self._delay is None:
            self._rebase(fragment)
        elif self._delay == 0:
            self._land(fragment)

    def _poll(self) -> None:
        """Take in what has ended, when joiners ask for the state: they need one that the next round starts from.

        The parameters don't see it before it is due. Else nothing depends on how fast the network was: not what is
        evaluated between two rounds, and not whether peers that resume from the same step begin a round again.
        """
        if not self._asked:
            return
        self._asked = False
        for fragment in self._flying():
            flight = fragment.flight
            if flight is not None and flight.pending is not None and flight.report is None and flight.pending.done():
                self._settle(fragment)
                if not flight.applied:
                    self._land(fragment)
            self._asked = self._asked or (flight is not None and flight.report is None)

    # -- the peer's own term -----------------------------------------------------------------------------------------

    def _rebase(self, fragment: Fragment) -> None:
        """Let the next window start from the anchor and what this peer runs ahead of it."""
        flight, start, carry = fragment.flight, fragment.part.tensors, fragment.carry
        assert flight is not None
        if self._lead.of == "share" and fragment.others is None and flight.offer.weight > 0:
            # Nobody knows yet how many take part: the first round is waited for, though its result is not used yet.
            start = [held.clone() for held in start]
            self._settle(fragment)
        share = self._lead.share(flight.offer.weight, fragment.others)
        with self._lock, torch.no_grad():
            start = self._lead.ahead(start, flight.offer.tensors, carry, share)
            torch._foreach_copy_(fragment.part.parameters, start)
            self._restart(fragment)

    def _local_work(self) -> list[Tensor] | None:
        if self._count > 1 or self._delay != 0:
            return None
        return [-moved for moved in self._fragments[0].progress()]

    def _present_lineage(self) -> str:
        return self._fragments[0].lineage

    def _unsent(self) -> tuple[float, int]:
        fragment = self._fragments[0]
        return fragment.samples + self.samples, fragment.steps

    def _resend(self, samples: float, steps: int) -> None:
        self._fragments[0].samples, self._fragments[0].steps = samples, steps

    # -- the first and the last round --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Bring in all rounds under way and then what none has taken, and set the parameters to the anchor.

        A peer that was left behind offers nothing: what it has counts from an anchor that the others no longer hold.
        """
        for fragment in self._flying():
            self._land(fragment)
        if any(fragment.steps > 0 for fragment in self._fragments) and not self.needs_state:
            for _ in range(self._count):
                self._launch_last(self._fragments[self.round % self._count])
        for fragment in self._flying():
            self._land(fragment)
        for fragment in self._fragments:
            if fragment.steps == 0:
                self._return_to_anchor(fragment)

    def _launch_last(self, fragment: Fragment) -> None:
        if fragment.steps == 0:  # Nothing to bring: its turn passes.
            with self._lock:
                self._count_round()
            return
        self._launch(fragment)
        if self._delay is None:
            self._restart(fragment)

    def observe_round(self, *, contribute: bool = False) -> None:
        """Take part in the current round and adopt its result, after `load_snapshot`; see SyncedOptimizer.

        Of a state that lacked rounds under way it observes those instead. The step count then is that of the others.
        Of fragments, each contributes only from its first full window on. Raises RoundFailed when a round gave no
        result.
        """
        missing = self._missing if self._count > 1 else []
        self._missing = []
        after = (self._next_round, self._synced_step, self._window)
        if missing:
            self.step_count = self._launched_step
        else:
            if self._window is None:
                self._window = self.sync.next_window(self._synced_step, self.lr)
            position = self.round % self._count
            part = position * self._window // self._count if self._staggered else 0
            self.step_count = self._synced_step + (part if position else self._window)
        observed = []
        for index in missing or [self.round]:
            self.round = index
            observed.append(self._fragments[index % self._count])
            self._launch(observed[-1], observe=not contribute)
        if missing:
            self.round, self._synced_step, self._window = after
        reports = [self._land(fragment) for fragment in observed]
        for fragment in self._fragments:
            self._return_to_anchor(fragment)
            fragment.observes = self._count > 1 and (bool(missing) or fragment not in observed)
        for report in reports:
            if report.failed is not None:
                raise RoundFailed(report.failed, missed=report.missed)

    def _return_to_anchor(self, fragment: Fragment) -> None:
        with self._lock:
            fragment.part.restore()
            fragment.start = []


@dataclass(frozen=True, slots=True)
class _Coded:
    """Makes each fragment an averaging of its own, as a codec has state for each, and draws of its own."""

    codec: Codec
    collective: Collective

    def __call__(self, fragment: int) -> Averaging:
        feedback = self.codec.contractive
        return CompressedAveraging(self.codec, self.collective, error_feedback=feedback, generator=fragment)
