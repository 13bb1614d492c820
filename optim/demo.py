"""DeMo: gradients gather in a local momentum, whose largest DCT coefficients alone are sent (arXiv 2411.19870)."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from swarmkit.optim.anchor import LiveAnchor
from swarmkit.optim.dct import Chunks
from swarmkit.optim.demo_averaging import DeMoAveraging
from swarmkit.optim.demo_momentum import Mean, Momentum
from swarmkit.optim.norms import all_finite, total_norm
from swarmkit.optim.offer import Offer, not_finite
from swarmkit.optim.options import EveryStep
from swarmkit.optim.round_report import RoundReport
from swarmkit.optim.schedule import Schedule
from swarmkit.optim.second_moment import SecondMoment
from swarmkit.optim.synced import Closure, SyncedOptimizer

AVERAGES = ("senders", "members")
_LARGEST = 1e30  # norm of a gradient: a momentum of such ones stays within float32
_LARGEST_SQUARED = 1e18  # norm of one whose square stays within float32 as well


class DeMo(SyncedOptimizer):
    """Send the k largest DCT coefficients of every chunk of the momentum, and step along the mean of all members'.

    In every step the momentum is multiplied by `beta` and takes up the gradient. In a round, each member's k largest
    coefficients go to all members, `alpha` times what it sent leaves its momentum (the rest is the error that it
    keeps), and the inner optimizer takes a step with the mean as the gradient. Between rounds parameters do not move.
    Chunks are `chunk` by `chunk` (see `Chunks`); `k` is for one of 64 by 64, others send in proportion to the root of
    their area.

    With `precondition`, gradients are divided by the root of this peer's own second moment of that decay before they
    enter the momentum, as Adam does; what the members send is then a share of Adam's step without its first moment, and
    Adam's learning rates fit. Not in the paper, which has none; it learns as AdamW does with a mean gradient.

    The step: along the mean; with `normalise`, with each chunk of it scaled to a root mean square of 1, so that SGD's
    learning rate is how far parameters move (about 1e-3); with `sign`, along its signs, as in the paper's first
    version. Inner optimizers without a first moment fit, SGD above all: one of their own delays once more what the
    momentum has delayed. Every member receives every other's payload, so the bytes received grow with the members,
    which an all-reduce's do not.

    `values` is how coefficients are sent: "float32", "float16", "int8" or "sign" (1 bit and a scale per chunk); what
    these lose stays in the momentum. `average="members"` divides a coefficient's sum by all members, as an average of
    the momenta does; `"senders"`, as the paper's code, by those that sent it: one sent by one peer of many weighs as
    much as one sent by all. Members are weighted by samples per step. Momentum and second moment are float32, this
    peer's own, and the first in the DCT domain.

    Each member decodes the mean with matrix products of its own: processors that add up in another order come to hold
    other bits, which digests notice (docs/log.md).
    """

    averaging: DeMoAveraging
    _not_here = {
        "averaging": "DeMo sends coefficients of its own, which no codec takes; see values",
        "compression": "DeMo sends coefficients of its own, which no codec takes; see values",
        "pace": "DeMo's parameters move in rounds only, so there is no window to fill together",
    }

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        k: int = 80,
        chunk: int = 64,
        beta: float = 0.999,
        alpha: float = 1.0,
        precondition: float | None = 0.95,
        values: str = "sign",
        sign: bool = False,
        normalise: bool = False,
        average: str = "members",
        sync: Schedule | None = None,
        **options: Unpack[EveryStep],
    ) -> None:
        """Wrap `inner`; `sync` says every how many steps there is a round, the rest see SyncedOptimizer."""
        if k < 1:
            raise ValueError(f"k={k}: at least 1 coefficient per chunk must be sent")
        if not 0 <= beta <= 1:
            raise ValueError(f"beta={beta}: must be between 0 and 1")
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha}: must be above 0 and at most 1")
        if precondition is not None and not 0 <= precondition < 1:
            raise ValueError(f"precondition={precondition}: a decay of at least 0 and below 1, or None")
        if average not in AVERAGES:
            raise ValueError(f"average={average!r}: must be one of {', '.join(AVERAGES)}")
        self.beta, self.sign, self.normalise, self.average = beta, sign, normalise, average
        self.precondition = precondition
        self._k, self._chunk, self._values, self._alpha = k, chunk, values, alpha
        self._trouble: str | None = None  # why this window's gradients are not to be trusted
        super().__init__(inner, sync=sync, **options)

    def _adopt_parameters(self) -> None:
        parameters = list(self.parameters())
        self._anchor = LiveAnchor(parameters, names=self._names, offload=None)
        device = self._offload or (parameters[0].device if parameters else torch.device("cpu"))
        # A gradient over the root of its mean square, or as it is.
        self._second = SecondMoment(parameters, self.precondition, device) if self.precondition is not None else None
        momentum = Momentum(Chunks([parameter.shape for parameter in parameters], self._chunk, device), self._k)
        self.averaging = DeMoAveraging(
            self.collective, momentum, values=self._values, alpha=self._alpha, num_parameters=len(parameters)
        )
        # Peers whose payloads have different forms must not meet: each would drop the other's.
        shapes = [tuple(tensor.shape) for tensor in (*parameters, *self._buffers)]
        form = f"{shapes}|{self._chunk}|{self.averaging.form}"
        self._round_name = f"demo-{hashlib.blake2b(form.encode(), digest_size=8).hexdigest()}"

    @property
    def round_name(self) -> str:  # type: ignore[override]
        """Names what a payload holds."""
        return self._round_name

    def _form(self) -> str:
        # Momenta of gradients in different units must not meet either, though their payloads have one form.
        rule = (self.sign, self.normalise, self.average, self.precondition)
        return f"{super()._form()}|{rule}"

    # -- a step ------------------------------------------------------------------------------------------------------

    def _inner_step(self, closure: Closure | None) -> Any:  # noqa: ANN401
        """Take the gradients into the momentum; those that overflowed or are not finite are left out."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._unscale():
            return loss
        gradients = [_dense(parameter.grad) for parameter in self._anchor.parameters]
        limit = _LARGEST if self._second is None else _LARGEST_SQUARED
        if not _is_usable([gradient for gradient in gradients if gradient is not None], limit):
            self._trouble = not_finite("gradients", self.collective.peer_id)
            return loss
        with self._lock, torch.no_grad():
            self.averaging.present |= torch.tensor([gradient is not None for gradient in gradients], dtype=torch.bool)
            if self._second is not None:
                gradients = self._second.divide(gradients)
            # A missing gradient is zeros that take no memory.
            pairs = zip(self._anchor.parameters, gradients, strict=True)
            filled = [p.new_zeros(()).expand(p.shape) if gradient is None else gradient for p, gradient in pairs]
            self.averaging.momentum.accumulate(filled, self.beta)
        return loss

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _weight(self) -> float:
        return self.samples / self._unsent_steps if self.samples > 0 and self._unsent_steps else 1.0

    def _offer(self, observe: bool) -> Offer:
        trouble = None if observe else self._trouble
        if trouble is None and not observe and not all_finite(self._buffers):
            trouble = not_finite("buffers", self.collective.peer_id)
        if observe or trouble is not None:
            return Offer.of_zeros([], self._buffers, trouble)
        return Offer([], self._buffers, self._weight())

    def _tell(self, report: RoundReport) -> None:
        self._trouble = None
        super()._tell(report)

    def _apply(self, mean: list[Tensor], exact: list[Tensor]) -> float:
        arrived, self.averaging.arrived = self.averaging.arrived, []
        gradients = [_writable(parameter) for parameter in self._anchor.parameters]
        merged = Mean(self.averaging.momentum.chunks, arrived, self.average)
        norm = merged.decode(gradients, sign=self.sign, normalise=self.normalise)
        present = torch.stack([contribution.present for contribution in arrived]).any(0).tolist()
        for parameter, gradient, some in zip(self._anchor.parameters, gradients, present, strict=True):
            # Where nobody has had a gradient, the inner optimizer shall leave the parameter alone.
            parameter.grad = gradient if some else None
        self.inner.step()
        return norm

    def _local_work(self) -> list[Tensor] | None:
        return None  # it is in the momentum, which stays

    # -- state -------------------------------------------------------------------------------------------------------

    def load_snapshot(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """See SyncedOptimizer. The momentum is this peer's own and stays, decayed by the steps that it missed."""
        before = self.step_count
        super().load_snapshot(tensors, meta)
        missed = self.step_count - before
        with self._lock, torch.no_grad():
            torch._foreach_mul_(self.averaging.momentum.tensors, self.beta**missed if missed >= 0 else 0.0)

    def _start_over(self, meta: Mapping[str, Any]) -> None:
        self._trouble = None

    def state_dict(self) -> dict[str, Any]:
        """See SyncedOptimizer; the momentum is part of it, in "averaging"."""
        found = super().state_dict()
        found["synced"]["anchor"] = []  # It is the parameters, and these are in the model's own state.
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See SyncedOptimizer."""
        if "synced" in state_dict:
            state_dict = {**state_dict, "synced": {**state_dict["synced"], "anchor": self._anchor.tensors}}
        super().load_state_dict(state_dict)

    def _own_state(self) -> dict[str, Any]:
        second = self._second.state_dict() if self._second is not None else None
        return {"trouble": self._trouble, "second_moment": second}

    def _check_own_state(self, state: Mapping[str, Any]) -> None:
        found = state.get("second_moment")
        if (found is None) != (self._second is None):
            there, here = ("without" if each is None else "with" for each in (found, self._second))
            raise ValueError(f"the state is {there} a second moment, this optimizer {here} one: set precondition alike")
        if self._second is not None and found is not None:
            self._second.check_state(found)

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._trouble = state["trouble"]
        if self._second is not None:
            self._second.load_state_dict(state["second_moment"])


def _is_usable(gradients: Sequence[Tensor], limit: float) -> bool:
    norm = total_norm(gradients)
    if math.isfinite(norm):
        return norm < limit
    # A norm of finite values may overflow in their own dtype.
    return all(float(gradient.abs().max()) < limit for gradient in gradients if gradient.numel())


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


def _writable(parameter: Tensor) -> Tensor:
    """The parameter's gradient where the mean can be written over it, else memory like the parameter's."""
    found = parameter.grad
    if found is None or found.layout is not torch.strided or found.stride() != parameter.stride():
        return torch.empty_like(parameter)
    return found
