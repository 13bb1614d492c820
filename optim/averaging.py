"""Averaging: how a strategy's tensors become a round's payload and its result their mean; plain, without a codec."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from swarmkit.optim.collective import Collective, Reduced, RoundKey


class Pending(Protocol):
    """A round under way."""

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        ...

    def result(self) -> Reduced:
        """Wait for the round; call it once, from the thread that began the round.

        Only here does a codec commit what a closed round contained to its own state (error feedback, warm starts): a
        round that failed, was cancelled or is still in flight leaves it as it was. Raises RoundFailed.
        """
        ...

    def cancel(self) -> None:
        """Give the round up; `result` then raises CancelledError unless the round had ended."""
        ...


class Averaging(Protocol):
    """Averages tensors over the members of a round."""

    @property
    def is_behind(self) -> bool:
        """True when the next contribution will be left out: this member lacks state that the others share."""
        ...

    def begin(
        self, tensors: Sequence[Tensor], exact: Sequence[Tensor] = (), *, round: RoundKey, weight: float
    ) -> Pending:
        """Offer `tensors`, which a codec may compress, and `exact`, which it must not; the mean of both comes back.

        Returns at once. The inputs belong to the round until it has ended. Rounds with different keys may be in
        flight together only with an Averaging each, unless it has no state.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next `begin` depends on: beginning the same round again after `load_state_dict` sends the same."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adopt a state, or raise ValueError naming what does not fit and change nothing."""
        ...

    def shared_state(self) -> dict[str, Any]:
        """What a joiner needs in order to send as the others do: plain numbers, equal on all members."""
        ...

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Adopt what another member's `shared_state` gave, or raise ValueError and change nothing."""
        ...


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """A row of the report: what one tensor is sent with."""

    tensor: str
    size: int  # elements
    bytes: int  # of its payload, at most
    parameter: float  # density, rank or bits, whatever the codec's axis is
    error_share: float  # of all tensors' errors


@runtime_checkable
class Adaptive(Protocol):
    """An Averaging that chooses what each tensor is sent with."""

    table: list[TensorChoice]  # of the last choice; empty before one


@runtime_checkable
class Expecting(Protocol):
    """An Averaging whose states are of certain tensors."""

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """Learn the shapes of what `begin` will get, so that a state of other tensors is refused when it is loaded."""
        ...


class PlainAveraging:
    """Sends tensors as they are."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def begin(
        self, tensors: Sequence[Tensor], exact: Sequence[Tensor] = (), *, round: RoundKey, weight: float
    ) -> Pending:
        """See Averaging."""
        return _PlainRound(self._collective.all_reduce([*tensors, *exact], round=round, weight=weight))

    def state_dict(self) -> dict[str, Any]:
        """See Averaging."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Averaging."""
        if state:
            raise ValueError(f"the state is of a codec ({sorted(state)[:3]}), this run has none")

    @property
    def is_behind(self) -> bool:
        """See Averaging."""
        return False

    def shared_state(self) -> dict[str, Any]:
        """See Averaging."""
        return {}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """See Averaging."""
        check_nothing_shared(state)


def check_nothing_shared(state: Mapping[str, Any]) -> None:
    """Raise ValueError for a shared state, where there is none."""
    if state:
        raise ValueError(f"the averaging shares {str(sorted(state))[:80]}, this run's shares nothing")


class _PlainRound:
    def __init__(self, future: Future[Reduced]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> Reduced:
        return self._future.result()

    def cancel(self) -> None:
        self._future.cancel()
