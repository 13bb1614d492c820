"""Digests of what closed rounds left: taken at once of small anchors, in slices beside training of large ones."""

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from swarmkit.optim.snapshot import digest_parts, digest_tensors

logger = logging.getLogger(__name__)
AT_ONCE_BYTES = 64 << 20  # hashed in well under a tenth of a second
SLICE_BYTES = 4 << 20  # how much is hashed while the next inner step has to wait
EVERY_ROUNDS = 50  # where each step is a round, a digest after each would cost as much as the step
REMEMBERED = 64
MAX_DIVERGED = 3  # times in a row that the others had another digest, though this peer had just fetched their state


@dataclass(frozen=True, slots=True)
class Agreed:
    """What a peer holds after a round; members with the same lineage must have the same digest."""

    round: int
    lineage: str
    digest: str


class Digests:
    """Knows the digest that belongs to each of the last lineages, and tells whoever wants to hear of new ones."""

    def __init__(self, lock: "threading.RLock | threading.Lock") -> None:
        """`lock` guards the tensors."""
        self.on_agreed: list[Callable[[Agreed], None]] = []
        self._lock = lock
        self._known: dict[str, str] = {}
        self._running: threading.Thread | None = None
        self._diverged = 0
        self._epoch = 0  # of the tensors: another one has been put into them as a whole

    def of(self, lineage: str) -> str:
        """The digest after that lineage's last round; empty while it is not known, or not to be compared."""
        return self._known.get(lineage, "") if self.are_comparable else ""

    @property
    def are_comparable(self) -> bool:
        """False once this machine has shown that it computes other bits than the others from the same state.

        Different hardware may round differently in the last bit; to fetch the state after every round would help
        nobody.
        """
        return self._diverged < MAX_DIVERGED

    def note_outcome(self, *, diverged: bool) -> None:
        """Note how the others took a digest: as theirs, or not."""
        if self._diverged >= MAX_DIVERGED:
            return
        self._diverged = self._diverged + 1 if diverged else 0
        if self._diverged == MAX_DIVERGED:
            logger.error(
                "this peer's anchor differed from the majority's %d times in a row, each time right after it had "
                "fetched theirs: its hardware or its software computes other bits. From here on it takes part without "
                "comparing; keep the anchor on the CPU (offload) or use equal machines to have them equal",
                MAX_DIVERGED,
            )

    def forget(self) -> None:
        """Another state was put into the tensors: of its lineage this peer may have held something else before."""
        with self._lock:
            self._known.clear()
            self._epoch += 1

    def take(self, round: int, tensors: Mapping[str, Tensor], lineage: Callable[[], str]) -> None:
        """Find the digest of what `round` left in `tensors`, if they stay of that lineage for long enough."""
        before = lineage()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if size <= AT_ONCE_BYTES:
            with self._lock:
                digest = digest_tensors(tensors)
            self._note(Agreed(round, before, digest))
        elif self._running is None or not self._running.is_alive():
            work = (round, tensors, lineage, before)
            self._running = threading.Thread(target=self._in_slices, args=work, name="swarmkit-digest", daemon=True)
            self._running.start()

    def wait(self, timeout: float) -> None:
        """Wait for a digest that is being taken."""
        if self._running is not None:
            self._running.join(timeout)

    def _in_slices(self, round: int, tensors: Mapping[str, Tensor], lineage: Callable[[], str], before: str) -> None:
        digest = hashlib.blake2b(digest_size=16)
        parts = digest_parts(tensors, SLICE_BYTES)
        epoch = self._epoch
        while True:
            with self._lock:
                if lineage() != before or self._epoch != epoch:
                    return  # the next round has moved them: its digest will be taken
                part = next(parts, None)
                if part is None:
                    break
                digest.update(part)
        self._note(Agreed(round, before, digest.hexdigest()))

    def _note(self, agreed: Agreed) -> None:
        self._known[agreed.lineage] = agreed.digest
        while len(self._known) > REMEMBERED:
            self._known.pop(next(iter(self._known)))
        for callback in self.on_agreed:
            callback(agreed)
