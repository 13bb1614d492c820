"""Every error that swarmkit raises on purpose.

Exception
|-- SwarmError            a network failure; the training loop survives it
|   |-- RoundFailed       a round gave this peer no result
|   |-- JoinFailed        no run at the address, another version, or no state to fetch
|   |-- PeerUnreachable   a peer could not be called
|   `-- ProtocolError     a peer sent what the protocol does not allow
|-- TrainingDiverged      the loss is not a number any more
`-- ValueError
    |-- ConfigError       a setting that cannot work: key, value, reason
    |-- CheckpointError   a checkpoint that is missing, incomplete or corrupt
    `-- DataError         a data source that is missing, empty or malformed
"""

from swarmkit.optim.errors import RoundFailed, SwarmError
from swarmkit.peers.errors import JoinFailed, PeerUnreachable, ProtocolError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "JoinFailed",
    "PeerUnreachable",
    "ProtocolError",
    "RoundFailed",
    "SwarmError",
    "TrainingDiverged",
]


class TrainingDiverged(Exception):
    """The loss is not finite any more; the message names the step and the peer."""


class ConfigError(ValueError):
    """A setting that cannot work; the message names the key, the value, the reason and the way out."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete or corrupt; the message names the file."""


class DataError(ValueError):
    """A data source that is missing, empty or malformed; the message names it."""
