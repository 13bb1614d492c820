"""DeMo: gradients gather in a local momentum, whose largest DCT coefficients alone are sent (arXiv 2411.19870)."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim.anchor import LiveAnchor
from swarmkit.optim.dct import Chunks
from swarmkit.optim.demo_averaging import DeMoAveraging
from swarmkit.optim.demo_momentum import Mean, Momentum
from swarmkit.optim.norms import all_finite, total_norm
from swarmkit.optim.offer import Offer, not_finite
from swarmkit.optim.round_report import RoundReport
from swarmkit.optim.synced import Closure, SyncedOptimizer

AVERAGES = ("senders", "members")
_LARGEST = 1e30  # norm of a gradient: a momentum of such ones stays within float32


class DeMo(SyncedOptimizer):
    """Send the k largest DCT coefficients of every chunk of the momentum, and step along the mean of all members'.

    In every step the momentum is multiplied by `beta` and takes up the gradient. In a round, each member's k largest
    coefficients go to all members, `alpha` times what it sent leaves its momentum (the rest is the error that it
    keeps), and the inner optimizer takes a step with the mean as the gradient. Between rounds parameters do not move.
    Chunks are `chunk` by `chunk` (see `Chunks`); `k` is for one of 64 by 64, others send in proportion to the root of
    their area.

    The step: with `sign`, along the signs of the mean, as in the paper's first version; else, with `normalise`, along
    the mean with each chunk scaled to a root mean square of 1, so that SGD's learning rate is how far parameters move
    (about 1e-3); with neither, along the mean. Inner optimizers without a first moment fit, SGD above all: one of their
    own delays once more what the momentum has delayed. Every member receives every other's payload, so the bytes
    received grow with the members, which an all-reduce's do not.

    `values` is how coefficients are sent: "float32", "float16", "int8" or "sign" (1 bit and a scale per chunk); what
    these lose stays in the momentum. `average="senders"` divides a coefficient by the members that sent it, as the
    paper's code does: one sent by one peer of many weighs as much as one sent by all. `"members"` divides by all.
    Members are weighted by samples per step. The momentum is float32, in the DCT domain, and this peer's own.
    """

    averaging: DeMoAveraging

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        k: int = 64,
        chunk: int = 64,
        beta: float = 0.999,
        alpha: float = 1.0,
        values: str = "sign",
        sign: bool = False,
        normalise: bool = True,
        average: str = "senders",
        **options: Any,  # noqa: ANN401 - see SyncedOptimizer
    ) -> None:
        if k < 1:
            raise ValueError(f"k={k}: at least 1 coefficient per chunk must be sent")
        if not 0 <= beta <= 1:
            raise ValueError(f"beta={beta}: must be between 0 and 1")
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha}: must be above 0 and at most 1")
        if average not in AVERAGES:
            raise ValueError(f"average={average!r}: must be one of {', '.join(AVERAGES)}")
        if options.get("averaging") is not None:
            raise ValueError("averaging: DeMo sends coefficients of its own, which no codec takes; see values")
        if options.get("pace") is not None:
            raise ValueError("pace: DeMo's parameters move in rounds only, so there is no window to fill together")
        self.beta, self.sign, self.normalise, self.average = beta, sign, normalise, average
        self._k, self._chunk, self._values, self._alpha = k, chunk, values, alpha
        self._trouble: str | None = None  # why this window's gradients are not to be trusted
        super().__init__(inner, **options)

    def _adopt_parameters(self) -> None:
        parameters = list(self.parameters())
        self._anchor = LiveAnchor(parameters, names=self._names, offload=None)
        device = self._offload or (parameters[0].device if parameters else torch.device("cpu"))
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
        if not _is_usable([gradient for gradient in gradients if gradient is not None]):
            self._trouble = not_finite("gradients", self.collective.peer_id)
            return loss
        with self._lock, torch.no_grad():
            self.averaging.present |= torch.tensor([gradient is not None for gradient in gradients], dtype=torch.bool)
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
        return {"trouble": self._trouble}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._trouble = state["trouble"]


def _is_usable(gradients: Sequence[Tensor]) -> bool:
    norm = total_norm(gradients)
    if math.isfinite(norm):
        return norm < _LARGEST
    # A norm of finite values may overflow in their own dtype.
    return all(float(gradient.abs().max()) < _LARGEST for gradient in gradients if gradient.numel())


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


def _writable(parameter: Tensor) -> Tensor:
    """The parameter's gradient where the mean can be written over it, else memory like the parameter's."""
    found = parameter.grad
    if found is None or found.layout is not torch.strided or found.stride() != parameter.stride():
        return torch.empty_like(parameter)
    return found
