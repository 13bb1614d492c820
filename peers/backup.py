"""Backup workers: when a round should begin without its slowest members (arXiv 1604.00981, dynamic: 2004.14696)."""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

HISTORY = 16  # rounds that are looked back upon
ENOUGH = 4  # rounds before anything is concluded from them
GAIN = 1.1  # by which fewer members must do more than all: whoever is left out has to fetch the state
SLACK_SHARE, SLACK_S = 0.25, 0.05  # on top of when the members waited for usually come


class Arrivals:
    """When members came to the last rounds of one name, and how many are worth waiting for."""

    def __init__(self) -> None:
        self._rounds: deque[dict[str, float]] = deque(maxlen=HISTORY)  # member -> seconds after the first
        self._firsts: deque[tuple[int, float]] = deque(maxlen=HISTORY + 1)  # index and clock of first arrivals
        self._open: dict[int, tuple[float, dict[str, float]]] = {}

    def note(self, index: int, peer_id: str, now: float) -> None:
        """A member came to a round, in time or after it had closed."""
        if index not in self._open:
            if self._firsts and index <= self._firsts[-1][0]:
                return  # a round long past
            self._open[index] = (now, {})
            self._firsts.append((index, now))
            self._rounds.append(self._open[index][1])
            while len(self._open) > 2:
                # Rounds before the last one: who has not come to them by now comes to none of them.
                del self._open[min(self._open)]
        first, offsets = self._open[index]
        offsets.setdefault(peer_id, now - first)

    def patience(self, members: Sequence[str]) -> tuple[int, float]:
        """How many of `members` a round needs, and how many seconds after the first it may then begin.

        k members that are there t(k) seconds after the first take k / (window + t(k)) windows a second together; the k
        with the most is chosen. All of them, without a limit, while too little is known or little would be gained.
        """
        everybody = (len(members), float("inf"))
        known = [offsets for offsets in self._rounds if len(offsets) > 1]
        if len(members) < 3 or len(known) < ENOUGH:
            return everybody
        usual = sorted(self._usual(known, member) for member in members)
        window = self._window(known)
        rates = {k: k / (window + usual[k - 1]) for k in range(len(members) // 2 + 1, len(members) + 1)}
        best = max(rates, key=lambda k: (rates[k], k))
        if best == len(members) or rates[best] < GAIN * rates[len(members)]:
            return everybody
        at = usual[best - 1]
        return best, at + max(SLACK_S, SLACK_SHARE * at)

    @staticmethod
    def _usual(known: Sequence[Mapping[str, float]], member: str) -> float:
        """When a member usually comes; one that is new is taken for quick."""
        seen = [offsets[member] for offsets in known if member in offsets]
        return median(seen) if seen else 0.0

    def _window(self, known: Sequence[Mapping[str, float]]) -> float:
        """Seconds that the first member of a round usually takes from one round to the next, at least 1 ms."""
        firsts = list(self._firsts)
        periods = [
            (after - before) / (later - earlier)
            for (earlier, before), (later, after) in zip(firsts, firsts[1:], strict=False)
        ]
        waited = median(max(offsets.values()) for offsets in known)
        return max(1e-3, median(periods) - waited) if periods else 1e-3
