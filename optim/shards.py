"""Sharded reduction through a lossy wire: each member owns a slice, and what it costs does not grow with the members.

As in an all-reduce every member sends every owner a slice, takes part in the mean of its own one, and sends that to
all; but slices travel encoded, once on the way to the owner and once more on the way back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarmkit.optim.mean import weighted_mean
from swarmkit.optim.norms import is_finite


class Wire(Protocol):
    """How one flat float32 vector travels in slices. Everything but `encode` must be the same on all members."""

    form: str  # members with another one, of at most 64 characters, are not averaged

    def cut(self, owners: int) -> Sequence[int]:
        """Where the slices of so many owners begin, in order, and at the end the size of the vector."""
        ...

    def limit(self, start: int, stop: int) -> int:
        """Bytes that an encoded slice takes at most: who receives more reads no further."""
        ...

    def encode(self, part: Tensor, start: int, *, is_mean: bool) -> Tensor:
        """Bytes (uint8, on the part's device) of a slice that begins at `start`: a contribution, or its owner's mean.

        Draws must depend on the round and the slice alone: an attempt that broke is begun again.
        """
        ...

    def decode(self, data: Tensor, start: int, stop: int) -> Tensor:
        """The slice of `encode`'s bytes; they come from strangers, so raises ValueError for what are none."""
        ...


@dataclass(frozen=True, slots=True)
class Wired:
    """What only this member knows of a reduction through a wire; for error feedback."""

    sent: Callable[[], Tensor]  # flat: this member's contribution as its owners decoded it; zeros for a weight of 0
    start: int  # where the slice begins that this member owned
    left: Tensor  # what encoding that slice's mean left out of it


class Shards:
    """One member's part in one attempt at a sharded reduction: all of it but moving the bytes.

    The first tensor travels through the wire. The others travel as they are, cut into slices in the same way, and
    their mean is that of a plain all-reduce, bit for bit. Messages are flat uint8 tensors: the exact parts by dtype,
    then the encoded one. Methods for different members may run in threads of their own.
    """

    def __init__(self, wire: Wire, tensors: Sequence[Tensor], weights: Sequence[float], me: int) -> None:
        self.contributors = [i for i, weight in enumerate(weights) if weight > 0]
        self._wire = wire
        self._weights = weights
        self._me = me
        self._vector, *exact = (tensor.detach() for tensor in tensors)
        self._like = exact
        self._bounds = wire.cut(len(weights))
        self._exact: dict[torch.dtype, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in exact):
            parts = [tensor.reshape(-1).to(self._vector.device) for tensor in exact if tensor.dtype is dtype]
            self._exact[dtype] = torch.cat(parts)
        self._encoded: dict[int, Tensor] = {}  # own slices by owner
        self._parts: dict[int, list[Tensor]] = {}  # decoded contributions to the own slice: exact ones, the vector's
        self._mean = torch.empty_like(self._vector)
        self._exact_means = {dtype: torch.empty_like(flat) for dtype, flat in self._exact.items()}
        self._left = self._vector.new_empty(0)

    @property
    def is_ready(self) -> bool:
        """Whether all contributions to the own slice have been accepted."""
        return all(i in self._parts for i in self.contributors)

    def limit(self, owner: int) -> int:
        """Bytes of a message about an owner's slice, at most."""
        start, stop = self._span(owner)
        return self._exact_bytes(owner) + (self._wire.limit(start, stop) if start < stop else 0)

    @torch.no_grad()
    def outgoing(self, owner: int) -> Tensor:
        """What to send to an owner, itself included; the same at each call."""
        start, stop = self._span(owner)
        if owner not in self._encoded:
            empty = self._vector.new_empty(0, dtype=torch.uint8)
            part = self._vector[start:stop]
            self._encoded[owner] = self._wire.encode(part, start, is_mean=False) if start < stop else empty
        return self._message([flat[self._exact_span(flat, owner)] for flat in self._exact.values()], owner)

    @torch.no_grad()
    def accept(self, sender: int, message: Tensor) -> None:
        """Take a member's contribution to the own slice; raises ValueError naming what of it is wrong."""
        self._parts[sender] = self._read(message, self._me)

    @torch.no_grad()
    def mean(self) -> Tensor:
        """What to send to all once `is_ready`; raises OverflowError when an exact tensor's mean has no place in it."""
        weights = [self._weights[i] for i in self.contributors]
        *exact, mean = (
            weighted_mean(part, weights) for part in zip(*(self._parts.pop(i) for i in self.contributors), strict=True)
        )
        if not all(is_finite(part) for part in exact):
            raise OverflowError("the mean overflows its dtype")
        if not is_finite(mean):
            mean.nan_to_num_()  # a sum of shares of the largest numbers, rounded up
        start, stop = self._span(self._me)
        encoded = self._wire.encode(mean, start, is_mean=True) if start < stop else mean.view(torch.uint8)
        message = torch.cat([*(part.view(torch.uint8) for part in exact), encoded])
        self.adopt(self._me, message)
        self._left = mean.sub_(self._mean[start:stop])
        return message

    @torch.no_grad()
    def adopt(self, owner: int, message: Tensor) -> None:
        """Take an owner's mean; raises ValueError naming what of it is wrong."""
        start, stop = self._span(owner)
        *exact, mean = self._read(message, owner)
        self._mean[start:stop] = mean
        for part, flat in zip(exact, self._exact_means.values(), strict=True):
            flat[self._exact_span(flat, owner)] = part

    def result(self) -> tuple[list[Tensor], Wired]:
        """The means of all tensors, and what they say of this member, once every owner's has been adopted."""
        means, offsets = [self._mean], dict.fromkeys(self._exact, 0)
        for like in self._like:
            start = offsets[like.dtype]
            offsets[like.dtype] = start + like.numel()
            means.append(self._exact_means[like.dtype][start : offsets[like.dtype]].view(like.shape).to(like.device))
        return means, Wired(self._sent, self._span(self._me)[0], self._left)

    @torch.no_grad()
    def _sent(self) -> Tensor:
        sent = torch.zeros_like(self._vector)
        for owner, data in self._encoded.items():
            start, stop = self._span(owner)
            if start < stop:
                sent[start:stop] = self._wire.decode(data, start, stop)
        return sent

    # -- messages ------------------------------------------------------------------------------------------------------

    def _span(self, owner: int) -> tuple[int, int]:
        return self._bounds[owner], self._bounds[owner + 1]

    def _exact_span(self, flat: Tensor, owner: int) -> slice:
        size, owners = flat.numel(), len(self._weights)
        return slice(size * owner // owners, size * (owner + 1) // owners)

    def _exact_bytes(self, owner: int) -> int:
        spans = ((flat, self._exact_span(flat, owner)) for flat in self._exact.values())
        return sum((span.stop - span.start) * flat.element_size() for flat, span in spans)

    def _message(self, exact: list[Tensor], owner: int) -> Tensor:
        return torch.cat([*(part.view(torch.uint8) for part in exact), self._encoded[owner]])

    def _read(self, message: Tensor, owner: int) -> list[Tensor]:
        """The exact parts and the vector's of a message about an owner's slice."""
        if message.numel() > self.limit(owner) or message.numel() < self._exact_bytes(owner):
            raise ValueError(f"a message of {message.numel()} bytes about a slice of {self.limit(owner)} at most")
        message = message.to(self._vector.device)
        parts = []
        for dtype, flat in self._exact.items():
            span = self._exact_span(flat, owner)
            size = (span.stop - span.start) * dtype.itemsize
            # A view as wider numbers wants the bytes in a storage of their own.
            part, message = message[:size].clone().view(dtype), message[size:]
            if not is_finite(part):
                raise ValueError("values that are not finite")
            parts.append(part)
        start, stop = self._span(owner)
        if start == stop:
            return [*parts, self._vector.new_empty(0)]
        vector = self._wire.decode(message, start, stop)
        if not is_finite(vector):
            raise ValueError("values that are not finite")
        return [*parts, vector]
