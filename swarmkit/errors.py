"""Every error that swarmkit raises on purpose.

Exception
|-- SwarmError            a network failure; the training loop survives it
|   |-- RoundFailed       a round gave this peer no result
|   |-- JoinFailed        the run cannot be joined
|   |   |-- ClosedPort    the host is up, nothing listens on the port
|   |   |-- NoAnswer      the host does not answer, or no way leads there
|   |   |-- UnknownName   the host's name cannot be resolved
|   |   |-- WrongPeerId   another libp2p peer answers
|   |   |-- NotAPeer      something answers that is no peer of swarmkit
|   |   |-- OtherVersion  the run speaks another protocol
|   |   |-- UnknownRun    no run of that name there, none at all, or several
|   |   |-- NotInvited    the run is closed, and no valid invitation was shown
|   |   `-- DaemonFailed  this machine's p2pd cannot start
|   |-- PeerUnreachable   a peer could not be called
|   `-- ProtocolError     a peer sent what the protocol does not allow
|       `-- AccessRefused a peer of a closed run without a valid invitation
|-- TrainingDiverged      the loss is not a number any more
`-- ValueError
    |-- ConfigError       a setting that cannot work: key, value, reason
    |   `-- AddressError  what was given as a peer's address is none
    |-- CheckpointError   a checkpoint that is missing, incomplete or corrupt
    |-- KeyTaken          a round's key that is in use, or for another operation
    |-- DataError         a data source that is missing, empty or malformed
    `-- KeyFileError      a file with a private key that cannot be used
"""

from swarmkit.optim.errors import KeyTaken, RoundFailed, SwarmError
from swarmkit.peers.errors import (
    AccessRefused,
    ClosedPort,
    DaemonFailed,
    JoinFailed,
    KeyFileError,
    NoAnswer,
    NotAPeer,
    NotInvited,
    OtherVersion,
    PeerUnreachable,
    ProtocolError,
    UnknownName,
    UnknownRun,
    WrongPeerId,
)

__all__ = [
    "AccessRefused",
    "AddressError",
    "CheckpointError",
    "ClosedPort",
    "ConfigError",
    "DaemonFailed",
    "DataError",
    "JoinFailed",
    "KeyFileError",
    "KeyTaken",
    "NoAnswer",
    "NotAPeer",
    "NotInvited",
    "OtherVersion",
    "PeerUnreachable",
    "ProtocolError",
    "RoundFailed",
    "SwarmError",
    "TrainingDiverged",
    "UnknownName",
    "UnknownRun",
    "WrongPeerId",
]


class TrainingDiverged(Exception):
    """The loss is not finite any more; the message names the step and the peer."""


class ConfigError(ValueError):
    """A setting that cannot work; the message names the key, the value, the reason and the way out."""


class AddressError(ConfigError):
    """What was given as the address of a peer cannot be one; the message names it and shows what one looks like."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete or corrupt; the message names the file."""


class DataError(ValueError):
    """A data source that is missing, empty or malformed; the message names it."""
