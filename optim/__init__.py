"""The algorithms: ordinary torch optimizers that know a Collective, never the network."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmkit.optim.allreduce import AllReduce
    from swarmkit.optim.averaging import Averaging, Pending, PlainAveraging
    from swarmkit.optim.co2 import CO2
    from swarmkit.optim.collective import Collective, Gathered, Reduced, RoundKey
    from swarmkit.optim.compression.blockwise import Blockwise
    from swarmkit.optim.compression.casting import Casting
    from swarmkit.optim.compression.codec import Codec
    from swarmkit.optim.compression.compressed import CompressedAveraging
    from swarmkit.optim.compression.lgreco import LGreCo
    from swarmkit.optim.compression.minifloat import E3M0
    from swarmkit.optim.compression.powersgd import PowerSGD
    from swarmkit.optim.compression.qsgd import QSGD
    from swarmkit.optim.compression.random_k import RandomK
    from swarmkit.optim.compression.registry import make_codec
    from swarmkit.optim.compression.route import Route
    from swarmkit.optim.compression.sparse import TopK
    from swarmkit.optim.compression.ternary import TernGrad
    from swarmkit.optim.demo import DeMo
    from swarmkit.optim.diloco import DiLoCo
    from swarmkit.optim.errors import RoundFailed, SwarmError
    from swarmkit.optim.local_sgd import LocalSGD
    from swarmkit.optim.pace import Pace
    from swarmkit.optim.round_report import RoundReport
    from swarmkit.optim.schedule import Every, QuadraticSync, Schedule
    from swarmkit.optim.synced import SyncedOptimizer, parameter_names

__all__ = [
    "AllReduce",
    "Averaging",
    "Blockwise",
    "CO2",
    "Casting",
    "Codec",
    "Collective",
    "CompressedAveraging",
    "DeMo",
    "DiLoCo",
    "E3M0",
    "Every",
    "Gathered",
    "LGreCo",
    "LocalSGD",
    "Pace",
    "Pending",
    "PlainAveraging",
    "PowerSGD",
    "QSGD",
    "QuadraticSync",
    "RandomK",
    "Reduced",
    "RoundFailed",
    "RoundKey",
    "RoundReport",
    "Route",
    "Schedule",
    "SwarmError",
    "SyncedOptimizer",
    "TernGrad",
    "TopK",
    "make_codec",
    "parameter_names",
]

# Imported on first use: the command line reads error classes and settings, and torch takes seconds.
_MODULES = {
    "allreduce": ["AllReduce"],
    "averaging": ["Averaging", "Pending", "PlainAveraging"],
    "co2": ["CO2"],
    "collective": ["Collective", "Gathered", "Reduced", "RoundKey"],
    "compression": [
        "Blockwise",
        "Casting",
        "Codec",
        "CompressedAveraging",
        "E3M0",
        "LGreCo",
        "PowerSGD",
        "QSGD",
        "RandomK",
        "Route",
        "TernGrad",
        "TopK",
        "make_codec",
    ],
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
