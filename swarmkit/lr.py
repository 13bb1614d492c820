"""Learning rates as pure functions of the swarm's step, so that a late joiner has the same as everybody."""

import math

from swarmkit.inner import LRShape, OptimizerConfig


def learning_rate(step: int, *, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of the inner step that follows `step` completed ones.

    It rises linearly during the warm-up. Then it stays, falls to `final_lr` of the peak along half a cosine or a line,
    or is multiplied by `gamma` at each milestone.
    """
    warmup = config.warmup(total_steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    match config.schedule:
        case LRShape.constant:
            return config.lr
        case LRShape.cosine:
            return config.lr * (config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * progress)) / 2)
        case LRShape.linear:
            return config.lr * (1 - (1 - config.final_lr) * progress)
        case LRShape.step:
            return config.lr * config.gamma ** sum(step >= share * total_steps for share in config.milestones)
