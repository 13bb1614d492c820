"""Errors of the network layer; the whole tree is drawn in swarmkit/errors.py."""

from swarmkit.optim.errors import SwarmError


class JoinFailed(SwarmError):
    """The run cannot be joined; the message says which of address, peer id, version or state is the cause."""


class PeerUnreachable(SwarmError):
    """A peer could not be called: its process, its host or the link is gone, or it did not answer in time."""


class ProtocolError(SwarmError):
    """A peer sent something that the protocol does not allow."""
