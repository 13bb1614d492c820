"""Flight: a round that has begun and whose result training does not wait for."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from swarmkit.optim.averaging import Averaging, Pending
from swarmkit.optim.collective import RoundKey
from swarmkit.optim.offer import Offer
from swarmkit.optim.round_report import RoundReport


@dataclass(slots=True)
class Flight:
    """A round under way, or one that has ended and is not told yet."""

    key: RoundKey
    offer: Offer
    step: int  # inner steps completed when it began
    window: int
    samples: float  # behind the offer: given back when the round fails
    steps: int
    pending: Pending | None = None  # None: not begun since this process started
    encoding: float = 0.0  # seconds that training stood still until it had begun
    exposed: float = 0.0  # seconds that training stood still for it since
    report: RoundReport | None = None  # None: its result is not in the anchor yet
    applied: bool = False
    buffers: list[Tensor] = field(default_factory=list)  # mean buffers, until they are adopted

    def begin(self, averaging: Averaging, clock: Callable[[], float]) -> None:
        """Offer to the round, unless that was done; after a restart the same once more, under the same key."""
        if self.pending is None and self.report is None:
            started = clock()
            self.pending = averaging.begin(
                self.offer.tensors, self.offer.exact, round=self.key, weight=self.offer.weight
            )
            self.encoding += clock() - started

    def state(self) -> dict[str, Any]:
        """All of it but the network's part."""
        return {
            "key": [self.key.name, self.key.index, self.key.lineage],
            "tensors": [tensor.clone() for tensor in self.offer.tensors],
            "exact": [tensor.clone() for tensor in self.offer.exact],
            "weight": self.offer.weight,
            "trouble": self.offer.trouble,
            "numbers": [self.step, self.window, self.samples, self.steps, self.exposed],
            "report": None if self.report is None else asdict(self.report),
            "applied": self.applied,
            "buffers": [tensor.clone() for tensor in self.buffers],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any], like: list[Tensor]) -> "Flight":
        """The inverse of `state`; the contribution lies where `like` does."""
        step, window, samples, steps, exposed = state["numbers"]
        tensors = [t.to(held.device, copy=True) for t, held in zip(state["tensors"], like, strict=True)]
        return cls(
            key=RoundKey(*state["key"]),
            offer=Offer(tensors, list(state["exact"]), state["weight"], state["trouble"]),
            step=step,
            window=window,
            samples=samples,
            steps=steps,
            exposed=exposed,
            report=None if state["report"] is None else RoundReport(**state["report"]),
            applied=state["applied"],
            buffers=list(state["buffers"]),
        )
