"""TorchCollective: rounds over torch.distributed (gloo or NCCL), for torchrun users and inside a region."""

import hashlib
import queue
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from swarmkit.optim.collective import Gathered, Reduced, RoundKey
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.shards import Wire
from swarmkit.peers.errors import PeerUnreachable
from swarmkit.peers.layout import Schema
from swarmkit.peers.mesh import Mesh
from swarmkit.peers.reduction import check_payload, check_wired
from swarmkit.peers.torch_rounds import GatherRound, ReduceRound
from swarmkit.peers.torch_shards import ShardedRound
from swarmkit.peers.wire import decode, encode, field

# What a member says before any data moves: digest and length of its offer (see _Offer), weight, and if it is cancelled.
_HELLO = struct.Struct("<16sId?")
_READY, _CANCELLED, _BROKEN = range(3)
_MAX_OFFER_BYTES = 8 << 30
# Who leaves right after a round may be seen to go before its last vote has been read.
_LAST_WORDS_S = 1.0
_FINAL = "torch.distributed can't go on without it"


@dataclass(frozen=True, slots=True)
class _Offer:
    """Which round a member is at, and with what."""

    operation: str
    key: RoundKey
    schema: Schema

    def encode(self) -> bytes:
        return encode(
            {
                "operation": self.operation,
                "name": self.key.name,
                "index": self.key.index,
                "lineage": self.key.lineage,
                "digest": self.key.digest,
                "schema": self.schema.to_message(),
                "form": self.schema.form,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> "_Offer":
        message = decode(data)
        lineage, digest = field(message, "lineage", str), field(message, "digest", str)
        key = RoundKey(field(message, "name", str), field(message, "index", int), lineage, digest)
        return cls(field(message, "operation", str), key, Schema.from_message(message, max_bytes=_MAX_OFFER_BYTES))

    def __str__(self) -> str:
        return f"all_{self.operation} of {self.key}"


class TorchCollective:
    """A Collective of a fixed set of torch.distributed ranks: nobody joins, and who dies ends it for all.

    Every member of `group` (default: all ranks) makes one, at the same time; it has a process group of its own.
    Without a default group one is made from torchrun's environment. Rounds run one after the other in the order of the
    calls, so all members must call in the same order; when they differ in round, operation, shape or dtype, the round
    fails on all and says how. A member that skipped a round fails it for the others when it comes to the next.

    A rank that dies, or is silent for `timeout` seconds after the call, fails the round on all others and every later
    round at once with the same reason: torch.distributed can't go on without it. Make a new group then. A vote of one
    byte closes a round; only a rank that dies within the vote can leave the others of different minds.

    An all-reduce is a direct reduce-scatter (each member averages one slice, in member order) and all-gather in the
    tensors' own dtypes: each of n members sends 2 (n-1)/n of the tensors' bytes, as much as in a ring; a member of
    weight 0 half of that. A gather sends n-1 times the own payload; a reduction through a wire twice that of a slice,
    and tells the sizes before. `bytes_sent` counts hellos (29 bytes for each other
    member) and votes too, but not TCP's framing.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 30.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout={timeout}: must be a positive number of seconds")
        self._mesh = Mesh(group, timeout)
        self._timeout = timeout
        self.peer_id = f"rank{self._mesh.rank}"
        self._members = tuple(f"rank{rank}" for rank in range(self._mesh.size))
        self._others = [rank for rank in range(self._mesh.size) if rank != self._mesh.rank]
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[ReduceRound | ShardedRound | GatherRound | None] = queue.SimpleQueue()
        self._open: set[ReduceRound | ShardedRound | GatherRound] = set()
        self._ended: str | None = None  # why no further round is possible
        self._closed = threading.Event()
        self._worker = threading.Thread(target=self._run, name=f"swarmkit-{self.peer_id}", daemon=True)
        self._worker.start()
        self._mesh.watch(self._on_loss)

    def all_reduce(
        self, tensors: Sequence[Tensor], *, round: RoundKey, weight: float, wire: Wire | None = None
    ) -> Future[Reduced]:
        """See Collective.all_reduce."""
        check_wired(tensors, weight, wire)
        rest = tensors, round, float(weight), self._timeout
        one = ReduceRound(*rest) if wire is None else ShardedRound(*rest, wire)
        self._submit(one)
        return one.future

    def all_gather(self, payload: Sequence[Tensor], *, round: RoundKey, weight: float) -> Future[Gathered]:
        """See Collective.all_gather; all payloads come on the device of the own one's first tensor."""
        check_payload(payload, weight)
        one = GatherRound(payload, round, float(weight), self._timeout)
        self._submit(one)
        return one.future

    def close(self) -> None:
        """Leave; rounds in flight end in RoundFailed, here and at the other members."""
        self._end("the collective is closed")
        self._closed.set()
        self._mesh.interrupt()
        # gloo may hold the worker until its time is up (see Mesh.watch); all connections are closed and no one waits.
        self._worker.join(timeout=_LAST_WORDS_S)
        self._mesh.close()

    def _submit(self, one: ReduceRound | ShardedRound | GatherRound) -> None:
        with self._lock:
            reason = self._ended
            if reason is None:
                self._open.add(one)
        if reason is None:
            self._queue.put(one)
        else:
            one.fail(reason)

    def _end(self, reason: str) -> None:
        """Fail every open round, and all to come."""
        with self._lock:
            self._ended = self._ended or reason
            rounds, self._open = self._open, set()
        self._queue.put(None)
        for one in rounds:
            one.fail(reason)

    def _on_loss(self, reason: str) -> None:
        if not self._closed.wait(_LAST_WORDS_S):
            self._end(f"{reason}; {_FINAL}")
            self._mesh.interrupt()

    # -- in the worker thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._mesh.device.type == "cuda":
            torch.cuda.set_device(self._mesh.device)
        while self._ended is None and (one := self._queue.get()) is not None:
            try:
                self._take_part(one)
            except RoundFailed as error:
                one.fail(error.reason)
            except PeerUnreachable as error:
                self._end(f"{error}; {_FINAL}")
            except Exception as error:  # noqa: BLE001 the outermost loop of a thread: no future may be left open
                self._end(f"{type(error).__name__}: {error}")
            with self._lock:
                self._open.discard(one)
        # Tells the others at once that we are gone.
        self._mesh.interrupt()
        self._mesh.close()

    def _take_part(self, one: ReduceRound | ShardedRound | GatherRound) -> None:
        one.wait_ready()
        weights, schemas = self._meet(one)
        one.begun = time.monotonic()
        wrong = one.move(self._mesh, weights, schemas)
        vote = _BROKEN if wrong else _READY if one.hold() else _CANCELLED
        for rank, verdict in enumerate(self._tell(one, bytes([vote]), [1] * self._mesh.size)):
            if verdict[0] == _CANCELLED:
                raise RoundFailed(f"rank{rank} cancelled it")
            if verdict[0] == _BROKEN:
                raise RoundFailed(wrong or f"rank{rank} got a mean that overflows, or none that can be read")
        one.finish(self._members, weights)

    def _meet(self, one: ReduceRound | ShardedRound | GatherRound) -> tuple[tuple[float, ...], list[Schema]]:
        """Wait for all members to come to this round; raises RoundFailed when they are not of one mind."""
        mine = _Offer(one.operation, one.key, one.schema)
        data = mine.encode()
        hello = _HELLO.pack(
            hashlib.blake2b(data, digest_size=16).digest(), len(data), one.weight, one.future.cancelled()
        )
        while True:
            hellos = [_HELLO.unpack(said) for said in self._tell(one, hello, [_HELLO.size] * self._mesh.size)]
            offers = [mine] * self._mesh.size
            if len({digest for digest, *_ in hellos}) > 1:
                offers = [_Offer.decode(said) for said in self._tell(one, data, [length for _, length, *_ in hellos])]
            # Members that are ahead fail those behind and stay at their round until all have come to it.
            if _all_there(one, offers):
                break
        for rank, (*_, cancelled) in enumerate(hellos):
            if cancelled:
                raise RoundFailed(f"rank{rank} cancelled it")
        if len({offer.key.lineage for offer in offers} - {""}) > 1:
            raise RoundFailed("members start from different states: give all of them the same parameters")
        if len({offer.key.digest for offer in offers} - {""}) > 1:
            held = ", ".join(f"rank{rank} {offer.key.digest[:12]}" for rank, offer in enumerate(offers))
            raise RoundFailed(f"the members' anchors differ though they had the same rounds: {held}", diverged=True)
        weights = tuple(weight for *_, weight, _ in hellos)
        if one.operation == "reduce":
            _check_equal([offer.schema for offer in offers])
            if not any(weights):
                raise RoundFailed("every weight is 0: nobody contributed")
        return weights, [offer.schema for offer in offers]

    def _tell(self, one: ReduceRound | ShardedRound | GatherRound, data: bytes, lengths: Sequence[int]) -> list[bytes]:
        """Give bytes to every member and get theirs, by rank."""
        device = self._mesh.device
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        theirs = {rank: torch.empty(lengths[rank], dtype=torch.uint8, device=device) for rank in self._others}
        one.exchange(self._mesh, dict.fromkeys(self._others, mine), theirs)
        return [
            data if rank == self._mesh.rank else bytes(theirs[rank].cpu().numpy()) for rank in range(self._mesh.size)
        ]


def _all_there(one: ReduceRound | ShardedRound | GatherRound, offers: Sequence[_Offer]) -> bool:
    """Tell if all members are at this round; raises RoundFailed when it can't be any more."""
    for rank, offer in enumerate(offers):
        if (offer.operation, offer.key.name) != (offers[0].operation, offers[0].key.name):
            raise RoundFailed(f"members call different rounds: rank0 the {offers[0]}, rank{rank} the {offer}")
    for rank, offer in enumerate(offers):
        if offer.key.index > one.key.index:
            raise RoundFailed(f"rank{rank} skipped it and is at round {offer.key}")
    return all(offer.key == one.key for offer in offers)


def _check_equal(schemas: Sequence[Schema]) -> None:
    first = schemas[0].entries
    for rank, schema in enumerate(schemas):
        if len(schema.entries) != len(first) or schema.form != schemas[0].form:
            raise RoundFailed(f"rank0 offers {schemas[0]}, rank{rank} {schema}")
        for position, (left, right) in enumerate(zip(first, schema.entries, strict=True)):
            if left != right:
                raise RoundFailed(
                    f"tensor {position} is {left[0]}{list(left[1])} on rank0, "
                    f"but {right[0]}{list(right[1])} on rank{rank}"
                )
