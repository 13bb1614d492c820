"""Watches a peer's rounds for whoever holds them up, and says so once when it begins and once when it ends."""

import logging
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from swarmkit.optim.collective import RoundKey
from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.lateness import Fault, LatenessWatch, SilenceWatch
from swarmkit.peers.roster import Roster
from swarmkit.peers.timings import RoundTimings

logger = logging.getLogger(__name__)
SILENT_BEATS = 2.5  # heartbeats that a peer outside of a round may miss before it is called silent
PERIODS = 9
MAX_NAMES = 256  # rounds of different names, such as those of fragments


class RoundWatch:
    """Takes closed rounds, in the network's loop; `on_fault` hears what begins and ends there."""

    def __init__(self, roster: Roster, heartbeat_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_fault: list[Callable[[Fault], None]] = []
        self.faults: dict[tuple[str, str], Fault] = {}  # that have not ended, by peer and what
        self._me = roster.mine.peer_id
        self._clock = clock
        self._lateness = LatenessWatch()
        self._silence = SilenceWatch(roster.silent_for, roster.has_left, SILENT_BEATS * heartbeat_s)
        self._closed: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=PERIODS))

    def closed(self, key: RoundKey, members: Sequence[str], message: object) -> None:
        """A round has closed; `message` has its timings, if the coordinator knew them.

        What is wrong with them is nothing that the round could fail of any more.
        """
        try:
            timings = RoundTimings.from_message(message, len(members))
        except ProtocolError as error:
            logger.warning("round %s: %s", key, error)
            timings = None
        period_s = self._period(key.name)
        faults, gone = self._silence.observe(key.index, [member for member in members if member != self._me])
        for peer in gone:
            faults += self._lateness.forget(peer, key.index)
        if timings is not None:
            faults += self._lateness.observe(key.name, key.index, members, timings, period_s)
        for fault in faults:
            self._tell(fault)

    def _period(self, name: str) -> float:
        """Seconds between two rounds of this name, usually."""
        if name not in self._closed and len(self._closed) >= MAX_NAMES:
            self._closed.clear()
        times = self._closed[name]
        times.append(self._clock())
        gaps = [later - earlier for earlier, later in zip(times, list(times)[1:], strict=False)]
        return statistics.median(gaps) if gaps else 0.0

    def _tell(self, fault: Fault) -> None:
        self.faults.pop((fault.peer_id, fault.what), None)
        if not fault.ended:
            self.faults[fault.peer_id, fault.what] = fault
        logger.info("%s", fault.text)
        for callback in self.on_fault:
            callback(fault)

    def summary(self) -> str:
        """The faults that have not ended, for a heartbeat."""
        return ", ".join(f"{peer[-8:]} {what}" for peer, what in sorted(self.faults))[:200]
