"""Exit codes of the command and of peers, and which error ends in which."""

from enum import IntEnum

from swarmkit.errors import (
    AccessRefused,
    AddressError,
    CheckpointError,
    ClosedPort,
    ConfigError,
    DaemonFailed,
    DataError,
    KeyFileError,
    NoAnswer,
    NotAPeer,
    NotInvited,
    OtherVersion,
    SwarmError,
    TrainingDiverged,
    UnknownName,
    UnknownRun,
    WrongPeerId,
)


class Exit(IntEnum):
    """Exit codes; 130 after Ctrl-C, 0 also after an orderly leave."""

    ok = 0
    error = 1
    settings = 2  # a setting, checkpoint or data source that cannot work
    not_joined = 3  # the run could not be entered, for a reason without a code of its own, or for several
    too_few = 4  # fewer than network.min_peers for longer than network.max_wait_s
    diverged = 5  # the loss is not finite
    # Why a run cannot be joined; README.md has the table.
    address = 10  # not the address of a peer
    closed_port = 11
    no_answer = 12
    unknown_name = 13
    wrong_peer_id = 14
    not_a_peer = 15
    other_version = 16
    unknown_run = 17
    not_invited = 18
    daemon = 19  # p2pd cannot start here


# Errors that users can do something about: they are told in a line, not in a traceback. The first that fits counts.
CODES: dict[type[Exception], Exit] = {
    TrainingDiverged: Exit.diverged,
    ClosedPort: Exit.closed_port,
    NoAnswer: Exit.no_answer,
    UnknownName: Exit.unknown_name,
    WrongPeerId: Exit.wrong_peer_id,
    NotAPeer: Exit.not_a_peer,
    OtherVersion: Exit.other_version,
    UnknownRun: Exit.unknown_run,
    NotInvited: Exit.not_invited,
    AccessRefused: Exit.not_invited,
    DaemonFailed: Exit.daemon,
    SwarmError: Exit.not_joined,
    AddressError: Exit.address,
    ConfigError: Exit.settings,
    CheckpointError: Exit.settings,
    DataError: Exit.settings,
    KeyFileError: Exit.settings,
}
EXPECTED = tuple(CODES)


def exit_code(error: Exception) -> Exit:
    """The code for an error."""
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), Exit.error)
