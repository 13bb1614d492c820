"""DeMo's rounds: every member's largest coefficients to every member; what is no payload is dropped by all alike."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim.averaging import Pending, check_nothing_shared
from swarmkit.optim.collective import Collective, Gathered, Reduced, RoundKey, stats_of
from swarmkit.optim.demo_momentum import Momentum
from swarmkit.optim.demo_payload import GroupFormat, PayloadFormat, Sparse
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.mean import weighted_mean
from swarmkit.optim.norms import all_finite
from swarmkit.optim.snapshot import check_form


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one member sent."""

    parts: list[Sparse]  # entries by group of chunks
    present: Tensor  # bool [parameters]: whether the member has had a gradient for it
    weight: float


class DeMoAveraging:
    """An Averaging of a momentum: sends its largest entries, and takes them out once a round has closed with them.

    The members' entries are left in `arrived` for the strategy to merge and decode; what `begin` is given besides is
    averaged as it is. A member whose message is not of the agreed form, or holds values that are not finite, is left
    out; all members read the same bytes, so all leave out the same ones. A member of weight 0 sends no entries.
    """

    def __init__(
        self, collective: Collective, momentum: Momentum, *, values: str, alpha: float, num_parameters: int
    ) -> None:
        self.momentum = momentum
        self.present = torch.zeros(num_parameters, dtype=torch.bool)  # parameters that have had a gradient here
        sizes = zip(momentum.chunks.groups, momentum.k, strict=True)
        groups = tuple(GroupFormat(group.count, group.area, k) for group, k in sizes)
        self.form = PayloadFormat(groups, values, num_parameters)
        self.arrived: list[Contribution] = []  # of the last closed round, in member order
        self._collective = collective
        self._alpha = alpha

    def begin(
        self, tensors: Sequence[Tensor], exact: Sequence[Tensor] = (), *, round: RoundKey, weight: float
    ) -> Pending:
        """Offer the momentum's largest entries; see Averaging."""
        beside = [*tensors, *exact]
        entries = [self.form.write(self.momentum.largest(), self.present)] if weight > 0 else [_nothing()]
        return _GatherRound(self, self._collective.all_gather([*entries, *beside], round=round, weight=weight), beside)

    def conclude(self, gathered: Gathered, beside: Sequence[Tensor]) -> Reduced:
        """Sort out what came and take out what was sent; raises RoundFailed when nothing that came counts."""
        found: dict[str, Contribution] = {}
        others: list[list[Tensor]] = []
        dropped: dict[str, ValueError] = {}
        for member, weight, message in zip(gathered.members, gathered.weights, gathered.payloads, strict=True):
            try:
                if weight > 0:
                    parts, present = self.form.read(message[:1], self.momentum.chunks.device)
                    _check_beside(message[1:], beside)
                    found[member] = Contribution(parts, present.cpu(), weight)
                    others.append(message[1:])
            except ValueError as error:
                dropped[member] = error
        if not found:
            raise RoundFailed("; ".join(["nobody contributed", *(f"{peer}: {e}" for peer, e in dropped.items())]))
        if self._collective.peer_id in found:
            self.momentum.subtract(found[self._collective.peer_id].parts, self._alpha)
        self.arrived = list(found.values())
        weights = [contribution.weight for contribution in self.arrived]
        by_tensor = list(zip(*others, strict=True))
        means = [weighted_mean(parts, weights).to(like.device) for parts, like in zip(by_tensor, beside, strict=True)]
        kept = [i for i, member in enumerate(gathered.members) if member not in dropped]
        return Reduced(tensors=means, **stats_of(gathered, kept))

    def state_dict(self) -> dict[str, Any]:
        """See Averaging."""
        return {"momentum": [tensor.clone() for tensor in self.momentum.tensors], "present": self.present.clone()}

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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Averaging."""
        held = {**_numbered(self.momentum.tensors), "present": self.present}
        if set(state) != {"momentum", "present"}:
            raise ValueError(f"the state holds {sorted(state)[:3]}, not a momentum")
        check_form("momentum", {**_numbered(state["momentum"]), "present": state["present"]}, held)
        with torch.no_grad():
            torch._foreach_copy_(self.momentum.tensors, state["momentum"])
            self.present.copy_(state["present"])


class _GatherRound:
    def __init__(self, averaging: DeMoAveraging, future: Future[Gathered], beside: Sequence[Tensor]) -> None:
        self._averaging = averaging
        self._future = future
        self._beside = beside

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> Reduced:
        with torch.no_grad():
            return self._averaging.conclude(self._future.result(), self._beside)

    def cancel(self) -> None:
        self._future.cancel()


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(i): tensor for i, tensor in enumerate(tensors)}


def _check_beside(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    if [(tensor.shape, tensor.dtype) for tensor in found] != [(tensor.shape, tensor.dtype) for tensor in wanted]:
        raise ValueError("the tensors beside the payload have other shapes or dtypes than here")
    if not all_finite(found):
        raise ValueError("a tensor beside the payload is not finite")
