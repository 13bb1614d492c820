"""Options that strategies share, how help() shows them, and what a misspelt one is told."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Required, TypedDict, get_args, get_origin, is_typeddict

import torch
from torch import Tensor

from swarmkit.optim.averaging import Averaging
from swarmkit.optim.collective import Collective
from swarmkit.optim.compression.codec import Codec
from swarmkit.optim.misspelt import nearest
from swarmkit.optim.pace import Pace
from swarmkit.optim.partition import FragmentBy
from swarmkit.optim.schedule import Schedule

Clock = Callable[[], float]


class EveryStep(TypedDict, total=False):
    """What every strategy takes; see SyncedOptimizer."""

    collective: Required[Collective]
    names: Mapping[Tensor, str] | None
    buffers: Sequence[Tensor]
    offload: torch.device | str | None
    clock: Clock


class Coded(EveryStep, total=False):
    """What a strategy takes whose payload a codec may compress; see SyncedOptimizer."""

    averaging: Averaging | None
    compression: Codec | None


class Windows(Coded, total=False):
    """What a strategy takes that trains alone for a window of steps; see SyncedOptimizer."""

    sync: Schedule | None
    pace: Pace | None


class Overlapping(Windows, total=False):
    """What a strategy takes whose rounds may fly while training goes on."""

    averaging_for: Callable[[int], Averaging] | None


class Fragments(Overlapping, total=False):
    """What a strategy takes whose model may meet in parts; see OverlappedOptimizer."""

    fragments: int
    fragment_by: FragmentBy
    staggered: bool


def signature(of: type) -> inspect.Signature:
    """How a class is called: where its __init__ passes options on, these stand for themselves, with their defaults."""
    first, *others = [inspect.signature(vars(base)["__init__"]) for base in of.__mro__ if "__init__" in vars(base)]
    own = list(first.parameters.values())[1:]
    if not (own and own[-1].kind is inspect.Parameter.VAR_KEYWORD):
        return first.replace(parameters=own)
    *own, passed = own
    (names,) = get_args(passed.annotation) or (None,)
    if not is_typeddict(names):
        return first.replace(parameters=[*own, passed])
    found = {p.name: p for p in own}
    for name, annotation in names.__annotations__.items():
        inherited = (base.parameters[name] for base in others if name in base.parameters)
        default = next((p.default for p in inherited), inspect.Parameter.empty)
        bare = get_args(annotation)[0] if get_origin(annotation) is Required else annotation
        option = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=bare)
        found.setdefault(name, option)
    return first.replace(parameters=list(found.values()))


def check_options(of: type, options: Iterable[str], elsewhere: Mapping[str, str]) -> None:
    """Raise TypeError for an option that a class does not have, naming the nearest one.

    For one that only others have, `elsewhere` says why: ValueError.
    """
    known = list(inspect.signature(of).parameters)
    for name in options:
        if name in elsewhere:
            raise ValueError(f"{name}: {elsewhere[name]}")
        if name not in known:
            raise TypeError(f"{of.__name__} has no option {name!r}{nearest(name, known)}")
