"""The swarm's pace: replicas tell the coordinator their steps, and hear how far all have come together."""

import asyncio
import logging
import threading
from collections import deque
from dataclasses import dataclass

from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.loop import NetworkThread
from swarmkit.peers.roster import Roster
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.wire import Message, field

logger = logging.getLogger(__name__)
REPORT_S = 0.1  # between two reports of a peer; the end of a window is told at once
MAX_STEPS = 1 << 53
MAX_WINDOW = 1 << 31
MEMORY = 64  # windows: more than the rounds that can be in flight at once


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replica is: `done` inner steps of its own since the swarm's step `start`; a round begins at `due`."""

    start: int
    done: int
    due: int

    def to_message(self) -> Message:
        """For the wire."""
        return {"start": self.start, "done": self.done, "due": self.due}


def read_progress(message: Message) -> Progress:
    """Read what a peer says of its progress; raises ProtocolError."""
    start = field(message, "start", int, lambda step: 0 <= step < MAX_STEPS)
    done = field(message, "done", int, lambda steps: 0 <= steps < MAX_STEPS)
    due = field(message, "due", int, lambda step: start < step <= start + MAX_WINDOW)
    return Progress(start, done, due)


class Tally:
    """Adds up what the replicas have done; kept by every peer, of use at the coordinator."""

    def __init__(self) -> None:
        self._latest: dict[str, Progress] = {}
        self._filled: deque[tuple[int, int]] = deque(maxlen=MEMORY)  # start and due of windows that are full

    def note(self, peer_id: str, progress: Progress) -> None:
        """Take a replica's newest word."""
        self._latest[peer_id] = progress

    def step(self, progress: Progress, active: list[str]) -> int:
        """The swarm's step in the window that began at `progress.start`, between that and `progress.due`.

        A replica counts for at most what fills the window alone, whatever it says. When more than half of the replicas
        have begun a later window, the round of this one is over, and who still fills it had better come and hear so.
        A window that was full stays full: those who went on while its round is in flight count in the next one.
        """
        self._latest = {peer: known for peer, known in self._latest.items() if peer in active}
        known = list(self._latest.values())
        window = (progress.start, progress.due)
        if window in self._filled or 2 * sum(other.start > progress.start for other in known) > len(active):
            return progress.due
        full = (progress.due - progress.start) * max(1, len(active))
        total = sum(min(other.done, full) for other in known if other.start == progress.start)
        if total >= full:
            self._filled.append(window)
        return progress.start + min(total, full) // max(1, len(active))


class SwarmPace:
    """A `Pace` for the replicas of a run: the coordinator adds up their steps and says when a round is due."""

    def __init__(self, thread: NetworkThread, rpc: Rpc, roster: Roster, settings: NetworkSettings) -> None:
        self._thread = thread
        self._rpc = rpc
        self._roster = roster
        self._settings = settings
        self._lock = threading.Lock()
        self._mine: Progress | None = None
        self._step = 0  # the swarm's, as far as it was heard
        self._dirty = asyncio.Event()
        self._tally = Tally()
        self._told = (-1, -1)  # start and due of the round that the others were called to last
        rpc.handle("progress", self._on_progress)
        rpc.handle("due", self._on_due)

    def advance(self, start: int, done: int, due: int) -> int:
        """See Pace; the network hears of it within REPORT_S."""
        with self._lock:
            if self._mine is None or self._mine.start != start:
                self._step = start
            self._mine = Progress(start, done, due)
            step = self._step
        self._thread.loop.call_soon_threadsafe(self._dirty.set)
        return min(step, due)

    async def run(self) -> None:
        """Report for ever what is new."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._report()
            except Exception:  # the others must go on hearing of this peer's steps
                logger.warning("this peer's progress could not be told", exc_info=True)
            await asyncio.sleep(REPORT_S)

    async def _report(self) -> None:
        mine = self._mine
        coordinator = self._roster.coordinator()
        if mine is None:
            return
        try:
            answer = await self._rpc.call(
                coordinator, "progress", mine.to_message(), timeout=self._settings.silence_s / 2
            )
            self._hear(mine.start, field(answer, "step", int))
        except ProtocolError as error:
            logger.warning("progress was refused: %s", error)
        except PeerUnreachable:
            self._dirty.set()  # tell it once more, or its successor
            if not await self._roster.is_alive(coordinator):
                self._roster.suspect(coordinator)

    def _hear(self, start: int, step: int) -> None:
        with self._lock:
            if self._mine is not None and self._mine.start == start:
                self._step = max(self._step, step)

    async def _on_progress(self, caller: str, message: Message) -> Message:
        progress = read_progress(message)
        active = self._roster.active()
        if caller not in active:
            return {"step": progress.start}  # it counts once it takes part
        self._roster.heard_from(caller)
        self._tally.note(caller, progress)
        step = self._tally.step(progress, active)
        call = (progress.start, progress.due)
        if step >= progress.due and call != self._told:
            self._told = call
            for peer in active:
                if peer not in (caller, self._rpc.peer_id):
                    asyncio.ensure_future(self._call_to_round(peer, progress))
            self._hear(progress.start, step)
        return {"step": step}

    async def _call_to_round(self, peer: str, progress: Progress) -> None:
        message: Message = {"start": progress.start, "step": progress.due}
        try:
            await self._rpc.call(peer, "due", message, timeout=self._settings.silence_s / 2)
        except (PeerUnreachable, ProtocolError):
            return  # its own next report tells it

    async def _on_due(self, caller: str, message: Message) -> Message:
        if caller != self._roster.coordinator():
            raise ProtocolError("only the coordinator says when a round is due")
        self._hear(field(message, "start", int), field(message, "step", int))
        return {}
