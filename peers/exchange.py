"""The data phase of a round: butterfly all-reduce and all-gather among an agreed list of members.

Unlike hivemind's AllReduceRunner, which adds up parts as they arrive and has every peer add a rounded difference to
its own tensor, a slice is summed in member order and sent back as it is: members hold the same bits.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmkit.optim.norms import is_finite
from swarmkit.peers.blame import ENDED, Blame, expect
from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.layout import Chunk, Layout, Schema, from_bytes, to_bytes
from swarmkit.peers.rules import Rules
from swarmkit.peers.timings import Measured, Stopwatch
from swarmkit.peers.transport import Bulk, Traffic

PLAIN = Rules()


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all members of an attempt were told alike by the coordinator."""

    attempt: str  # unique id of this attempt
    members: tuple[str, ...]
    weights: tuple[float, ...]
    schemas: tuple[Schema, ...]
    norm: float = 0.0  # the median of what members said of their contributions' norms; 0: bounds nothing


class Reduction:
    """One attempt at a butterfly all-reduce: member j owns slice j, averages it and sends it to all."""

    def __init__(
        self,
        agreement: Agreement,
        me: str,
        tensors: Sequence[Tensor],
        traffic: Traffic,
        chunk_bytes: int,
        rules: Rules = PLAIN,
    ) -> None:
        self.agreement = agreement
        self.traffic = traffic
        self._chunk_bytes = chunk_bytes
        self._rules = rules
        self._limit = rules.limit(agreement.norm)
        self._norms = [0.0] * len(agreement.members)  # of the parts of our slice that were reduced so far
        self._index = agreement.members.index(me)
        self._inputs = tensors
        self._layout = Layout(Schema.of(tensors))
        self._mine = self._layout.flatten(tensors)
        self._result = self._layout.empty()
        self._my_chunks = self._chunks(self._index)
        # Who contributes: a weight of 0 travels in neither direction but the way back.
        self._contributors = [i for i, weight in enumerate(agreement.weights) if weight > 0]
        self._arrived: list[dict[int, bytes]] = [{} for _ in self._my_chunks]
        self._reduced: list[bytes | None] = [None] * len(self._my_chunks)
        self._progress = asyncio.Condition()
        self._broken: Blame | None = None
        self._clock = Stopwatch(len(agreement.members))

    def _chunks(self, owner: int) -> list[Chunk]:
        return list(self._layout.chunks(owner, len(self.agreement.members), self._chunk_bytes))

    @property
    def measured(self) -> Measured:
        """What this member saw of the others' links."""
        return self._clock.measured()

    async def run(self, bulk: Bulk) -> list[Tensor]:
        """Exchange with all members; raises Blame."""
        await self._reduce_ready()
        others = [member for i, member in enumerate(self.agreement.members) if i != self._index]
        tasks = [asyncio.ensure_future(self._with_owner(bulk, owner)) for owner in others]
        tasks.append(asyncio.ensure_future(self._wait_reduced()))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            if any(data is None for data in self._reduced):
                # Whoever still waits for our slice must not wait for ever.
                await self._break(Blame(None, "the attempt is over"))
        return self._layout.unflatten(self._result, like=self._inputs)

    async def _with_owner(self, bulk: Bulk, owner: str) -> None:
        """Send our part of an owner's slice and receive the averaged slice."""
        chunks = self._chunks(self.agreement.members.index(owner))
        if not chunks:
            return
        replies = bulk.open(owner, "reduce", {"attempt": self.agreement.attempt}, self._parts(chunks))
        try:
            for dtype, start, stop in chunks:
                data = expect(await anext(replies, None), owner)
                self.traffic.received += len(data)
                from_bytes(data, self._result[dtype][start:stop])
                if not is_finite(self._result[dtype][start:stop]):
                    raise Blame(owner, f"{owner[-8:]} sent a mean that is not finite", is_link=False)
            self._clock.note_mean(self.agreement.members.index(owner))
        except (PeerUnreachable, ProtocolError) as error:
            raise Blame(owner, str(error)) from error
        finally:
            await replies.aclose()

    async def _parts(self, chunks: list[Chunk]) -> AsyncIterator[bytes]:
        if self.agreement.weights[self._index] == 0:
            return
        for dtype, start, stop in chunks:
            data = to_bytes(self._mine[dtype][start:stop])
            self.traffic.sent += len(data)
            yield data

    async def serve(self, sender: str, incoming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Own a slice: take a member's parts and yield the averaged chunks as they become ready."""
        if sender not in self.agreement.members:
            raise ProtocolError("you are not a member of this round")
        collector = asyncio.ensure_future(self._collect(sender, incoming))
        try:
            for number in range(len(self._my_chunks)):
                data = await self._chunk(number)
                self.traffic.sent += len(data)
                yield data
        except Blame as blame:
            if blame.peer_id == sender:
                raise PeerUnreachable(blame.reason) from blame
            yield ENDED
        finally:
            collector.cancel()

    async def _collect(self, sender: str, incoming: AsyncIterator[bytes]) -> None:
        index = self.agreement.members.index(sender)
        if index not in self._contributors:
            return
        try:
            for number, (dtype, start, stop) in enumerate(self._my_chunks):
                data = expect(await anext(incoming, None), sender)
                if len(data) != (stop - start) * dtype.itemsize:
                    due = (stop - start) * dtype.itemsize
                    raise Blame(sender, f"{sender[-8:]} sent {len(data)} bytes for a chunk of {due}")
                self.traffic.received += len(data)
                self._arrived[number][index] = data
                if number == len(self._my_chunks) - 1:
                    self._clock.note_part(index)
                await self._reduce(number)
        except (PeerUnreachable, ProtocolError) as error:
            await self._break(Blame(sender, str(error)))
        except Blame as blame:
            await self._break(blame)

    async def _reduce_ready(self) -> None:
        """Reduce what needs nobody else: everything in a round of one, and when we alone contribute."""
        for number in range(len(self._my_chunks)):
            await self._reduce(number)

    async def _reduce(self, number: int) -> None:
        arrived = self._arrived[number]
        if any(i not in arrived for i in self._contributors if i != self._index):
            return
        dtype, start, stop = self._my_chunks[number]
        parts = []
        for i in self._contributors:
            if i == self._index:
                parts.append(self._mine[dtype][start:stop])
            else:
                part = torch.empty(stop - start, dtype=dtype)
                from_bytes(arrived[i], part)
                parts.append(part)
        if (blame := self._too_large(parts)) is not None:
            await self._break(blame)
            return
        mean = self._rules.mean(parts, [self.agreement.weights[i] for i in self._contributors])
        if not is_finite(mean):
            await self._break(self._find_culprit(parts))
            return
        arrived.clear()
        self._result[dtype][start:stop] = mean
        # Bytes are made once and shared by the streams to all members.
        self._reduced[number] = to_bytes(mean)
        self._clock.note_ready()
        async with self._progress:
            self._progress.notify_all()

    def _too_large(self, parts: list[Tensor]) -> Blame | None:
        """Whose parts of our slice go beyond the limit together: what a member says of its own norm proves nothing."""
        if self._limit == math.inf:
            return None
        for i, part in zip(self._contributors, parts, strict=True):
            wide = torch.float64 if part.dtype is torch.float64 else torch.float32
            norm = torch.linalg.vector_norm(part, dtype=wide).item()
            if math.isnan(norm) or (math.isinf(norm) and not is_finite(part)):
                continue  # the mean will tell
            self._norms[i] = math.hypot(self._norms[i], norm)
            if self._norms[i] > self._limit:
                member, found = self.agreement.members[i], f"{self._norms[i]:.3g}"
                reason = f"{member[-8:]} sent a contribution of norm {found}, the limit is {self._limit:.3g}"
                return Blame(member, reason, is_link=False)
        return None

    def _find_culprit(self, parts: list[Tensor]) -> Blame:
        for i, part in zip(self._contributors, parts, strict=True):
            if not is_finite(part):
                return Blame(
                    self.agreement.members[i], f"{self.agreement.members[i][-8:]} sent values that are not finite"
                )
        return Blame(None, "the mean overflows its dtype")

    async def _chunk(self, number: int) -> bytes:
        async with self._progress:
            await self._progress.wait_for(lambda: self._reduced[number] is not None or self._broken is not None)
        data = self._reduced[number]
        if data is None:
            assert self._broken is not None
            raise self._broken
        return data

    async def _wait_reduced(self) -> None:
        for number in range(len(self._my_chunks)):
            await self._chunk(number)

    async def _break(self, blame: Blame) -> None:
        self._broken = self._broken or blame
        async with self._progress:
            self._progress.notify_all()


class Gathering:
    """One attempt at an all-gather: the members with the lower number open the streams, payloads cross in both ways."""

    def __init__(
        self, agreement: Agreement, me: str, payload: Sequence[Tensor], traffic: Traffic, chunk_bytes: int
    ) -> None:
        self.agreement = agreement
        self.traffic = traffic
        self._chunk_bytes = chunk_bytes
        self._index = agreement.members.index(me)
        self._layouts = [Layout(schema) for schema in agreement.schemas]
        self._mine = self._layouts[self._index].flatten(payload)
        self._flats = [layout.empty() for layout in self._layouts]
        for dtype, flat in self._mine.items():
            self._flats[self._index][dtype].copy_(flat)
        self._done: dict[str, asyncio.Future[None]] = {
            member: asyncio.get_running_loop().create_future() for member in agreement.members
        }
        self._done[me].set_result(None)
        self._clock = Stopwatch(len(agreement.members))

    @property
    def measured(self) -> Measured:
        """What this member saw of the others' links."""
        return self._clock.measured()

    async def run(self, bulk: Bulk) -> list[list[Tensor]]:
        """Exchange with all members; raises Blame."""
        later = self.agreement.members[self._index + 1 :]
        tasks = [asyncio.ensure_future(self._with_member(bulk, member)) for member in later]
        try:
            await asyncio.gather(*tasks, *self._done.values())
        finally:
            for task in tasks:
                task.cancel()
            for future in self._done.values():
                future.cancel()
        return [layout.unflatten(flat) for layout, flat in zip(self._layouts, self._flats, strict=True)]

    async def _with_member(self, bulk: Bulk, member: str) -> None:
        replies = bulk.open(member, "gather", {"attempt": self.agreement.attempt}, self._payload())
        try:
            await self._receive(member, replies)
        finally:
            await replies.aclose()

    async def serve(self, sender: str, incoming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Take a member's payload and yield ours."""
        if sender not in self.agreement.members[: self._index]:
            raise ProtocolError("you are not a member of this round, or it is mine to open this stream")
        receiver = asyncio.ensure_future(self._receive(sender, incoming))
        try:
            async for data in self._payload():
                yield data
            await receiver
        except Blame as blame:
            raise PeerUnreachable(blame.reason) from blame
        finally:
            receiver.cancel()

    async def _payload(self) -> AsyncIterator[bytes]:
        for dtype, start, stop in self._layouts[self._index].chunks(0, 1, self._chunk_bytes):
            data = to_bytes(self._mine[dtype][start:stop])
            self.traffic.sent += len(data)
            yield data

    async def _receive(self, member: str, incoming: AsyncIterator[bytes]) -> None:
        index = self.agreement.members.index(member)
        try:
            for dtype, start, stop in self._layouts[index].chunks(0, 1, self._chunk_bytes):
                data = expect(await anext(incoming, None), member)
                self.traffic.received += len(data)
                from_bytes(data, self._flats[index][dtype][start:stop])
            # Also what opens the stream of a payload that has no bytes.
            if await anext(incoming, None) is not None:
                raise Blame(member, f"{member[-8:]} sent more than it announced")
        except (PeerUnreachable, ProtocolError) as error:
            self._fail(member, Blame(member, str(error)))
            raise Blame(member, str(error)) from error
        except Blame as blame:
            self._fail(member, blame)
            raise
        self._clock.note_part(index)
        if not self._done[member].done():
            self._done[member].set_result(None)

    def _fail(self, member: str, blame: Blame) -> None:
        if not self._done[member].done():
            self._done[member].set_exception(blame)
