"""LocalSGD: average the parameters every H steps (arXiv 1805.09767), with QSR as a schedule (arXiv 2310.14423)."""

import torch
from torch import Tensor

from swarmkit.optim.synced import SyncedOptimizer


class LocalSGD(SyncedOptimizer):
    """Train alone for a window of inner steps, then set the parameters to their weighted mean over the replicas."""

    round_name = "parameters"

    def _contribution(self, observe: bool) -> list[Tensor]:
        if observe:
            return [torch.zeros_like(parameter) for parameter in self._parameters]
        return [parameter.detach() for parameter in self._parameters]

    def _apply(self, mean: list[Tensor]) -> float:
        held = [tensor.to(anchor) for tensor, anchor in zip(mean, self._anchor, strict=True)]
        norm = torch.stack(torch._foreach_norm(torch._foreach_sub(self._anchor, held))).norm()
        torch._foreach_copy_(self._anchor, held)
        self._restore_parameters()
        return float(norm)
