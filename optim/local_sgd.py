"""LocalSGD: average the parameters every H steps (arXiv 1805.09767), with QSR as a schedule (arXiv 2310.14423)."""

import torch
from torch import Tensor

from swarmkit.optim.norms import total_norm
from swarmkit.optim.synced import SyncedOptimizer


class LocalSGD(SyncedOptimizer):
    """Train alone for a window of inner steps, then set the parameters to their weighted mean over the replicas."""

    round_name = "parameters"

    def _contribution(self, observe: bool) -> list[Tensor]:
        parameters = self._anchor.parameters
        return [torch.zeros_like(p) if observe else p.detach() for p in parameters]

    def _apply(self, mean: list[Tensor]) -> float:
        new = self._anchor.like(mean)
        norm = total_norm(torch._foreach_sub(self._anchor.tensors, new))
        self._anchor.assign(new)
        self._anchor.restore()
        return norm
