"""What members do in the contract suite; each function runs inside a member and returns plain values."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim.collective import Gathered, Reduced, RoundKey
from swarmkit.optim.errors import RoundFailed

from .harness_members import Member

Build = Callable[[int], list[Tensor]]  # rank -> tensors, the same at each call
# A future that is not done by then is taken for hung.
PATIENCE = 40.0


@dataclass
class Outcome:
    """How a round ended for one member."""

    kind: str  # result, failed, cancelled
    reason: str = ""
    missed: bool = False
    members: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    digest: str = ""  # of everything in the result
    values: Any = None  # of the result, as nested lists, when it is small
    dtypes: Any = None
    shapes: Any = None
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0  # from the call to the end, by our clock
    inputs_unchanged: bool = True


def digest(tensors: Sequence[Tensor]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        state.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def wait(future: Future[Any], started: float, inputs: Sequence[Tensor] = (), before: str = "") -> Outcome:
    """Wait for a round's end and describe it."""
    try:
        result = future.result(PATIENCE)
    except RoundFailed as error:
        outcome = Outcome("failed", error.reason, error.missed)
    except CancelledError:
        outcome = Outcome("cancelled")
    else:
        outcome = _describe(result)
    outcome.seconds = time.monotonic() - started
    outcome.inputs_unchanged = not before or digest(inputs) == before
    return outcome


def _describe(result: Reduced | Gathered) -> Outcome:
    lists = result.payloads if isinstance(result, Gathered) else [result.tensors]
    small = sum(tensor.numel() for tensors in lists for tensor in tensors) < 20_000
    described = [
        [
            [t.tolist() for t in tensors] if small else None,
            [str(t.dtype) for t in tensors],
            [tuple(t.shape) for t in tensors],
        ]
        for tensors in lists
    ]
    values, dtypes, shapes = (list(part) for part in zip(*described, strict=True)) if described else ([], [], [])
    alone = isinstance(result, Reduced)
    return Outcome(
        "result",
        members=result.members,
        weights=result.weights,
        digest=digest([tensor for tensors in lists for tensor in tensors]),
        values=values[0] if alone else values,
        dtypes=dtypes[0] if alone else dtypes,
        shapes=shapes[0] if alone else shapes,
        bytes_sent=result.bytes_sent,
        bytes_received=result.bytes_received,
    )


def reduce(member: Member, index: int, build: Build, weights: Sequence[float] | None = None) -> Outcome:
    """One all-reduce."""
    tensors = build(member.rank)
    before = digest(tensors)
    started = time.monotonic()
    future = member.collective.all_reduce(
        tensors, round=RoundKey("reduce", index), weight=weights[member.rank] if weights else 1.0
    )
    return wait(future, started, tensors, before)


def reduce_from(member: Member, index: int, build: Build, lineages: Sequence[str]) -> Outcome:
    """One all-reduce of members with a past each."""
    started = time.monotonic()
    key = RoundKey("reduce", index, lineages[member.rank])
    return wait(member.collective.all_reduce(build(member.rank), round=key, weight=1.0), started)


def gather(member: Member, index: int, build: Build, weights: Sequence[float] | None = None) -> Outcome:
    """One all-gather."""
    payload = build(member.rank)
    before = digest(payload)
    started = time.monotonic()
    future = member.collective.all_gather(
        payload, round=RoundKey("gather", index), weight=weights[member.rank] if weights else 1.0
    )
    return wait(future, started, payload, before)


def reduce_and_gather_in_flight(member: Member, index: int, build: Build) -> list[Outcome]:
    """Two rounds at once, and the second's result is read first."""
    started = time.monotonic()
    first = member.collective.all_reduce(build(member.rank), round=RoundKey("reduce", index), weight=1.0)
    second = member.collective.all_gather(build(member.rank), round=RoundKey("gather", index), weight=1.0)
    late = wait(second, started)
    return [wait(first, started), late]


def call_and_cancel(member: Member, index: int, build: Build) -> Outcome:
    """Come to a round and go away again."""
    started = time.monotonic()
    future = member.collective.all_reduce(build(member.rank), round=RoundKey("reduce", index), weight=1.0)
    future.cancel()
    return wait(future, started)


def call_and_close(member: Member, index: int, build: Build) -> list[Outcome]:
    """Come to two rounds, leave, and come to a third."""
    started = time.monotonic()
    first = member.collective.all_reduce(build(member.rank), round=RoundKey("reduce", index), weight=1.0)
    second = member.collective.all_gather(build(member.rank), round=RoundKey("gather", index), weight=1.0)
    member.collective.close()
    third = member.collective.all_reduce(build(member.rank), round=RoundKey("reduce", index + 1), weight=1.0)
    return [wait(future, started) for future in (first, second, third)]


def close(member: Member) -> None:
    """Leave."""
    member.collective.close()


def call_and_die(member: Member, operation: str, index: int, build: Build, delay: float) -> None:
    """Come to a round and die in the middle of it."""
    call = member.collective.all_reduce if operation == "reduce" else member.collective.all_gather
    call(build(member.rank), round=RoundKey(operation, index), weight=1.0)
    linger(delay)
    member.die()


def linger(delay: float) -> None:
    """A wait that nothing ends. Where in the round it strikes doesn't matter to what is claimed."""
    threading.Event().wait(delay)


def offer_rubbish(member: Member, index: int) -> dict[str, str]:
    """Offer what no collective may take; returns the refusals, none of which may cost a round."""
    good = torch.ones(2)
    offers: dict[str, tuple[list[Tensor], float]] = {
        "nan": ([good, torch.tensor([1.0, float("nan")])], 1.0),
        "inf": ([good, good, torch.tensor([float("inf")])], 1.0),
        "int": ([torch.ones(2, dtype=torch.int64)], 1.0),
        "bool": ([good, torch.ones(2, dtype=torch.bool)], 1.0),
        "negative weight": ([good], -1.0),
        "nan weight": ([good], float("nan")),
        "infinite weight": ([good], float("inf")),
    }
    said = {}
    for name, (tensors, weight) in offers.items():
        try:
            member.collective.all_reduce(tensors, round=RoundKey("reduce", index), weight=weight)
        except ValueError as error:
            said[name] = str(error)
    try:
        member.collective.all_gather([good], round=RoundKey("gather", index), weight=-1.0)
    except ValueError as error:
        said["gather weight"] = str(error)
    return said


# -- tensors ---------------------------------------------------------------------------------------------------------


def small(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]


def constant(rank: int) -> list[Tensor]:
    return [torch.full((4,), float(10**rank))]


def every_dtype(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(33, generator=generator, dtype=torch.float64).to(dtype)
        for dtype in (torch.float16, torch.float32, torch.bfloat16, torch.float64, torch.float16)
    ]


def beyond_half(rank: int) -> list[Tensor]:
    """Values whose sum no float16 can hold, although their mean can."""
    return [torch.full((8,), 60000.0 - rank, dtype=torch.float16)]


def odd_shapes(rank: int) -> list[Tensor]:
    return [
        torch.tensor(float(rank)),
        torch.empty(0),
        torch.full((2, 0, 3), 1.0),
        torch.full((1,), float(rank)),
        torch.full((1, 1, 1), 2.0 * rank),
    ]


def nothing(rank: int) -> list[Tensor]:
    return []


def only_empty(rank: int) -> list[Tensor]:
    return [torch.empty(0), torch.empty(0, 4, dtype=torch.float16)]


def not_contiguous(rank: int) -> list[Tensor]:
    base = torch.arange(24, dtype=torch.float32).view(4, 6) * (rank + 1)
    return [base.t(), base[:, ::2], base[1:3, 2:4].t(), torch.full((1,), rank + 1.0).expand(5)]


def with_grad(rank: int) -> list[Tensor]:
    return [torch.full((3,), float(rank), requires_grad=True)]


def big(rank: int) -> list[Tensor]:
    """16 MB."""
    return [torch.randn(4 << 20, generator=torch.Generator().manual_seed(rank))]


def many(rank: int) -> list[Tensor]:
    """More tensors than members, most of them smaller than a slice."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(1 + position % 13, generator=generator) for position in range(1500)]


def fewer_elements_than_members(rank: int) -> list[Tensor]:
    return [torch.tensor([rank + 1.0])]


def unequal_payload(rank: int) -> list[Tensor]:
    """Nothing from the first member, more from each one after it, in every dtype that compressed payloads use."""
    if rank == 0:
        return []
    return [
        torch.arange(rank * 3, dtype=torch.uint8),
        torch.arange(rank, dtype=torch.int64) - 1,
        torch.arange(rank * 2, dtype=torch.int32).view(rank, 2),
        torch.arange(rank + 1, dtype=torch.int8) % 2 == 0,
        torch.arange(5, dtype=torch.int16)[: rank - 1],
        torch.full((rank, 2), 0.5, dtype=torch.bfloat16),
        torch.tensor(float("nan") if rank == 2 else rank, dtype=torch.float64),
    ]


def one_differs(rank: int) -> list[Tensor]:
    """The last of two or three members brings another shape."""
    return [torch.ones(2), torch.ones(4, 3) if rank < 2 else torch.ones(5)]


def both_differ(rank: int) -> list[Tensor]:
    return [torch.ones(4, 3) if rank == 0 else torch.ones(5)]


def four_megabytes(rank: int) -> list[Tensor]:
    """4 MB to reduce."""
    return [torch.full((1 << 20,), float(rank))]


def payload_of_rank(rank: int) -> list[Tensor]:
    return [torch.full((100_000 * (rank + 1),), rank, dtype=torch.uint8)]
