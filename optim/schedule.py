"""When to synchronise: every H steps, or by the Quadratic Synchronization Rule (QSR, arXiv 2310.14423)."""

import math
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """Says how many inner steps the window that starts now has; a pure function, so that all peers agree."""

    def next_window(self, step: int, lr: float) -> int:
        """Return H >= 1 for the window after `step` completed steps, whose first step has learning rate `lr`."""
        ...


def _cut(window: int, step: int, total_steps: int | None) -> int:
    """Shorten the last window so that training ends on a synchronisation."""
    return max(1, window if total_steps is None else min(window, total_steps - step))


@dataclass(frozen=True, slots=True)
class Every:
    """Synchronise every `h` inner steps; the last window ends with training when `total_steps` is known."""

    h: int
    total_steps: int | None = None

    def __post_init__(self) -> None:
        if self.h < 1:
            raise ValueError(f"h={self.h}: a window needs at least one inner step")

    def next_window(self, step: int, lr: float) -> int:
        """See Schedule."""
        return _cut(self.h, step, self.total_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuadraticSync:
    """QSR: H = max(h_base, floor((alpha / lr)^power)), fixed when the window starts (arXiv 2310.14423, eq. 2).

    While `step < warmup_steps` H is `h_base`: the small learning rates of a warm-up are not a sign of convergence. A
    window that began in the warm-up runs its course. Alpha is about the peak learning rate times the square root of
    the H wanted there: 0.0175 for AdamW at 0.008 on ViT-B, 0.2 for SGD at 0.8 on ResNet-152.
    """

    alpha: float
    h_base: int
    total_steps: int
    warmup_steps: int = 0
    power: float = 2.0

    def __post_init__(self) -> None:
        if self.h_base < 1:
            raise ValueError(f"h_base={self.h_base}: a window needs at least one inner step")
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ValueError(f"alpha={self.alpha}: must be finite and not negative (0 keeps H at h_base)")
        if self.total_steps < 1:
            raise ValueError(f"total_steps={self.total_steps}: QSR must know when training ends")
        if not (math.isfinite(self.power) and self.power > 0):
            raise ValueError(f"power={self.power}: must be positive")

    def next_window(self, step: int, lr: float) -> int:
        """See Schedule."""
        if step < self.warmup_steps or self.alpha == 0:
            return _cut(self.h_base, step, self.total_steps)
        left = max(1, self.total_steps - step)
        # Compared before the cast: as lr goes to 0, (alpha / lr)^2 overflows an int or a float.
        if lr <= 0 or self.power * (math.log(self.alpha) - math.log(lr)) >= math.log(left):
            return left
        return _cut(max(self.h_base, math.floor((self.alpha / lr) ** self.power)), step, self.total_steps)
