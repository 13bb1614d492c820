"""What of a run's settings its saved optimizer state depends on, and settings as overrides that can be pasted."""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from enum import Enum

from swarmkit.compression import CodecConfig, feeds_back
from swarmkit.config import Config
from swarmkit.strategy import CO2Config, DeMoConfig, DiLoCoConfig

_PLAIN_WORD = re.compile(r"[A-Za-z_./][\w./:-]*")
_NOT_WORDS = ("null", "true", "false", "inf", "nan")


def as_override(key: str, value: object) -> str:
    """One setting as it is typed on the command line."""
    return shlex.quote(f"{key}={_typed(value)}")


def settings(group: str, part: object) -> dict[str, object]:
    """The settings of a part by their full keys; its name is the group's own."""
    found = {group: getattr(part, "name", "")}
    found.update((key, value) for key, value in _flat(group, part) if key != f"{group}.name")
    return found


def unfit(saved: Config, given: Config) -> list[tuple[str, object, object]]:
    """Key, saved value and given value of each setting with which the saved state could not be taken up.

    Both configurations are of the same strategy.
    """
    found = [*_of_strategy(saved, given), *_of_compression(saved, given)]
    if saved.optimizer.name != given.optimizer.name:
        found.append(("optimizer", saved.optimizer.name, given.optimizer.name))
    return found


def _of_strategy(saved: Config, given: Config) -> Iterator[tuple[str, object, object]]:
    there, here = saved.strategy, given.strategy
    if isinstance(there, DiLoCoConfig) and isinstance(here, DiLoCoConfig):
        yield from _other("strategy", there, here, "fragments", "eager")
        if there.fragments > 1:
            yield from _other("strategy", there, here, "fragment_by")
        if (there.overlap_steps > 0) != (here.overlap_steps > 0):  # with it, rounds under way are part of the state
            yield from _other("strategy", there, here, "overlap_steps")
        if there.outer_momentum and not here.outer_momentum:  # a momentum can begin at zero, but not be left over
            yield from _other("strategy", there, here, "outer_momentum")
    elif isinstance(there, CO2Config) and isinstance(here, CO2Config):
        yield from _other("strategy", there, here, "overlap", "keep_local")
    elif isinstance(there, DeMoConfig) and isinstance(here, DeMoConfig):
        yield from _other("strategy", there, here, "chunk")
        if (there.precondition is None) != (here.precondition is None):
            yield from _other("strategy", there, here, "precondition")


def _of_compression(saved: Config, given: Config) -> Iterator[tuple[str, object, object]]:
    there, here = saved.compression, given.compression
    if there.name != here.name:
        yield "compression", there.name, here.name
        return
    if not isinstance(there, CodecConfig) or not isinstance(here, CodecConfig):
        return
    residual = feeds_back(there)
    if residual and not feeds_back(here):
        yield "compression.error_feedback", True, False
    adapts, adapts_here = (bool(getattr(getattr(part, "lgreco", None), "period", 0)) for part in (there, here))
    if adapts != adapts_here:
        yield from _other("compression.lgreco", there.lgreco, here.lgreco, "period")  # type: ignore[attr-defined]
    elif adapts:  # what it measures and chooses is kept by candidate
        yield from _other("compression.lgreco", there.lgreco, here.lgreco, "floor", "squared")  # type: ignore[attr-defined]
        yield from _other("compression", there, here, "density", "bits")
    if there.name == "powersgd":
        yield from _other("compression", there, here, "rank")
    if residual or adapts or there.name == "powersgd":  # one tensor of state for each that is encoded
        yield from _other("compression", there, here, "min_size")


def _other(section: str, there: object, here: object, *names: str) -> Iterator[tuple[str, object, object]]:
    for name in names:
        saved, given = getattr(there, name, None), getattr(here, name, None)
        if saved != given:
            yield f"{section}.{name}", saved, given


def _flat(prefix: str, part: object) -> Iterator[tuple[str, object]]:
    for entry in dataclasses.fields(part):  # type: ignore[arg-type]
        value = getattr(part, entry.name)
        if dataclasses.is_dataclass(value):
            yield from _flat(f"{prefix}.{entry.name}", value)
        else:
            yield f"{prefix}.{entry.name}", value


def _typed(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return f"[{','.join(_typed(one) for one in value)}]"
    if isinstance(value, str) and (not _PLAIN_WORD.fullmatch(value) or value.lower() in _NOT_WORDS):
        escaped = value.replace("'", "\\'")
        return f"'{escaped}'"
    return str(value)
