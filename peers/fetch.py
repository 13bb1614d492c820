"""Fetch: downloads a state from several donors at once, and goes on with others when one dies, lies or is too slow."""

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence

from swarmkit.peers.download import Download
from swarmkit.peers.errors import JoinFailed, PeerUnreachable, ProtocolError
from swarmkit.peers.manifest import PIECE_BYTES, Manifest
from swarmkit.peers.rate import RateMeter
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.transfer import Busy, Donor, Offer, Progress, Transfer
from swarmkit.peers.transport import Bulk
from swarmkit.peers.wire import Message, encode, field

logger = logging.getLogger(__name__)
MAX_DONORS = 3  # at the same time; more would only divide this peer's downlink
MAX_VOTERS = 8  # donors that are asked when two of them disagree
DESCRIBE_TIMEOUT_S = 15.0  # of an offer; a donor answers within ANSWER_S, if only that it needs longer
RETRY_S = 0.25  # after all donors failed
MAX_FAILURES = 3  # links to one donor that broke, before it is given up
WINDOW_S = 1.0  # of a donor's rate: what is asked of it ahead
MIN_WINDOW, MAX_WINDOW = 4, 64  # pieces
SLOW_S = 2.0  # a piece that is this late goes to a donor that has nothing to do
CONFIRM_S = 3.0  # for what other donors have to say once all pieces are here
MAX_QUEUE_S = 3600.0  # that donors may say they are busy


class Fetch:
    """One attempt at a state; the `Download` that it fills outlives it."""

    def __init__(
        self,
        rpc: Rpc,
        bulk: Bulk,
        settings: NetworkSettings,
        candidates: Callable[[], Sequence[str]],
        download: Download,
        progress: Progress | None = None,
    ) -> None:
        """`candidates` returns the peers that may be asked now, the best first."""
        self._rpc = rpc
        self._bulk = bulk
        self._settings = settings
        self._candidates = candidates
        self._download = download
        self._progress = progress
        self._donors: dict[str, Donor] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._offers: dict[str, Offer] = {}  # the newest of each peer that was asked
        self._out: dict[str, str] = {}  # peer -> why it is not asked again
        self._failures: Counter[str] = Counter()
        self._reasons: list[str] = []
        self._todo: deque[int] = deque(download.missing())
        self._meter = RateMeter()
        self._changed = asyncio.Event()
        self._used: set[str] = set()  # peers that sent something
        self._failed: JoinFailed | None = None  # what a question in the background came to
        self._releasing: set[asyncio.Task[None]] = set()

    @property
    def used(self) -> frozenset[str]:
        """Peers that a part of the state came from."""
        return frozenset(self._used)

    async def run(self) -> None:
        """Fill the download; raises JoinFailed when no donor can go on. What is here stays in the download then."""
        try:
            while True:
                if not self._donors and not self._download.is_complete:
                    await self._engage_first()
                self._ask_others()
                if self._download.is_complete:
                    await self._hear_them_out()
                if self._failed is not None:
                    raise self._failed
                if self._download.is_complete:
                    return
                await self._wait()
                await self._reap()
                self._rebalance()
        finally:
            await self._close()

    async def _wait(self) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), SLOW_S / 4)
        except TimeoutError:
            return
        finally:
            self._changed.clear()

    async def _hear_them_out(self) -> None:
        """Do not take what one donor says for granted while another is about to say what it has."""
        if self._asking:
            await asyncio.wait([*self._asking.values()], timeout=CONFIRM_S)

    async def _close(self) -> None:
        tasks = [*self._asking.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for donor in list(self._donors.values()):
            await self._dismiss(donor)
        if self._releasing:
            await asyncio.wait(self._releasing, timeout=CONFIRM_S)

    # -- finding donors ------------------------------------------------------------------------------------------------

    async def _engage_first(self) -> None:
        """Find a donor; waits while all are busy, raises JoinFailed when there is none."""
        queued_since = time.monotonic()
        while not self._donors and self._failed is None:
            waits = []
            free = [peer for peer in self._candidates() if peer not in self._out and peer not in self._asking]
            for peer in sorted(free, key=lambda peer: self._failures[peer]):
                try:
                    await self._engage(peer, first=True)
                except Busy as busy:
                    waits.append(busy.wait_s)
                except (PeerUnreachable, ProtocolError) as error:
                    self._fail(peer, error)
                if self._donors:
                    return
            if self._asking:
                await asyncio.wait([*self._asking.values()], return_when=asyncio.FIRST_COMPLETED)
            elif waits and time.monotonic() - queued_since < MAX_QUEUE_S:
                self._say(f"{len(waits)} donors are busy with other joiners: waiting for a place")
                await asyncio.sleep(min(waits) * random.uniform(0.5, 1.0))
            elif all(peer in self._out for peer in self._candidates()):
                raise JoinFailed(
                    "no replica could serve the state: " + "; ".join(dict.fromkeys(self._reasons))
                    if self._reasons
                    else "no active replica is known that could serve the state"
                )
            else:
                await asyncio.sleep(RETRY_S)

    def _ask_others(self) -> None:
        """Ask for more donors, in the background: they share the work, and each checks what the others offer."""
        free = MAX_DONORS - len(self._donors) - len(self._asking)
        known = {*self._donors, *self._asking, *self._out, *self._offers, *self._failures}
        for peer in [peer for peer in self._candidates() if peer not in known][: max(0, free)]:
            self._asking[peer] = asyncio.ensure_future(self._ask_other(peer))

    async def _ask_other(self, peer: str) -> None:
        try:
            await self._engage(peer, first=False)
        except Busy:
            pass  # whoever has no donor at all comes first
        except (PeerUnreachable, ProtocolError) as error:
            self._fail(peer, error)
        except JoinFailed as error:
            self._failed = error
        finally:
            self._asking.pop(peer, None)
            self._changed.set()

    def _fail(self, peer: str, error: Exception) -> None:
        """Note what went wrong with a donor: broken links may be tried again, bad data may not."""
        self._failures[peer] += 1
        self._reasons.append(str(error))
        if isinstance(error, ProtocolError) or self._failures[peer] >= MAX_FAILURES:
            self._out[peer] = str(error)
        self._offers.pop(peer, None)

    async def _engage(self, peer: str, *, first: bool) -> None:
        """Ask a peer for the state, and let it send if what it has fits."""
        offer = await self._ask(peer, load=True, first=first)
        self._offers[peer] = offer
        if not offer.ticket:
            await self._compare(offer)
            return
        try:
            donor = Donor(peer, offer.ticket, await self._fetch_manifest(peer, offer))
            if await self._compare(offer):
                await self._follow(donor)
        finally:
            if peer not in self._donors:
                self._release(peer, offer.ticket)

    async def _ask(self, peer: str, *, load: bool, first: bool) -> Offer:
        while True:
            request: Message = {"load": load, "first": first}
            answer = await self._rpc.call(peer, "state", request, timeout=DESCRIBE_TIMEOUT_S)
            outcome = field(answer, "outcome", str)
            if outcome == "busy":
                raise Busy(field(answer, "wait_s", float, lambda wait: 0 <= wait <= 60))
            if outcome != "wait":  # its snapshot takes longer than a call
                break
        offer = Offer.from_message(answer)
        if offer.size > self._settings.max_state_bytes:
            raise ProtocolError(f"state of {offer.size} bytes: max_state_bytes is {self._settings.max_state_bytes}")
        return offer

    async def _fetch_manifest(self, peer: str, offer: Offer) -> Manifest:
        known = [self._download.manifest, *(donor.manifest for donor in self._donors.values())]
        for manifest in known:
            if manifest is not None and manifest.digest == offer.manifest:
                return manifest
        data = bytearray()
        stream = self._bulk.open(peer, "manifest", {"ticket": offer.ticket}, _nothing())
        try:
            async for chunk in stream:
                data += chunk
                if len(data) > offer.manifest_bytes:
                    raise ProtocolError(f"{peer[-8:]} sent more than the manifest that it announced")
        finally:
            await stream.aclose()
        manifest = await asyncio.to_thread(Manifest.from_bytes, data)
        if manifest.digest != offer.manifest or manifest.size != offer.size or manifest.shared_digest != offer.shared:
            raise ProtocolError(f"the manifest from {peer[-8:]} is not the one that it announced")
        return manifest

    # -- donors that differ --------------------------------------------------------------------------------------------

    async def _compare(self, offer: Offer) -> bool:
        """True when an offer fits what is being downloaded, or what is being downloaded gives way to it."""
        plan = self._download.manifest
        if plan is None or plan.shared_digest == offer.shared:
            return True
        if plan.place == offer.place:
            return await self._vote(plan.place) == offer.shared
        # Of another round. A state that is behind the others' next round is of no use; but who would start over for
        # every round that closes meanwhile would never end.
        return not self._donors or (offer.round > plan.round and 4 * self._download.done < plan.size)

    async def _vote(self, place: str) -> str:
        """Two donors hold different states of the same round: the majority's counts, and a tie serves nobody."""
        others = [peer for peer in self._candidates() if peer not in self._offers and peer not in self._out]
        answers = await asyncio.gather(
            *(self._ask(peer, load=False, first=False) for peer in others[:MAX_VOTERS]), return_exceptions=True
        )
        for peer, answer in zip(others, answers, strict=False):
            if isinstance(answer, Offer):
                self._offers[peer] = answer
        votes: dict[str, list[str]] = {}
        for peer, offer in self._offers.items():
            if offer.place == place:
                votes.setdefault(offer.shared, []).append(peer)
        ranked = sorted(votes.items(), key=lambda pair: -len(pair[1]))
        told = "; ".join(f"{shared[:12]} by {', '.join(p[-8:] for p in peers)}" for shared, peers in ranked)
        if len(ranked) > 1 and len(ranked[0][1]) == len(ranked[1][1]):
            raise JoinFailed(f"donors hold different states of the same round, and no majority decides: {told}")
        for shared, peers in ranked[1:]:
            for peer in peers:
                self._out[peer] = f"{peer[-8:]} holds another state {shared[:12]} of the same round than the others"
                self._reasons.append(self._out[peer])
                self._say(self._out[peer])
                if peer in self._donors:
                    await self._dismiss(self._donors[peer])
        return ranked[0][0]

    async def _follow(self, donor: Donor) -> None:
        """Let a donor send, and follow its manifest if the one that is followed is of another state."""
        plan = self._download.manifest
        if plan is None or plan.shared_digest != donor.manifest.shared_digest or not self._donors:
            self._adopt(donor.manifest)
        for other in [o for o in self._donors.values() if o.manifest.shared_digest != donor.manifest.shared_digest]:
            self._offers.pop(other.peer_id, None)  # it may have the newer state too by now
            await self._dismiss(other)
        self._donors[donor.peer_id] = donor
        donor.task = asyncio.ensure_future(self._pull(donor))
        donor.task.add_done_callback(lambda _: self._changed.set())

    def _adopt(self, manifest: Manifest) -> None:
        plan = self._download.manifest
        adopted = self._download.adopt(manifest)
        if adopted.lost and plan is not None:
            what = "the donors' own state" if plan.shared_digest == manifest.shared_digest else "another state"
            self._say(f"{what} differs: {adopted.lost} bytes start over, {adopted.kept} stay")
        serves = self._download.serves
        asked = {n for donor in self._donors.values() for n in donor.pending if serves(donor.manifest, n)}
        self._todo = deque(number for number in self._download.missing() if number not in asked)
        for donor in self._donors.values():
            donor.wake.set()

    # -- pieces --------------------------------------------------------------------------------------------------------

    async def _pull(self, donor: Donor) -> None:
        """Ask one donor for pieces, always for some ahead, and take what comes; ends when the download is complete."""
        stream = self._bulk.open(donor.peer_id, "state", {"ticket": donor.ticket}, _until_none(donor.requests))
        try:
            while not self._download.is_complete:
                self._top_up(donor)
                if not donor.pending:
                    await donor.wake.wait()
                    donor.wake.clear()
                    continue
                # Alive by its pings, but nothing comes: what is ahead should long have been here at its own rate.
                rate = donor.meter.rate
                ahead = len(donor.pending) * PIECE_BYTES / rate if rate > 0 else 0.0
                patience = max(self._settings.stall_s, 4 * ahead)
                try:
                    async with asyncio.timeout(patience):
                        data = await anext(stream, None)
                except TimeoutError as error:
                    raise PeerUnreachable(f"{donor.peer_id[-8:]} sent nothing for {patience:.0f} s") from error
                if data is None:
                    raise PeerUnreachable(f"{donor.peer_id[-8:]} ended its stream early")
                self._take(donor, data)
        finally:
            donor.requests.put_nowait(None)
            await stream.aclose()

    def _take(self, donor: Donor, data: bytes) -> None:
        donor.heard = time.monotonic()
        try:
            self._download.put(donor.pending[0], data, donor.manifest)
        except ProtocolError as error:
            raise ProtocolError(f"{donor.peer_id[-8:]}: {error}") from error
        donor.pending.popleft()
        self._used.add(donor.peer_id)
        donor.meter.add(len(data))
        self._meter.add(len(data))
        self._tell()
        if self._download.is_complete:
            for other in self._donors.values():
                other.wake.set()

    def _top_up(self, donor: Donor) -> None:
        """Ask for as much as the donor sends in a moment, so that its line never runs dry."""
        window = int(donor.meter.rate * WINDOW_S / PIECE_BYTES)
        free = min(MAX_WINDOW, max(MIN_WINDOW, window)) - len(donor.pending)
        if free <= 0 or (len(donor.pending) > MIN_WINDOW and free < MIN_WINDOW):
            return
        numbers = self._choose(donor, free)
        if numbers:
            if not donor.pending:
                donor.heard = time.monotonic()
            donor.pending.extend(numbers)
            donor.requests.put_nowait(encode({"pieces": numbers}))

    def _choose(self, donor: Donor, count: int) -> list[int]:
        """Take pieces off the list: from its end, where its own state is, for the donor whose manifest is followed."""
        from_end = donor.manifest is self._download.manifest
        chosen: list[int] = []
        passed: list[int] = []
        while self._todo and len(chosen) < count:
            number = self._todo.pop() if from_end else self._todo.popleft()
            (chosen if self._download.serves(donor.manifest, number) else passed).append(number)
        (self._todo.extend if from_end else self._todo.extendleft)(reversed(passed))
        return chosen

    # -- what changes on the way ---------------------------------------------------------------------------------------

    async def _reap(self) -> None:
        """Give the pieces of donors that failed to the others."""
        for donor in [donor for donor in self._donors.values() if donor.task is not None and donor.task.done()]:
            assert donor.task is not None
            error = donor.task.exception()
            if error is None:
                continue
            if not isinstance(error, PeerUnreachable | ProtocolError):
                raise error
            self._fail(donor.peer_id, error)
            await self._dismiss(donor)
            self._say(f"lost a donor: {error}")

    async def _dismiss(self, donor: Donor) -> None:
        self._donors.pop(donor.peer_id, None)
        if donor.task is not None:
            donor.task.cancel()
            await asyncio.gather(donor.task, return_exceptions=True)
        self._give_back(donor)
        self._release(donor.peer_id, donor.ticket)

    def _give_back(self, donor: Donor) -> None:
        wanted = set(self._download.missing()) - set(self._todo)
        for other in self._donors.values():
            wanted -= set(other.pending)
        self._todo.extendleft(reversed([number for number in donor.pending if number in wanted]))
        for other in self._donors.values():
            other.wake.set()

    def _rebalance(self) -> None:
        """Let donors that have nothing to do take over what others are late with or cannot give."""
        idle = [donor for donor in self._donors.values() if not donor.pending]
        if not idle or self._download.is_complete:
            return
        if self._todo:
            # All that is left is a lost donor's own state: any other's will do.
            plan = self._download.manifest
            if len(idle) == len(self._donors) and all(donor.manifest is not plan for donor in idle):
                self._adopt(idle[0].manifest)
            return
        for donor in self._donors.values():
            rate = donor.meter.rate
            if donor.lateness > max(SLOW_S, 4 * PIECE_BYTES / rate if rate > 0 else 0.0):
                # They stay in its queue: should it send them after all, whoever is first counts.
                missing = set(self._download.missing())
                self._todo.extend(number for number in donor.pending if number in missing)
                donor.heard = time.monotonic()
                for other in idle:
                    other.wake.set()
                return

    def _release(self, peer: str, ticket: str) -> None:
        """Let a donor forget this joiner; nothing waits for it."""
        task = asyncio.ensure_future(self._say_done(peer, ticket))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _say_done(self, peer: str, ticket: str) -> None:
        try:
            await self._rpc.call(peer, "state_done", {"ticket": ticket}, timeout=CONFIRM_S)
        except (PeerUnreachable, ProtocolError):
            return  # it forgets by itself after a while

    # -- progress ------------------------------------------------------------------------------------------------------

    def _say(self, note: str) -> None:
        logger.info("%s", note)
        self._tell(note)

    def _tell(self, note: str = "") -> None:
        if self._progress is None:
            return
        done, total, rate = self._download.done, self._download.size, self._meter.rate
        eta = (total - done) / rate if rate > 0 else float("inf")
        self._progress(Transfer(done=done, total=total, rate=rate, eta_s=eta, donors=tuple(self._donors), note=note))


async def _nothing() -> AsyncIterator[bytes]:
    for chunk in list[bytes]():
        yield chunk


async def _until_none(requests: "asyncio.Queue[bytes | None]") -> AsyncIterator[bytes]:
    while (request := await requests.get()) is not None:
        yield request
