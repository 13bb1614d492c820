"""What a trainer sees of a running swarm: who is there, the state it can fetch, whether to go on."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from swarmkit.config import Config
from swarmkit.download_bar import DownloadBar
from swarmkit.metrics import EventLog
from swarmkit.optim.synced import RoundReport
from swarmkit.peers.node import Node
from swarmkit.peers.roster import PeerRecord
from swarmkit.peers.transfer import Transfer
from swarmkit.surroundings import Surroundings

Say = Callable[[str], None]
# A first word while others are missing, and then a reminder.
FIRST_WORD_S = 5.0
REMINDER_S = 60.0
LINGER_S = 10.0
# Of round_timeout_s: how long before the others a joiner may come to a round.
EARLY_SHARE = 0.4


class Neighbours(Surroundings):
    """The trainer's view of a node."""

    def __init__(
        self,
        node: Node,
        config: Config,
        *,
        events: EventLog,
        stop: threading.Event,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.node = node
        self.config = config
        self.expected = config.network.min_peers  # replicas without which training does not go on
        self.gave_up = False
        self._events = events
        self._stop = stop
        self._say = say

    # -- what the trainer calls ----------------------------------------------------------------------------------------

    def fetch_state(self) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
        """See Surroundings; the others read the progress in this peer's state."""
        percent = -5
        bar = DownloadBar(self._say)

        def progress(at: Transfer) -> None:
            nonlocal percent
            bar.show(at)
            if at.note:
                self._events.emit("download", note=at.note, bytes=at.done, total=at.total)
            if at.total and 100 * at.done // at.total >= percent + 5:
                percent = 100 * at.done // at.total
                self.node.heartbeat(state=f"downloading {percent} %")

        try:
            return self.node.fetch_state(progress)
        finally:
            bar.close()

    def await_round(self, round: int, *, step: int, tokens_per_step: int) -> None:
        """See Surroundings; a round that this peer opened alone, long before the others, would fail for everybody."""
        margin = self.config.network.round_timeout_s * EARLY_SHARE
        seen: dict[tuple[str, int], float] = {}  # when a peer was first heard to be at a step
        while not self._stop.is_set():
            now = self._clock()
            others = [record for record in self.active() if record.peer_id != self.node.peer_id]
            left = []
            for record in others:
                since = seen.setdefault((record.peer_id, record.step), now)
                if record.round > round or record.tokens_per_s <= 0:
                    return
                left.append((step - record.step) * tokens_per_step / record.tokens_per_s - (now - since))
            if not left or min(left) <= margin:
                return
            self.node.heartbeat(state=f"joining in {min(left):.0f} s")
            self._stop.wait(min(self.config.network.heartbeat_s, max(0.05, min(left) - margin)))

    def report(self, **values: object) -> None:
        """See Surroundings."""
        self.node.heartbeat(**values, bytes_sent=self.node.bytes_sent, bytes_received=self.node.bytes_received)

    def change_state(self, state: str) -> None:
        """See Surroundings."""
        self._events.emit("state", state=state)
        try:
            # A peer that leaves has no time for those who do not answer.
            self.node.announce(state, wait=not self._stop.is_set())
        except TimeoutError:
            self._say(f"nobody could be told that this peer is {state} now; the next heartbeat will")

    def state_of(self, peer_id: str) -> str:
        """See Surroundings."""
        return next((record.state for record in self.node.table() if record.peer_id == peer_id), "gone")

    def disagreement(self) -> str:
        """See Surroundings."""
        return self.node.disagreement()

    def may_go_on(self, report: RoundReport | None) -> bool:
        """See Surroundings: fewer replicas than network.min_peers wait for more, as long as max_wait_s.

        Raises NotInvited once this peer's invitation has ended: nobody meets it any more.
        """
        self.node.check_invited()
        if self.expected < 2 or report is None or len(report.members) >= self.expected:
            return True
        if len(self.active()) >= self.expected:
            return True
        self.change_state("waiting")
        if not self.wait_for(self.expected):
            return False
        self.change_state("training")
        return True

    # -- waiting -------------------------------------------------------------------------------------------------------

    def active(self) -> list[PeerRecord]:
        """Replicas that take part in rounds, this one included."""
        return [record for record in self.node.table() if record.is_active]

    def wait_for(self, count: int, still: Callable[[int], int] = lambda count: count) -> bool:
        """Wait until `count` replicas are there, saying why; False when the time is up or this peer has to leave.

        `still` may lower the count while it waits.
        """
        started = self._clock()
        said = started - REMINDER_S + FIRST_WORD_S
        while not self._stop.is_set():
            count = still(count)
            if self.node.wait_for_peers(count, timeout=0.5):
                return True
            waited = self._clock() - started
            if waited > self.config.network.max_wait_s:
                self._say(f"gave up: {self._missing(count)} after {waited:.0f} s (network.max_wait_s)")
                self.gave_up = True
                return False
            if self._clock() - said >= REMINDER_S:
                said = self._clock()
                left = self.config.network.max_wait_s - waited
                self._say(f"waiting: {self._missing(count)}; giving up in {left:.0f} s")
        return False

    def _missing(self, count: int) -> str:
        others = [record for record in self.node.table() if record.peer_id != self.node.peer_id]
        listed = ", ".join(f"{record.peer_id[-8:]} is {record.state}" for record in others) or "no other peer is known"
        return f"{len(self.active())} of {count} replicas are here ({listed})"

    def linger(self) -> None:
        """Stay a moment after the last round: a peer that missed it can still get the state from here."""
        deadline = self._clock() + min(LINGER_S, self.config.network.round_timeout_s)
        while self._clock() < deadline and not self._stop.is_set():
            others = [record for record in self.active() if record.peer_id != self.node.peer_id]
            if all(record.step >= self.config.steps for record in others):
                return
            self._stop.wait(0.2)

    # -- data slots ----------------------------------------------------------------------------------------------------

    def claim_slot(self) -> int:
        """Take the lowest slot of the data that nobody has; of two who want the same the earlier peer keeps it."""
        slot = -1
        for _ in range(5):
            others = [r for r in self.node.refresh() if r.peer_id != self.node.peer_id and r.slot >= 0]
            mine = next(record for record in self.node.table() if record.peer_id == self.node.peer_id)
            rivals = {r.slot for r in others if (r.joined_at, r.peer_id) < (mine.joined_at, mine.peer_id)}
            if slot >= 0 and slot not in rivals:
                return slot
            taken = {record.slot for record in others}
            slot = next(number for number in range(len(taken) + 1) if number not in taken)
            self.node.heartbeat(slot=slot)
            self.node.announce(mine.state)
        return slot
