"""Whose steps fill a window: each replica's own, or those that the swarm takes together."""

from typing import Protocol


class Pace(Protocol):
    """Tells how far the swarm has come, so that rounds open for all at once and nobody waits for the slowest.

    A window of H steps then ends when the replicas together have taken H times their number: a fast one takes more than
    H, a slow one fewer, and the weights say so. All count in the swarm's steps, learning rates and fragments included.
    Without a pace each replica takes H steps of its own and waits for the others.
    """

    def advance(self, start: int, done: int, due: int) -> int:
        """Note the progress of this replica and return the swarm's step, as far as it is known here.

        The running window began at the swarm's step `start`, this replica has taken `done` inner steps in it, and the
        next round begins at step `due`. Called after every inner step, so it must not wait for the network.
        """
        ...
