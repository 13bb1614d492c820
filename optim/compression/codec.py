"""The interface that all codecs share: tensors lie in one flat float32 buffer, a payload is a list of tensors."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

# Elements that a codec works on at a time on a CPU: temporaries of this size stay in its cache and are not page-faulted
# in anew with every operation, which would cost ten times the arithmetic.
_SPAN = 1 << 17

MIN_SIZE = 1024  # elements below which a tensor travels exact, unless a codec is told otherwise

Parameters = Sequence[float]  # one a tensor: density, rank or bits, whatever the codec's axis is


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in a flat float32 buffer: each starts at a multiple of `align`, and zeros fill the gaps."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    align: int = 1

    @classmethod
    def of(cls, tensors: Sequence[Tensor], align: int = 1) -> "Layout":
        """The layout of tensors, on the first one's device."""
        return cls(
            tuple(tuple(tensor.shape) for tensor in tensors),
            tuple(tensor.dtype for tensor in tensors),
            tensors[0].device if tensors else torch.device("cpu"),
            align,
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each tensor, gaps not counted."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts, and at the end the size of the buffer."""
        found = [0]
        for size in self.sizes:
            found.append(found[-1] + -(-size // self.align) * self.align)
        return tuple(found)

    @property
    def total(self) -> int:
        """Elements of the buffer, gaps counted."""
        return self.offsets[-1]

    @cached_property
    def owners(self) -> Tensor:
        """Which tensor each run of `align` elements belongs to; int64, on the buffer's device."""
        runs = [(end - start) // self.align for start, end in zip(self.offsets, self.offsets[1:], strict=False)]
        return torch.arange(len(runs)).repeat_interleave(torch.tensor(runs, dtype=torch.int64)).to(self.device)

    def part(self, start: int, stop: int) -> tuple["Layout", list[int]]:
        """The layout of a slice that is cut at multiples of `align`, and the tensors that its own are pieces of."""
        found = [
            (i, min(stop, offset + size) - max(start, offset))
            for i, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=False))
            if offset < stop and offset + size > start
        ]
        shapes = tuple((size,) for _, size in found)
        pieces = [i for i, _ in found]
        return Layout(shapes, tuple(self.dtypes[i] for i in pieces), self.device, self.align), pieces

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """A new flat float32 copy of tensors of this layout."""
        flat = torch.empty(self.total, device=self.device)
        gaps = [
            flat[start + size : end]
            for start, size, end in zip(self.offsets, self.sizes, self.offsets[1:], strict=False)
            if start + size < end
        ]
        if gaps:
            torch._foreach_zero_(gaps)
        if tensors:
            torch._foreach_copy_(self.views(flat), [tensor.detach() for tensor in tensors])
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors as float32 views of a buffer."""
        return [
            flat[start : start + size].view(shape)
            for start, size, shape in zip(self.offsets, self.sizes, self.shapes, strict=False)
        ]

    def split(self, flat: Tensor) -> list[Tensor]:
        """The tensors in their own dtypes; what a narrower dtype cannot hold becomes its largest value."""
        found = []
        for view, dtype in zip(self.views(flat), self.dtypes, strict=True):
            if dtype.itemsize < 4 and view.numel():
                limit = torch.finfo(dtype).max
                view = view.clamp(-limit, limit)
            found.append(view.to(dtype))
        return found


@runtime_checkable
class Codec(Protocol):
    """What all codecs have in common.

    A codec holds settings only and may serve several averagings; what changes from round to round is passed in. A
    parameter is what L-GreCo chooses for each tensor; where none is given, the codec's own `parameter` counts.
    """

    name: str
    unbiased: bool  # the expectation of what comes out is what went in
    contractive: bool  # what comes out is nearer to what went in than zero is: error feedback stays bounded
    align: int  # of the layouts that it works on
    parameter: float | None  # the uniform choice; None for a codec without a parameter
    candidates: tuple[float, ...]  # sensible choices of the parameter, fewest bytes first
    min_size: int  # elements below which a tensor travels exact

    def payload_bytes(self, shape: Sequence[int], parameter: float | None = None) -> int:
        """Bytes that a tensor takes in a payload, at most."""
        ...

    def errors(self, tensor: Tensor, candidates: Parameters) -> Tensor:
        """Norm of x - C(x) for each candidate, float64; for a stochastic codec the root of the expected square."""
        ...


@runtime_checkable
class GatherCodec(Codec, Protocol):
    """A codec whose payloads cannot be summed: every member decodes every payload."""

    def encode(
        self, flat: Tensor, layout: Layout, generator: torch.Generator, parameters: Parameters | None = None
    ) -> list[Tensor]:
        """The payload of a buffer. It says by itself which parameters it was made with."""
        ...

    def decode(self, payload: Sequence[Tensor], layout: Layout, out: Tensor | None = None) -> Tensor:
        """The buffer of a payload, always finite, written to `out` if there is one.

        Payloads come from strangers: raises ValueError naming what of it is not as `encode` makes it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What an exchange of means came to."""

    mean: Tensor  # flat, the same on all members
    sent: Callable[[], Tensor]  # flat: this member's share of it, of which the mean is the weighted mean
    state: list[Tensor] = field(default_factory=list)  # for the next exchange, the same on all members


@runtime_checkable
class LinearCodec(Codec, Protocol):
    """A codec whose payloads are averaged as they are, in one or more dependent rounds."""

    stages: tuple[str, ...]  # appended to the name of each round

    def exchange(
        self,
        flat: Tensor,
        layout: Layout,
        generator: torch.Generator,
        parameters: Parameters | None = None,
        state: Sequence[Tensor] = (),
    ) -> Generator[list[Tensor], list[Tensor], Exchanged]:
        """Yield what to average in each stage, take its mean, and return the outcome.

        The generator's draws and the state must be the same on all members.
        """
        ...


def encode(
    codec: GatherCodec, tensors: Sequence[Tensor], generator: torch.Generator, parameters: Parameters | None = None
) -> list[Tensor]:
    """The payload of tensors."""
    layout = Layout.of(tensors, codec.align)
    return codec.encode(layout.flatten(tensors), layout, generator, parameters)


def decode(codec: GatherCodec, payload: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a payload, in the shapes and dtypes of `like`; raises ValueError as `GatherCodec.decode` does."""
    layout = Layout.of(like, codec.align)
    return layout.split(codec.decode(payload, layout))


def round_trip(
    codec: Codec, tensors: Sequence[Tensor], generator: torch.Generator, parameters: Parameters | None = None
) -> list[Tensor]:
    """What comes out on the other side of a codec, of whatever kind."""
    layout = Layout.of(tensors, codec.align)
    flat = layout.flatten(tensors)
    if isinstance(codec, GatherCodec):
        return layout.split(codec.decode(codec.encode(flat, layout, generator, parameters), layout))
    assert isinstance(codec, LinearCodec)
    exchange = codec.exchange(flat, layout, generator, parameters)
    offered = next(exchange)
    while True:
        try:
            offered = exchange.send(offered)
        except StopIteration as stop:
            return layout.split(stop.value.mean)


def compresses(codec: Codec, shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape is large enough for a codec and gets any smaller; others travel exact."""
    size = math.prod(shape)
    return size >= max(codec.min_size, 1) and codec.payload_bytes(shape) < 4 * size


def spans(total: int, multiple: int, device: torch.device) -> Iterator[slice]:
    """Cut a buffer into slices for one pass each, at multiples of `multiple`: cache-sized on a CPU, else in one."""
    step = -(-_SPAN // multiple) * multiple if device.type == "cpu" else max(total, 1)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def run_tops(flat: Tensor, run: int) -> Tensor:
    """The largest magnitude of each run of that many elements."""
    found = torch.empty(flat.numel() // run, device=flat.device)
    for span in spans(flat.numel(), run, flat.device):
        # Several times as fast as a norm.
        torch.amax(flat[span].view(-1, run).abs(), 1, out=found[span.start // run : span.stop // run])
    return found


def tensor_tops(flat: Tensor, layout: Layout) -> Tensor:
    """The largest magnitude of each tensor; 0 for an empty one."""
    tops = flat.new_zeros(len(layout.shapes))
    return tops.scatter_reduce_(0, layout.owners, run_tops(flat, layout.align), "amax")


def check_part(part: Tensor, what: str, dtype: torch.dtype, count: int) -> Tensor:
    """A part of a payload, or ValueError when it is of another dtype or size."""
    if part.dtype != dtype or part.dim() != 1 or part.numel() != count:
        raise ValueError(f"{what} of the payload are {part.dtype}{list(part.shape)}, not {count} of {dtype}")
    return part


def check_parts(payload: Sequence[Tensor], count: int, name: str) -> Sequence[Tensor]:
    """The parts of a payload, or ValueError when they are of another number."""
    if len(payload) != count:
        raise ValueError(f"a payload of {name} has {count} parts, not {len(payload)}")
    return payload


def check_scales(scales: Tensor, count: int, limit: float) -> Tensor:
    """The scales of a payload, or ValueError when they are not `count` float32 numbers in [0, limit]."""
    check_part(scales, "scales", torch.float32, count)
    # Also false for NaN.
    if count and not bool(((scales >= 0) & (scales <= limit)).all()):
        raise ValueError(f"the scales of the payload are not all in [0, {limit:g}]")
    return scales


def chosen(parameters: Parameters | None, default: float, layout: Layout) -> list[float]:
    """One parameter a tensor; raises ValueError for another number of them."""
    if parameters is None:
        return [default] * len(layout.shapes)
    if len(parameters) != len(layout.shapes):
        raise ValueError(f"{len(parameters)} parameters for {len(layout.shapes)} tensors")
    return [float(parameter) for parameter in parameters]
