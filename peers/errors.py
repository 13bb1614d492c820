"""Errors of the network layer; the whole tree is drawn in swarmkit/errors.py."""

from enum import Enum

from swarmkit.optim.errors import SwarmError


class Refusal(Enum):
    """Why a peer of a closed run is refused."""

    not_invited = "not invited"
    expired = "expired"
    revoked = "revoked"
    forged = "forged"
    wrong_run = "wrong run"


class JoinFailed(SwarmError):
    """The run cannot be joined; the message says which of address, peer id, version or state is the cause."""


class ClosedPort(JoinFailed):
    """The host answers, but nothing listens on the port."""


class NoAnswer(JoinFailed):
    """The host does not answer, or no way leads there."""


class UnknownName(JoinFailed):
    """The host's name cannot be resolved."""


class WrongPeerId(JoinFailed):
    """A libp2p host answers, but proves to be another peer than the address says."""


class NotAPeer(JoinFailed):
    """Something listens, but it is no peer of swarmkit."""


class OtherVersion(JoinFailed):
    """The run speaks a protocol that this version does not."""


class UnknownRun(JoinFailed):
    """The peers at the address know no run of that name, none at all, or several to choose from."""


class DaemonFailed(JoinFailed):
    """This machine's own libp2p daemon, p2pd, cannot start."""


class NotInvited(JoinFailed):
    """A closed run does not let this peer in; `refusal` is the cause."""

    def __init__(self, text: str, refusal: Refusal = Refusal.not_invited) -> None:
        super().__init__(f"{refusal.value}: {text}")
        self.refusal = refusal


class PeerUnreachable(SwarmError):
    """A peer could not be called: its process, its host or the link is gone, or it did not answer in time."""


class ProtocolError(SwarmError):
    """A peer sent something that the protocol does not allow."""


class AccessRefused(ProtocolError):
    """A peer of a closed run has no valid invitation; `refusal` is the cause."""

    def __init__(self, text: str, refusal: Refusal = Refusal.not_invited) -> None:
        super().__init__(f"{refusal.value}: {text}")
        self.refusal = refusal
        self.text = text


class KeyFileError(ValueError):
    """A file that should hold a private key cannot be used; it is never overwritten."""
