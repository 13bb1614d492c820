"""Checks of settings that name the key, the value and the reason."""

import math
from typing import Any


def at_least(section: str, config: Any, minimum: float, *names: str) -> None:  # noqa: ANN401 - any dataclass
    """Raise ValueError for the first field below `minimum`."""
    for name in names:
        if not getattr(config, name) >= minimum:  # so that NaN fails as well
            raise ValueError(f"{section}.{name}={getattr(config, name)}: must be at least {minimum}")


def in_range(section: str, config: Any, low: float, high: float, *names: str) -> None:  # noqa: ANN401
    """Raise ValueError for the first field outside low <= value < high."""
    for name in names:
        if not low <= getattr(config, name) < high:
            raise ValueError(f"{section}.{name}={getattr(config, name)}: must be at least {low} and below {high}")


def positive(section: str, config: Any, *names: str) -> None:  # noqa: ANN401
    """Raise ValueError for the first field that is not positive and finite."""
    for name in names:
        value = getattr(config, name)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{section}.{name}={value}: must be positive" + (" and finite" if value > 0 else ""))


def divides(section: str, config: Any, divisor: str, number: str) -> None:  # noqa: ANN401
    """Raise ValueError when one field does not divide another."""
    if getattr(config, number) % getattr(config, divisor):
        raise ValueError(
            f"{section}.{divisor}={getattr(config, divisor)}: must divide {section}.{number}={getattr(config, number)}"
        )
