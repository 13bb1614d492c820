"""Errors that a synchronisation raises; the whole tree is drawn in swarmkit/errors.py."""


class SwarmError(Exception):
    """Something outside this process went wrong; training may go on."""


class KeyTaken(ValueError):
    """A round's key has been used before, or others use it for another operation."""


class RoundFailed(SwarmError):
    """A round closed without a result for this peer; nothing of it was applied.

    `missed` is True when the round closed for others without this peer, which therefore no longer holds the anchor
    that the others hold and has to fetch the state before it contributes again. `diverged` is True when that is so
    because what it holds differs from what the majority holds after the same rounds.
    """

    def __init__(self, reason: str, *, missed: bool = False, diverged: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.missed = missed
        self.diverged = diverged
