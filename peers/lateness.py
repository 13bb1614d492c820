"""Names peers that hold a round up, and what is late, from the rounds' own timings."""

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmkit.peers.timings import RoundTimings, Seconds, lower_median

HISTORY = 32  # rounds that a peer is compared with
LEARNT = 5  # rounds before a peer's own history counts
STREAK = 3  # rounds in a row before a peer is named, or is named no more
MIN_LATE_S = 0.3  # less is nobody's trouble
TIMES = 2.0  # as long as usual, or as the others take
SPREADS = 6.0  # beyond the usual, in standard deviations by the median absolute deviation
MAD_TO_SIGMA = 1.4826
# Of the time between rounds: a peer that comes late by less than this share holds nobody up.
COMPUTE_SHARE = 0.2
MAX_TRACKED = 1024  # peers and phases, so that a run of many short-lived peers does not fill the memory
PHASES = {
    "compute": "{peer} comes late to rounds",
    "upload": "{peer} uploads slowly",
    "download": "{peer} downloads slowly",
    "link": "the link from {peer} to its one partner is slow",  # of two, nobody can tell whose end
    "silent": "{peer} is silent",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A peer that holds the others up, or no longer does."""

    peer_id: str
    what: str  # see PHASES
    seconds: float
    usual_s: float  # what was to be expected of it
    round: int
    ended: bool = False
    gone: bool = False  # it ended because the peer is out of the run

    @property
    def text(self) -> str:
        """For people."""
        said = PHASES[self.what].format(peer=self.peer_id[-8:])
        if self.gone:
            return f"{self.peer_id[-8:]} is gone"
        if self.ended:
            return f"no longer: {said} (round {self.round}: {self.seconds:.2f} s)"
        usual = "" if self.what == "silent" else f", {self.usual_s:.2f} s would be usual"
        return f"{said} (round {self.round}: {self.seconds:.2f} s{usual})"


@dataclass(slots=True)
class _Track:
    """What is known of one phase of one peer."""

    late: int = 0  # rounds in a row
    fine: int = 0
    is_named: bool = False


class LatenessWatch:
    """Compares every member with its own past and with the others, round by round; needs no clock.

    All members are told the same timings, so all name the same peers.
    """

    def __init__(self) -> None:
        self._histories: dict[tuple[str, str, str], deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))
        self._tracks: dict[tuple[str, str], _Track] = defaultdict(_Track)

    def observe(
        self, name: str, index: int, members: Sequence[str], timings: RoundTimings, period_s: float
    ) -> list[Fault]:
        """Take a closed round; returns the faults that have begun or ended with it.

        `name` tells rounds of different sizes apart, `period_s` is the usual time between two of them.
        """
        faults = []
        for what, values in _phases(timings):
            for i, (peer, value) in enumerate(zip(members, values, strict=True)):
                if value is not None:
                    # Between two, the other direction says nothing: one end's trouble often slows both.
                    others = None if what == "link" else lower_median([v for j, v in enumerate(values) if j != i])
                    faults += self._judge(name, index, peer, what, value, others, period_s)
        self._forget(members)
        return faults

    def _judge(
        self, name: str, index: int, peer: str, what: str, value: float, others: Seconds, period_s: float
    ) -> list[Fault]:
        history = self._histories[name, peer, what]
        usual, spread = _usual(history)
        # Late is who takes longer than the others, and than it used to itself where it has a past without fault: a
        # round that is larger for all is nobody's fault, and a fast link that is now like the others' is no trouble.
        expected = max((known for known in (usual, others) if known is not None), default=value)
        least = max(MIN_LATE_S, COMPUTE_SHARE * period_s) if what == "compute" else MIN_LATE_S
        is_late = value - expected > max(least, (TIMES - 1) * expected, SPREADS * spread)
        track = self._tracks[peer, what]
        if is_late:
            track.late, track.fine = track.late + 1, 0
        else:
            history.append(value)
            track.late, track.fine = 0, track.fine + 1
        if track.is_named == is_late or max(track.late, track.fine) < STREAK:
            return []
        track.is_named = is_late
        return [Fault(peer_id=peer, what=what, seconds=value, usual_s=expected, round=index, ended=not is_late)]

    def forget(self, peer: str, index: int) -> list[Fault]:
        """A peer is out of the run: what it was named for has ended."""
        ended = []
        for key in [key for key in self._tracks if key[0] == peer]:
            if self._tracks.pop(key).is_named:
                ended.append(
                    Fault(peer_id=peer, what=key[1], seconds=0.0, usual_s=0.0, round=index, ended=True, gone=True)
                )
        for long in [key for key in self._histories if key[1] == peer]:
            del self._histories[long]
        return ended

    def _forget(self, members: Sequence[str]) -> None:
        """Bound what is kept: who is not in this round goes first."""
        if len(self._tracks) > MAX_TRACKED:
            for peer in {key[0] for key in self._tracks} - set(members):
                self.forget(peer, 0)


class SilenceWatch:
    """Names peers that were in rounds, said no good-bye, and are not heard any more."""

    def __init__(
        self, silent_for: Callable[[str], float | None], has_left: Callable[[str], bool], limit_s: float
    ) -> None:
        """`silent_for` gives the seconds since a peer was heard, None once it is out of the table."""
        self._silent_for = silent_for
        self._has_left = has_left
        self._limit_s = limit_s
        self._known: dict[str, bool] = {}  # peers that were in rounds, and whether they are named

    def observe(self, index: int, members: Sequence[str]) -> tuple[list[Fault], list[str]]:
        """Take a closed round; returns faults that have begun or ended, and who is out of the run."""
        faults, gone = [], []
        for peer in members:
            if self._known.get(peer):
                faults.append(self._fault(peer, index, 0.0, ended=True))
            self._known[peer] = False
        for peer in [peer for peer in self._known if peer not in members]:
            seconds = self._silent_for(peer)
            if self._has_left(peer) or (seconds is None and self._known[peer]):
                if self._known.pop(peer):
                    faults.append(self._fault(peer, index, 0.0, ended=True, gone=True))
                gone.append(peer)
            elif not self._known[peer] and (seconds is None or seconds > self._limit_s):
                self._known[peer] = True
                faults.append(self._fault(peer, index, self._limit_s if seconds is None else seconds))
        return faults, gone

    def _fault(self, peer: str, index: int, seconds: float, *, ended: bool = False, gone: bool = False) -> Fault:
        return Fault(
            peer_id=peer, what="silent", seconds=seconds, usual_s=self._limit_s, round=index, ended=ended, gone=gone
        )


def _phases(timings: RoundTimings) -> list[tuple[str, Sequence[Seconds]]]:
    came = timings.arrived
    compute: list[Seconds] = []
    for i, arrived in enumerate(came):
        # Against the others' middle: one that is early makes nobody late.
        others = lower_median([other for j, other in enumerate(came) if j != i])
        compute.append(None if arrived is None or others is None else max(0.0, arrived - others))
    if len(came) == 2:
        return [("compute", compute), ("link", timings.upload)]
    return [("compute", compute), ("upload", timings.upload), ("download", timings.download)]


def _usual(history: Sequence[float]) -> tuple[Seconds, float]:
    """Median and standard deviation of a peer's normal rounds, robustly; None before it has enough of them."""
    if len(history) < LEARNT:
        return None, 0.0
    median = statistics.median(history)
    return median, MAD_TO_SIGMA * statistics.median(abs(value - median) for value in history)
