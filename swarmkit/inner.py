"""Settings of the inner optimizers, and from settings to an optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from swarmkit.checks import at_least, in_range, positive

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class LRShape(Enum):
    """How the learning rate goes after the warm-up."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"
    step = "step"


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """The inner optimizer and its learning rate."""

    name: str = "adamw"  # adamw or sgd; set by the choice of the group
    lr: float = 3e-3  # peak learning rate
    weight_decay: float = 0.1  # of matrices; vectors are not decayed
    clip: float = 1.0  # largest L2 norm of a gradient; 0 does not clip
    warmup_steps: int | None = None  # of a linear warm-up; none: a tenth of training
    schedule: LRShape = LRShape.cosine  # after the warm-up
    final_lr: float = 0.1  # share of the peak that schedules cosine and linear end on
    milestones: list[float] = field(default_factory=lambda: [0.5, 0.75])  # schedule=step: shares of training
    gamma: float = 0.1  # schedule=step: factor at each milestone

    def __post_init__(self) -> None:
        positive("optimizer", self, "lr")
        at_least("optimizer", self, 0, "weight_decay", "clip")
        if self.warmup_steps is not None:
            at_least("optimizer", self, 0, "warmup_steps")
        if not 0 <= self.final_lr <= 1:
            raise ValueError(f"optimizer.final_lr={self.final_lr}: a share of the peak, between 0 and 1")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"optimizer.gamma={self.gamma}: must be above 0 and at most 1")
        if any(not 0 < share < 1 for share in self.milestones) or sorted(self.milestones) != list(self.milestones):
            raise ValueError(
                f"optimizer.milestones={list(self.milestones)}: shares of training, between 0 and 1, rising"
            )

    def warmup(self, total_steps: int) -> int:
        """Steps of the warm-up in a training of so many."""
        return total_steps // 10 if self.warmup_steps is None else self.warmup_steps


@dataclass(kw_only=True, slots=True)
class AdamWConfig(OptimizerConfig):
    """torch.optim.AdamW."""

    name: str = "adamw"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # decay of the two moments, per step

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={list(self.betas)}: two numbers of at least 0 and below 1")


@dataclass(kw_only=True, slots=True)
class SGDConfig(OptimizerConfig):
    """torch.optim.SGD."""

    name: str = "sgd"
    momentum: float = 0.9  # 0: plain SGD
    nesterov: bool = False  # look ahead along the momentum

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        in_range("optimizer", self, 0.0, 1.0, "momentum")
        if self.nesterov and self.momentum == 0:
            raise ValueError("optimizer.nesterov=true: needs optimizer.momentum above 0")


def build_inner(config: OptimizerConfig, parameters: "Sequence[Tensor]") -> "torch.optim.Optimizer":
    """Make the inner optimizer; vectors (norms, biases) are not decayed."""
    import torch

    decayed = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    match config:
        case AdamWConfig():
            return torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), foreach=True)
        case SGDConfig():
            momentum, nesterov = config.momentum, config.nesterov
            return torch.optim.SGD(groups, lr=config.lr, momentum=momentum, nesterov=nesterov, foreach=True)
    raise ValueError(f"optimizer.name={config.name!r}: no such optimizer")
