"""The data phases of TorchCollective's rounds: a direct reduce-scatter and all-gather, and a gather of any payloads."""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from swarmkit.optim.collective import Gathered, Reduced, RoundKey, RoundStats
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.mean import weighted_mean
from swarmkit.peers.layout import DTYPES, Layout, Schema
from swarmkit.peers.mesh import Mesh

T = TypeVar("T", bound=RoundStats)


class TorchRound(Generic[T]):
    """One call of a collective: what was offered, until when, and the future that is promised."""

    operation: ClassVar[str]

    def __init__(self, tensors: Sequence[Tensor], key: RoundKey, weight: float, timeout: float) -> None:
        for position, tensor in enumerate(tensors):
            if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
                raise ValueError(f"tensor {position} has dtype {tensor.dtype}: it can't be sent")
        self.tensors = [tensor.detach() for tensor in tensors]
        self.schema = Schema.of(tensors)
        self.key = key
        self.weight = weight
        self.started = time.monotonic()
        self.deadline = self.started + timeout
        self.begun = self.started
        self.future: Future[T] = Future()
        self.sent = self.received = 0
        self._lock = threading.Lock()
        self._finished = False
        self._ready: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            # The worker's stream must not read what the caller's stream still computes.
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def __str__(self) -> str:
        return f"all_{self.operation} {self.key}"

    def wait_ready(self) -> None:
        """Wait until the caller's CUDA stream has computed the tensors."""
        if self._ready is not None:
            self._ready.synchronize()

    def exchange(self, mesh: Mesh, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Exchange within the round's time, and count."""
        mesh.exchange(outgoing, incoming, self.deadline)
        self.sent += sum(tensor.nbytes for tensor in outgoing.values())
        self.received += sum(tensor.nbytes for tensor in incoming.values())

    def move(self, mesh: Mesh, weights: Sequence[float], schemas: Sequence[Schema]) -> str | None:
        """Exchange the data; returns what is wrong with the outcome, if anything is."""
        raise NotImplementedError

    def result(self, members: tuple[str, ...], weights: tuple[float, ...]) -> T:
        """Describe the closed round."""
        raise NotImplementedError

    # -- the future: the caller may cancel it and close() may fail it at any moment ------------------------------------

    def _stats(self, members: tuple[str, ...], weights: tuple[float, ...]) -> dict[str, Any]:
        """What RoundStats tells of this round, to go into its result."""
        return {
            "members": members,
            "weights": weights,
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "seconds": time.monotonic() - self.started,
            "waited": self.begun - self.started,
        }

    def hold(self) -> bool:
        """Promise a result: from here on `cancel` comes too late. False if it came before."""
        with self._lock:
            if not self._finished:
                self._finished = not self.future.set_running_or_notify_cancel()
            return not self._finished

    def finish(self, members: tuple[str, ...], weights: tuple[float, ...]) -> None:
        """Hand the result over."""
        with self._lock:
            if not self._finished:
                self._finished = True
                self.future.set_result(self.result(members, weights))

    def fail(self, reason: str) -> None:
        """End in RoundFailed, unless the future is done."""
        with self._lock:
            if not self._finished and (self.future.running() or self.future.set_running_or_notify_cancel()):
                self.future.set_exception(RoundFailed(f"round {self.key}: {reason}"))
            self._finished = True


class ReduceRound(TorchRound[Reduced]):
    """Member j averages slice j of all contributions in member order and hands it to everybody."""

    operation = "reduce"

    def move(self, mesh: Mesh, weights: Sequence[float], schemas: Sequence[Schema]) -> str | None:
        """See TorchRound.move."""
        layout = Layout(self.schema)
        wrong = None
        means: dict[torch.dtype, Tensor] = {}
        for dtype, size in layout.sizes.items():
            group = [tensor for tensor in self.tensors if tensor.dtype is dtype]
            flat = _flatten(group, math.ceil(size / mesh.size) * mesh.size, mesh.device)
            if not self._average(mesh, flat.view(mesh.size, -1), weights):
                wrong = f"the mean of the {dtype} tensors overflows"
            means[dtype] = flat[:size].to(group[0].device)
        self._means = layout.unflatten(means, like=self.tensors)
        return wrong

    def _average(self, mesh: Mesh, slices: Tensor, weights: Sequence[float]) -> bool:
        """Replace this member's slices by the mean's; False if that is not finite."""
        others = [rank for rank in range(mesh.size) if rank != mesh.rank]
        contributors = [rank for rank, weight in enumerate(weights) if weight > 0]
        parts = {rank: slices[mesh.rank] if rank == mesh.rank else torch.empty_like(slices[0]) for rank in contributors}
        outgoing = {rank: slices[rank] for rank in others} if weights[mesh.rank] > 0 else {}
        self.exchange(mesh, outgoing, {rank: part for rank, part in parts.items() if rank != mesh.rank})
        mean = weighted_mean(list(parts.values()), [weights[rank] for rank in contributors])
        slices[mesh.rank] = mean
        self.exchange(mesh, dict.fromkeys(others, mean), {rank: slices[rank] for rank in others})
        return bool(torch.isfinite(mean).all())

    def result(self, members: tuple[str, ...], weights: tuple[float, ...]) -> Reduced:
        """See TorchRound.result."""
        return Reduced(tensors=self._means, **self._stats(members, weights))


class GatherRound(TorchRound[Gathered]):
    """Every member sends its payload to every other one."""

    operation = "gather"

    def move(self, mesh: Mesh, weights: Sequence[float], schemas: Sequence[Schema]) -> str | None:
        """See TorchRound.move."""
        mine = _pack(self.tensors, self.schema, mesh.device)
        packed = [
            mine if rank == mesh.rank else torch.empty(schema.num_bytes, dtype=torch.uint8, device=mesh.device)
            for rank, schema in enumerate(schemas)
        ]
        others = [rank for rank in range(mesh.size) if rank != mesh.rank]
        self.exchange(mesh, dict.fromkeys(others, mine), {rank: packed[rank] for rank in others})
        device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self._payloads = [_unpack(data.to(device), schema) for data, schema in zip(packed, schemas, strict=True)]
        return None

    def result(self, members: tuple[str, ...], weights: tuple[float, ...]) -> Gathered:
        """See TorchRound.result."""
        return Gathered(payloads=self._payloads, **self._stats(members, weights))


def _flatten(tensors: Sequence[Tensor], size: int, device: torch.device) -> Tensor:
    """Copy tensors of one dtype into a flat buffer on `device`, with zeros up to `size`."""
    flat = torch.empty(size, dtype=tensors[0].dtype, device=device)
    # Joined on the tensors' device first: one transfer instead of one for each.
    joined = torch.cat([tensor.reshape(-1).to(tensors[0].device) for tensor in tensors])
    flat[: joined.numel()].copy_(joined)
    flat[joined.numel() :].zero_()
    return flat


def _sorted_sizes(schema: Schema) -> list[tuple[torch.dtype, int]]:
    """List dtypes by falling size, so that each part of a packed buffer is aligned."""
    return sorted(Layout(schema).sizes.items(), key=lambda entry: -entry[0].itemsize)


def _pack(tensors: Sequence[Tensor], schema: Schema, device: torch.device) -> Tensor:
    parts = [
        _flatten([tensor for tensor in tensors if tensor.dtype is dtype], size, device).view(torch.uint8)
        for dtype, size in _sorted_sizes(schema)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _unpack(data: Tensor, schema: Schema) -> list[Tensor]:
    flat = {}
    start = 0
    for dtype, size in _sorted_sizes(schema):
        stop = start + size * dtype.itemsize
        flat[dtype] = data[start:stop].view(dtype)
        start = stop
    return Layout(schema).unflatten(flat)
