"""Exit codes of the command and of peers, and which error ends in which."""

from enum import IntEnum

from swarmkit.errors import CheckpointError, ConfigError, DataError, SwarmError, TrainingDiverged


class Exit(IntEnum):
    """Exit codes; 130 after Ctrl-C, 0 also after an orderly leave."""

    ok = 0
    error = 1
    settings = 2  # a setting, checkpoint or data source that cannot work
    not_joined = 3  # no run at the address, or it could not be entered
    too_few = 4  # fewer than network.min_peers for longer than network.max_wait_s
    diverged = 5  # the loss is not finite


# Errors that users can do something about: they are told in a line, not in a traceback.
CODES: dict[type[Exception], Exit] = {
    TrainingDiverged: Exit.diverged,
    SwarmError: Exit.not_joined,
    ConfigError: Exit.settings,
    CheckpointError: Exit.settings,
    DataError: Exit.settings,
}
EXPECTED = tuple(CODES)


def exit_code(error: Exception) -> Exit:
    """The code for an error."""
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), Exit.error)
