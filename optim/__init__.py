"""The algorithms: ordinary torch optimizers that know a Collective, never the network."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmkit.optim.allreduce import AllReduce
    from swarmkit.optim.averaging import Averaging, Pending, PlainAveraging
    from swarmkit.optim.co2 import CO2
    from swarmkit.optim.collective import Collective, Gathered, Reduced, RoundKey
    from swarmkit.optim.demo import DeMo
    from swarmkit.optim.diloco import DiLoCo
    from swarmkit.optim.errors import RoundFailed, SwarmError
    from swarmkit.optim.local_sgd import LocalSGD
    from swarmkit.optim.pace import Pace
    from swarmkit.optim.round_report import RoundReport
    from swarmkit.optim.schedule import Every, QuadraticSync, Schedule
    from swarmkit.optim.synced import SyncedOptimizer, parameter_names

__all__ = [
    "CO2",
    "AllReduce",
    "Averaging",
    "Collective",
    "DeMo",
    "DiLoCo",
    "Every",
    "Gathered",
    "LocalSGD",
    "Pace",
    "Pending",
    "PlainAveraging",
    "QuadraticSync",
    "Reduced",
    "RoundFailed",
    "RoundKey",
    "RoundReport",
    "Schedule",
    "SwarmError",
    "SyncedOptimizer",
    "parameter_names",
]

# Imported on first use: the command line reads error classes and settings, and torch takes seconds.
_MODULES = {
    "allreduce": ["AllReduce"],
    "averaging": ["Averaging", "Pending", "PlainAveraging"],
    "co2": ["CO2"],
    "collective": ["Collective", "Gathered", "Reduced", "RoundKey"],
    "demo": ["DeMo"],
    "diloco": ["DiLoCo"],
    "errors": ["RoundFailed", "SwarmError"],
    "local_sgd": ["LocalSGD"],
    "pace": ["Pace"],
    "round_report": ["RoundReport"],
    "schedule": ["Every", "QuadraticSync", "Schedule"],
    "synced": ["SyncedOptimizer", "parameter_names"],
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'swarmkit.optim' has no attribute {name!r}")
    return getattr(importlib.import_module(f"swarmkit.optim.{_HOMES[name]}"), name)
