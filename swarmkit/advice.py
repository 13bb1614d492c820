"""Notes on a configuration that works but will probably disappoint."""

import math
from collections.abc import Iterator

from swarmkit.config import Config
from swarmkit.inner import SGDConfig
from swarmkit.strategy import DeMoConfig, DiLoCoConfig, SyncRule

# Outer momentum of 0.9 takes tens of rounds to settle; below this, plain averaging (local_sgd) was better.
MIN_OUTER_ROUNDS = 100
MAX_EAGER_LR = 0.2


def notes(config: Config) -> Iterator[str]:
    """Yield one line for each setting that is legal but unwise, with what to do."""
    strategy = config.strategy
    if isinstance(strategy, DeMoConfig) and not isinstance(config.optimizer, SGDConfig):
        yield (
            f"strategy=demo with optimizer={config.optimizer.name}: the momentum is DeMo's own; "
            "use optimizer=sgd optimizer.momentum=0, with the learning rate that suits AdamW"
        )
    if isinstance(strategy, DeMoConfig) and isinstance(config.optimizer, SGDConfig) and config.optimizer.momentum > 0:
        yield (
            f"strategy=demo with optimizer.momentum={config.optimizer.momentum}: the momentum is DeMo's own, "
            "and a second one loses much (docs/log.md); use optimizer.momentum=0"
        )
    if isinstance(strategy, DiLoCoConfig) and strategy.eager and strategy.outer_lr > MAX_EAGER_LR:
        yield (
            f"strategy.outer_lr={strategy.outer_lr} with strategy.eager: what is one round late wants smaller steps; "
            f"{MAX_EAGER_LR} was best with two peers and with four (docs/log.md)"
        )
    if isinstance(strategy, DiLoCoConfig) and strategy.sync.rule is SyncRule.every:
        rounds = math.ceil(config.steps / strategy.sync.h)
        if rounds < MIN_OUTER_ROUNDS and strategy.outer_momentum > 0:
            yield (
                f"DiLoCo with {rounds} rounds (steps / strategy.sync.h): outer momentum needs about {MIN_OUTER_ROUNDS} "
                "to pay; use strategy=local_sgd, or a smaller strategy.outer_lr such as 0.2 to 0.4"
            )
