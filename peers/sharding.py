"""The data phase of a reduction through a wire: slices go encoded to their owners, means encoded to all."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Sequence

import torch
from torch import Tensor

from swarmkit.optim.shards import Shards, Wire, Wired
from swarmkit.peers.blame import ENDED, Blame, expect
from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.exchange import Agreement
from swarmkit.peers.layout import from_bytes, to_bytes
from swarmkit.peers.timings import Measured, Stopwatch
from swarmkit.peers.transport import Bulk, Traffic

# Before a message its size: what a codec makes of a slice is known to nobody else.
_SIZE = struct.Struct("<Q")
# Instead of a message, whose fault it is that there is none. Without it the stream would break, and who reads it would
# blame the link to an owner that has done nothing wrong; with it all blame the same member, whoever is heard first. An
# owner that lies here could as well lie in its own report.
_REFUSAL = struct.Struct("<QI")
_NO_SIZE = (1 << 64) - 1


class ShardedReduction:
    """One attempt at a sharded reduction; see Shards.

    Encoding and decoding run in threads: the loop has pings to answer meanwhile.
    """

    def __init__(
        self,
        agreement: Agreement,
        me: str,
        tensors: Sequence[Tensor],
        wire: Wire,
        traffic: Traffic,
        chunk_bytes: int,
    ) -> None:
        self.agreement = agreement
        self.traffic = traffic
        self._chunk_bytes = chunk_bytes
        self._index = agreement.members.index(me)
        self._shards = Shards(wire, tensors, agreement.weights, self._index)
        self._mean: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._is_reducing = False
        self._clock = Stopwatch(len(agreement.members))
        if not self._shards.limit(self._index):
            self._mean.set_result(b"")  # more members than blocks: nobody sends us anything

    @property
    def measured(self) -> Measured:
        """What this member saw of the others' links."""
        return self._clock.measured()

    async def run(self, bulk: Bulk) -> tuple[list[Tensor], Wired]:
        """Exchange with all members; raises Blame."""
        tasks = [
            asyncio.ensure_future(self._with_owner(bulk, owner))
            for owner in range(len(self.agreement.members))
            if owner != self._index
        ]
        tasks.append(asyncio.ensure_future(self._contribute()))
        try:
            await asyncio.gather(*tasks, asyncio.shield(self._mean))
        except Blame as blame:
            self._break(blame)
            raise
        finally:
            for task in tasks:
                task.cancel()
            # Whoever still waits for our slice must not wait for ever.
            self._break(Blame(None, "the attempt is over"))
        return self._shards.result()

    async def _contribute(self) -> None:
        if self._index in self._shards.contributors and not self._mean.done():
            await self._accept(self._index, await asyncio.to_thread(self._shards.outgoing, self._index))
        await self._reduce()

    async def _with_owner(self, bulk: Bulk, owner: int) -> None:
        """Send our part of an owner's slice and take its mean."""
        if not self._shards.limit(owner):
            return
        member = self.agreement.members[owner]
        replies = bulk.open(member, "reduce", {"attempt": self.agreement.attempt}, self._outgoing(owner))
        try:
            message = await self._receive(owner, replies, self._shards.limit(owner))
            self._clock.note_mean(owner)
            await self._take(owner, message, self._shards.adopt)
        except (PeerUnreachable, ProtocolError) as error:
            raise Blame(member, str(error)) from error
        finally:
            await replies.aclose()

    async def _outgoing(self, owner: int) -> AsyncIterator[bytes]:
        if self._index not in self._shards.contributors:
            return
        message = await asyncio.to_thread(self._shards.outgoing, owner)
        async for chunk in self._chunks(to_bytes(message.cpu())):
            yield chunk

    async def serve(self, sender: str, incoming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Own a slice: take a member's part of it and yield the mean."""
        if sender not in self.agreement.members:
            raise ProtocolError("you are not a member of this round")
        collector = asyncio.ensure_future(self._collect(self.agreement.members.index(sender), incoming))
        try:
            async for chunk in self._chunks(await asyncio.shield(self._mean)):
                yield chunk
        except Blame as blame:
            if blame.is_link and blame.peer_id == sender:
                raise PeerUnreachable(blame.reason) from blame
            if blame.is_link or blame.peer_id is None:
                yield ENDED
                return
            yield _REFUSAL.pack(_NO_SIZE, self.agreement.members.index(blame.peer_id))
        finally:
            collector.cancel()

    async def _collect(self, sender: int, incoming: AsyncIterator[bytes]) -> None:
        if sender not in self._shards.contributors:
            return
        try:
            message = await self._receive(sender, incoming, self._shards.limit(self._index))
            self._clock.note_part(sender)
            await self._accept(sender, message)
            await self._reduce()
        except (PeerUnreachable, ProtocolError) as error:
            self._break(Blame(self.agreement.members[sender], str(error)))
        except Blame as blame:
            self._break(blame)

    async def _accept(self, sender: int, message: Tensor) -> None:
        await self._take(sender, message, self._shards.accept)

    async def _take(self, sender: int, message: Tensor, take: Callable[[int, Tensor], None]) -> None:
        try:
            await asyncio.to_thread(take, sender, message)
        except ValueError as error:
            raise self._rubbish(sender, str(error)) from error

    async def _reduce(self) -> None:
        """Encode the mean of the own slice, once, as soon as all parts have arrived."""
        if self._is_reducing or self._mean.done() or not self._shards.is_ready:
            return
        self._is_reducing = True
        try:
            mean = await asyncio.to_thread(self._shards.mean)
        except OverflowError as error:
            self._break(Blame(None, str(error)))
            return
        if not self._mean.done():
            # Bytes are made once and shared by the streams to all members.
            self._mean.set_result(to_bytes(mean.cpu()))
            self._clock.note_ready()

    def _break(self, blame: Blame) -> None:
        if not self._mean.done():
            self._mean.set_exception(blame)
            self._mean.exception()  # perhaps nobody waits for it

    # -- messages ------------------------------------------------------------------------------------------------------

    async def _chunks(self, data: bytes) -> AsyncIterator[bytes]:
        self.traffic.sent += _SIZE.size + len(data)
        yield _SIZE.pack(len(data))
        for start in range(0, len(data), self._chunk_bytes):
            yield data[start : start + self._chunk_bytes]

    async def _receive(self, member: int, incoming: AsyncIterator[bytes], limit: int) -> Tensor:
        """A message of at most `limit` bytes, whose size comes first: nothing larger is made room for."""
        head = await self._next(member, incoming)
        if len(head) == _REFUSAL.size:
            raise self._refused(member, *_REFUSAL.unpack(head))
        if len(head) != _SIZE.size or _SIZE.unpack(head)[0] > limit:
            size = _SIZE.unpack(head)[0] if len(head) == _SIZE.size else "no number of"
            raise self._rubbish(member, f"{size} bytes for a slice of {limit} at most")
        message = torch.empty(_SIZE.unpack(head)[0], dtype=torch.uint8)
        start = 0
        while start < message.numel():
            chunk = await self._next(member, incoming)
            if not 0 < len(chunk) <= message.numel() - start:
                raise self._rubbish(member, f"a chunk of {len(chunk)} bytes for the last {message.numel() - start}")
            from_bytes(chunk, message[start : start + len(chunk)])
            start += len(chunk)
        return message

    async def _next(self, member: int, incoming: AsyncIterator[bytes]) -> bytes:
        chunk = expect(await anext(incoming, None), self.agreement.members[member])
        self.traffic.received += len(chunk)
        return chunk

    def _refused(self, member: int, no_size: int, culprit: int) -> Blame:
        if no_size != _NO_SIZE or culprit >= len(self.agreement.members):
            return self._rubbish(member, "a refusal that names no member")
        return self._rubbish(culprit, f"what {self.agreement.members[member][-8:]} could not use")

    def _rubbish(self, member: int, what: str) -> Blame:
        name = self.agreement.members[member]
        return Blame(name, f"{name[-8:]} sent {what}", is_link=False)
