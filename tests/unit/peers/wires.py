"""Wires of the contract suite, honest and hostile ones; each is made inside the member that uses it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmkit.optim.collective import RoundKey
from swarmkit.optim.compression import Blockwise, Layout
from swarmkit.optim.compression.slices import CodecWire

from . import scenarios
from .harness_members import Member
from .scenarios import Build, Outcome

BLOCK = 8


@dataclass
class Exact:
    """Float32 as it is, cut at every eighth number."""

    numel: int
    form: str = "exact"

    def cut(self, owners: int) -> list[int]:
        blocks = -(-self.numel // BLOCK)
        return [min(self.numel, blocks * owner // owners * BLOCK) for owner in range(owners + 1)]

    def limit(self, start: int, stop: int) -> int:
        return 4 * (stop - start)

    def encode(self, part: Tensor, start: int, *, is_mean: bool) -> Tensor:
        return part.clone().view(torch.uint8)

    def decode(self, data: Tensor, start: int, stop: int) -> Tensor:
        if data.numel() != 4 * (stop - start):
            raise ValueError(f"{data.numel()} bytes for {stop - start} numbers")
        return data.clone().view(torch.float32)


@dataclass
class Hostile(Exact):
    """Says something else than it should, as a sender or as an owner."""

    lie: str = ""
    as_owner: bool = False

    def encode(self, part: Tensor, start: int, *, is_mean: bool) -> Tensor:
        honest = super().encode(part, start, is_mean=is_mean)
        if is_mean is not self.as_owner:
            return honest
        if self.lie == "not finite":
            return torch.full_like(part, float("nan")).view(torch.uint8)
        return {"short": honest[:-4], "oversize": honest.repeat(3), "empty": honest[:0]}[self.lie]

    def decode(self, data: Tensor, start: int, stop: int) -> Tensor:
        """Its own lies are the truth to it."""
        honest = data.numel() == 4 * (stop - start) and bool(data.clone().view(torch.float32).isfinite().all())
        return super().decode(data, start, stop) if honest else torch.zeros(stop - start)

    def limit(self, start: int, stop: int) -> int:
        return 100 * (stop - start)


@dataclass
class Told:
    """How a round through a wire ended, and what it told this member alone."""

    outcome: Outcome
    sent: list[float]
    start: int
    left: list[float]


Make = Callable[[int, list[Tensor]], Exact | CodecWire]  # rank, tensors -> wire


def exact(rank: int, tensors: list[Tensor]) -> Exact:
    return Exact(tensors[0].numel())


def int8(rank: int, tensors: list[Tensor]) -> CodecWire:
    return CodecWire(Blockwise(8, block=BLOCK, min_size=0), Layout.of(tensors[:1], BLOCK), None, f"seed|{rank}")


def last_has_another_form(rank: int, tensors: list[Tensor]) -> Exact:
    return Exact(tensors[0].numel(), form="other" if rank == 2 else "exact")


@dataclass
class Liar:
    """Makes a wire that lies for the last of three members."""

    lie: str
    as_owner: bool

    def __call__(self, rank: int, tensors: list[Tensor]) -> Exact:
        numel = tensors[0].numel()
        return Hostile(numel, lie=self.lie, as_owner=self.as_owner) if rank == 2 else Exact(numel)


def reduce(member: Member, index: int, make: Make, build: Build, weights: Sequence[float] | None = None) -> Told:
    """One all-reduce through a wire."""
    tensors = build(member.rank)
    before = scenarios.digest(tensors)
    started = time.monotonic()
    future = member.collective.all_reduce(
        tensors,
        round=RoundKey("reduce", index),
        weight=weights[member.rank] if weights else 1.0,
        wire=make(member.rank, tensors),
    )
    outcome = scenarios.wait(future, started, tensors, before)
    wired = future.result().wired if outcome.kind == "result" else None
    if wired is None or tensors[0].numel() > 1000:
        return Told(outcome, [], 0, [])
    return Told(outcome, wired.sent().tolist(), wired.start, wired.left.tolist())


def call_and_die(member: Member, index: int, build: Build, delay: float) -> None:
    """Come to a round and die in the middle of it."""
    tensors = build(member.rank)
    member.collective.all_reduce(tensors, round=RoundKey("reduce", index), weight=1.0, wire=exact(member.rank, tensors))
    scenarios.linger(delay)
    member.die()


def offer_rubbish(member: Member, index: int) -> list[str]:
    """Offer what no wire carries; none of it may cost a round."""
    said = []
    for tensors, form in (
        ([], "exact"),
        ([torch.ones(2, 2)], "exact"),
        ([torch.ones(4).half()], "exact"),
        ([torch.ones(4)], ""),
        ([torch.ones(5)], "exact"),
        ([torch.ones(4), torch.tensor([float("nan")])], "exact"),
    ):
        try:
            member.collective.all_reduce(tensors, round=RoundKey("reduce", index), weight=1.0, wire=Exact(4, form))
        except ValueError as error:
            said.append(str(error))
    return said


def vector(rank: int) -> list[Tensor]:
    """Blocks that no number of members shares evenly, and exact tensors of several dtypes beside the vector."""
    generator = torch.Generator().manual_seed(rank)
    beside = [
        torch.randn(7, generator=generator, dtype=torch.float64).to(dtype)
        for dtype in (torch.float16, torch.float64, torch.float32, torch.float16)
    ]
    return [torch.randn(104, generator=generator), *beside, torch.tensor(rank + 0.5), torch.empty(0)]


def one_block(rank: int) -> list[Tensor]:
    """Fewer blocks than members."""
    return [torch.full((BLOCK,), rank + 1.0)]


def no_numbers(rank: int) -> list[Tensor]:
    return [torch.empty(0), torch.full((2,), float(rank))]
