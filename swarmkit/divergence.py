"""Divergence: tells what this peer held after each round, and has it fetch the state when others held another."""

from swarmkit.optim.agreement import Agreed
from swarmkit.optim.synced import SyncedOptimizer
from swarmkit.surroundings import Events, Surroundings


class Divergence:
    """Watches one optimizer's anchor."""

    def __init__(self, optimizer: SyncedOptimizer, events: Events, around: Surroundings) -> None:
        self._optimizer = optimizer
        self._events = events
        self._around = around
        self._agreed: Agreed | None = None
        self.has_diverged = False  # since the last state that was taken over
        optimizer.digests.on_agreed.append(self._on_agreed)

    def digest_after(self, round: int) -> str:
        """The anchor's digest after a round; empty where it is not known, or not yet."""
        return self._agreed.digest if self._agreed is not None and self._agreed.round == round else ""

    def tell(self, reason: str, *, round: int) -> None:
        """Say that this peer's anchor is not the others', and that it is about to take theirs."""
        self.has_diverged = True
        self._events.emit("diverged", id=self._optimizer.collective.peer_id, round=round, reason=reason)

    def compare(self) -> None:
        """Look whether the heartbeats of others speak against this peer's anchor; it needs their state then."""
        if self._optimizer.needs_state or not self._optimizer.digests.are_comparable:
            return
        reason = self._around.disagreement()
        if reason:
            self._optimizer.digests.note_outcome(diverged=True)
            self._optimizer.needs_state = True
            self.tell(reason, round=self._optimizer.round)

    def _on_agreed(self, agreed: Agreed) -> None:
        """Tell the others what this peer holds; called from another thread when the anchor is large."""
        self._agreed = agreed
        self._events.emit("anchor", round=agreed.round, digest=agreed.digest, lineage=agreed.lineage)
        self._around.report(lineage=agreed.lineage, digest=agreed.digest)
