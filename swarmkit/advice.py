"""Notes on a configuration that works but will probably disappoint."""

import math
from collections.abc import Iterator

from swarmkit.config import Config
from swarmkit.inner import SGDConfig
from swarmkit.strategy import DeMoConfig, DiLoCoConfig, SyncRule

# Outer momentum of 0.9 takes tens of rounds to settle; below this, plain averaging (local_sgd) was better.
MIN_OUTER_ROUNDS = 100
# Share of the outer learning rate at which steps no longer settle: nearer to it they swing for tens of rounds.
SAFE_SHARE = 0.7


def notes(config: Config) -> Iterator[str]:
    """Yield one line for each setting that is legal but unwise, with what to do."""
    strategy = config.strategy
    momentum = strategy.outer_momentum or 0.0 if isinstance(strategy, DiLoCoConfig) else 0.0
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
    if isinstance(strategy, DiLoCoConfig) and strategy.eager:
        share = 1 / config.peers if strategy.eager is True else 0.0
        limit = settling_limit(momentum, share=share, nesterov=strategy.nesterov)
        if strategy.outer_lr > SAFE_SHARE * limit:
            yield (
                f"strategy.eager={str(strategy.eager).lower()}: outer steps of strategy.outer_lr={strategy.outer_lr:g} "
                f"with strategy.outer_momentum={momentum:g} swing and from {limit:.2g} never settle, "
                f"because {'only 1/' + str(config.peers) if share else 'nothing'} of each is fresh; use "
                f"strategy.outer_momentum=0, or an outer_lr below {SAFE_SHARE * limit:.2g}"
            )
    if isinstance(strategy, DiLoCoConfig) and strategy.sync.rule is SyncRule.every:
        rounds = math.ceil(config.steps / strategy.sync.h)
        if rounds < MIN_OUTER_ROUNDS and momentum > 0:
            yield (
                f"DiLoCo with {rounds} rounds (steps / strategy.sync.h): outer momentum needs about {MIN_OUTER_ROUNDS} "
                "to pay; use strategy=local_sgd, or a smaller strategy.outer_lr such as 0.2 to 0.4"
            )


def settling_limit(momentum: float, *, share: float, nesterov: bool = True) -> float:
    """The outer learning rate from which outer steps that are one round late do not settle.

    Of each pseudo-gradient `share` is fresh and the rest a round old. Where a window takes parameters all the way to a
    minimum, the starts of windows s follow z (z - 1) (z - mu) + lr (a z + b) (share z + 1 - share) = 0 with
    (a, b) = (1 + mu, -mu), or (1, 0) without Nesterov. They settle while its roots lie within the unit circle (Jury);
    windows that come less far act as a smaller learning rate.
    """
    above, below = (1 + momentum, -momentum) if nesterov else (1.0, 0.0)

    def settles(lr: float) -> bool:
        second = -(1 + momentum) + lr * above * share
        first = momentum + lr * (above * (1 - share) + below * share)
        constant = lr * below * (1 - share)
        ends = 1 + second + first + constant > 0 > -1 + second - first + constant
        return ends and abs(constant) < 1 and abs(constant**2 - 1) > abs(constant * second - first)

    low, high = 0.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if settles(middle) else (low, middle)
    return low
