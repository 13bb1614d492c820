"""The algorithms: ordinary torch optimizers that know a Collective, never the network."""

from swarmkit.optim.allreduce import AllReduce
from swarmkit.optim.collective import Collective, Gathered, Reduced, RoundKey
from swarmkit.optim.diloco import DiLoCo
from swarmkit.optim.errors import RoundFailed, SwarmError
from swarmkit.optim.local_sgd import LocalSGD
from swarmkit.optim.schedule import Every, QuadraticSync, Schedule
from swarmkit.optim.synced import RoundReport, SyncedOptimizer, parameter_names

__all__ = [
    "AllReduce",
    "Collective",
    "DiLoCo",
    "Every",
    "Gathered",
    "LocalSGD",
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
