"""Fragments: parts of a model that synchronise on their own, and what each keeps between its rounds (2501.18512)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarmkit.optim.anchor import Anchor
from swarmkit.optim.averaging import Averaging
from swarmkit.optim.flight import Flight


@dataclass(slots=True)
class Fragment:
    """A part of the parameters with its own rounds; a whole model is one fragment."""

    number: int
    part: Anchor  # views of the whole anchor
    averaging: Averaging
    lineage: str = ""  # hash chain over the rounds of this fragment that its anchor holds
    synced_step: int = 0  # inner steps completed when its last round began
    samples: float = 0.0  # since then, or since the last round that took what this peer had
    steps: int = 0
    observes: bool = False  # no full window from the shared state yet: its next round has weight 0
    others: float | None = None  # weight of all others in its last closed round
    start: list[Tensor] = field(default_factory=list)  # what the running window started from; empty: the anchor
    carry: list[Tensor] = field(default_factory=list)  # outer momentum of this peer's own contributions
    kept: list[Tensor] = field(default_factory=list)  # contribution of a round that failed
    flight: Flight | None = None

    def progress(self) -> list[Tensor]:
        """The pseudo-gradient: from where the window started to where it is now, and what a failed round kept."""
        start = self.part.like(self.start) if self.start else self.part.rounded()
        found = list(torch._foreach_sub(start, self.part.local()))
        if self.kept:
            torch._foreach_add_(found, self.kept)
        return found

    def forget(self) -> None:
        """Drop what belongs to parameters that are replaced by the anchor."""
        self.samples, self.steps, self.observes = 0.0, 0, False
        self.start, self.carry, self.kept = [], [], []
