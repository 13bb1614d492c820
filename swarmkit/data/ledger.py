"""A peer's account of its share of the data: which samples it has drawn, and which of them a closed round has taken."""

from dataclasses import dataclass


@dataclass(slots=True)
class Ledger:
    """Positions in one share, counted through all epochs; samples in [first, mark) are learnt, [mark, position) drawn.

    Rounds take samples in the order in which they were drawn, so that what a peer has learnt is always one range. What
    no round can take any more is drawn again: the share has no hole where its peer fell behind.
    """

    first: int = 0
    mark: int = 0
    position: int = 0
    redrawn: int = 0  # samples that were drawn in vain

    def begin(self, position: int) -> None:
        """Take the share over from here."""
        if position < 0:
            raise ValueError(f"position={position}: must not be negative")
        self.first = self.mark = self.position = position

    def resume(self, mark: int, position: int) -> None:
        """Go on from a checkpoint in the middle of a window."""
        if not 0 <= mark <= position:
            raise ValueError(f"mark={mark}, position={position}: must be a part of a share")
        self.first, self.mark, self.position = mark, mark, position

    def draw(self, samples: int) -> None:
        """Note that the next samples were drawn."""
        self.position += samples

    def learn(self, samples: int) -> None:
        """Note that a round took so many; what was drawn before this account began is in no share of it."""
        self.mark = min(self.mark + samples, self.position)

    def give_up(self) -> int:
        """Note that no round will take what was drawn since the mark; returns where to draw on."""
        self.redrawn += self.position - self.mark
        self.position = self.mark
        return self.mark
