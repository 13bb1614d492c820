"""What the training loop needs from around it: batches, somewhere to report to, and a swarm."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from swarmkit.data.corpus import Batch
from swarmkit.errors import JoinFailed
from swarmkit.optim.synced import RoundReport


class Source(Protocol):
    """Where batches come from; see data.Stream."""

    def next(self) -> Batch:
        """Draw the next batch."""
        ...

    @property
    def position(self) -> int:
        """Samples that come before the next one, through all epochs."""
        ...

    def state(self) -> Mapping[str, Any]:
        """The position, as JSON."""
        ...

    def load(self, state: Any) -> None:  # noqa: ANN401 - what `state` returned, from JSON
        """Go on from a position."""
        ...

    def seek(self, samples: int) -> None:
        """Go to where this source stands after so many samples: for a peer that takes a share of the data over."""
        ...


class Events(Protocol):
    """Where the trainer says what happens; see metrics.EventLog."""

    def emit(self, kind: str, **fields: object) -> None:
        """Report one event."""
        ...


class Surroundings:
    """What the loop needs from the process around it; this one is alone in the world."""

    def fetch_state(self) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
        """Get the swarm's state from another peer; raises SwarmError."""
        raise JoinFailed("this peer has nobody to fetch a state from")

    def await_round(self, round: int, *, step: int, tokens_per_step: int) -> None:
        """Wait until the others are about to come to a round, which they do after `step` inner steps."""

    def report(self, **values: object) -> None:
        """Tell the others where this peer stands."""

    def change_state(self, state: str) -> None:
        """Tell the others that this peer is training, evaluating, joining, ..."""

    def state_of(self, peer_id: str) -> str:
        """What another peer last said that it was doing."""
        return "unknown"

    def disagreement(self) -> str:
        """Why this peer's anchor is not what most others hold after the same rounds; empty when nobody says so."""
        return ""

    def may_go_on(self, report: RoundReport | None) -> bool:
        """Called before each step with the last round; may wait for peers, and is False when there is no point."""
        return True
