"""LocalSGD: average the parameters every H steps (arXiv 1805.09767), with QSR as a schedule (arXiv 2310.14423)."""

import torch
from torch import Tensor

from swarmkit.optim.norms import total_norm
from swarmkit.optim.synced import SyncedOptimizer


class LocalSGD(SyncedOptimizer):
    """Train alone for a window of inner steps, then set the parameters to their weighted mean over the replicas.

    Through a codec goes how far each replica has moved from the anchor, because parameters do not compress.
    """

    @property
    def round_name(self) -> str:  # type: ignore[override]
        """Peers that send parameters and peers that send differences must not meet."""
        return "parameters" if self.is_plain else "differences"

    def _contribution(self, observe: bool) -> list[Tensor]:
        if self.is_plain:
            return [torch.zeros_like(p) if observe else p.detach() for p in self._anchor.parameters]
        if observe:
            return [torch.zeros_like(held) for held in self._anchor.tensors]
        return list(torch._foreach_sub(self._anchor.rounded(), self._anchor.local()))

    def _apply(self, mean: list[Tensor], exact: list[Tensor]) -> float:
        found = self._anchor.like(mean)
        if self.is_plain:
            norm = total_norm(torch._foreach_sub(self._anchor.tensors, found))
            self._anchor.assign(found)
        else:
            norm = total_norm(found)
            torch._foreach_sub_(self._anchor.tensors, found)
        self._anchor.restore()
        return norm
