"""Errors of the network layer; the whole tree is drawn in swarmkit/errors.py."""

from swarmkit.optim.errors import SwarmError


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


class NotInvited(JoinFailed):
    """The run is closed, and this peer showed no valid invitation."""


class DaemonFailed(JoinFailed):
    """This machine's own libp2p daemon, p2pd, cannot start."""


class PeerUnreachable(SwarmError):
    """A peer could not be called: its process, its host or the link is gone, or it did not answer in time."""


class ProtocolError(SwarmError):
    """A peer sent something that the protocol does not allow."""
