"""Bounded point-to-point exchanges among the ranks of a torch.distributed group of our own (gloo or NCCL)."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from swarmkit.peers.errors import JoinFailed, PeerUnreachable

# Tags that no exchange uses: see `interrupt` and `watch`.
_INTERRUPT_TAG, _WATCH_TAG = 77, 78
_BULK_BYTES = 1 << 20  # from here on an exchange goes by turns
_FOR_EVER = timedelta(days=100)


class Mesh:
    """A process group with one operation: every rank sends a buffer to every other one and takes one from it.

    Sends and receives instead of the group's collectives, because these say which rank is gone, send no padding, and
    leave the order of summation to us. NCCL moves CUDA tensors only: `device` is where buffers must lie.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._owns_default = group is None and _join_torchrun(timeout)
        parent = dist.group.WORLD if group is None else group
        ranks = dist.get_process_group_ranks(parent)
        self.rank: int = dist.get_rank(parent)
        self.size: int = len(ranks)
        self.device = torch.device("cpu")
        if "nccl" in dist.get_backend_config(parent):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._lock = threading.Lock()
        try:
            with _errors_are_ours():
                self._group: dist.ProcessGroup | None = dist.new_group(
                    ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=True, sort_ranks=False
                )
        except (RuntimeError, dist.DistError) as error:
            self.close()
            raise JoinFailed(f"not all {self.size} ranks made their collective: {_brief(error)}") from error

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], deadline: float) -> None:
        """Send and receive contiguous tensors on `device`, by rank.

        Raises PeerUnreachable naming the rank that is gone or silent at `deadline` (monotonic seconds). The mesh is of
        no use any more then: gloo closes all connections, and bytes under way can't be told from those to come.
        """
        group = self._group
        if group is None:
            raise PeerUnreachable("the group is closed")
        operations = [
            dist.P2POp(operation, tensor.reshape(-1).view(torch.uint8), group=group, group_peer=rank)
            for operation, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
            for rank, tensor in tensors.items()
            if tensor.numel()
        ]
        for batch in self._in_turns(operations):
            self._run(batch, deadline)

    def _in_turns(self, operations: list[dist.P2POp]) -> list[list[dist.P2POp]]:
        """Order operations so that bulk flows to one rank at a time: flows that share a link finish unevenly."""
        if self.device.type == "cuda" or sum(operation.tensor.numel() for operation in operations) < _BULK_BYTES:
            return [operations] if operations else []
        turns: dict[int, list[dist.P2POp]] = {}
        for operation in operations:
            distance = (
                operation.group_peer - self.rank if operation.op is dist.isend else self.rank - operation.group_peer
            )
            turns.setdefault(distance % self.size, []).append(operation)
        return [turns[turn] for turn in sorted(turns)]

    def _run(self, operations: list[dist.P2POp], deadline: float) -> None:
        # NCCL takes all at once and can't tell whose fault it was; gloo goes one by one.
        batches = [operations] if self.device.type == "cuda" else [[operation] for operation in operations]
        culprit = "a member"
        works: list[tuple[str, dist.Work]] = []
        try:
            for batch in batches:
                culprit = f"rank{batch[0].group_peer}" if len(batch) == 1 else "a member"
                works += [(culprit, work) for work in dist.batch_isend_irecv(batch)]
            for culprit, work in works:  # noqa: B007 read in the except clause
                self._wait(work, deadline)
        except (RuntimeError, dist.DistError) as error:
            silent = "imed out" in str(error)
            raise PeerUnreachable(
                f"{culprit} did not answer in time" if silent else f"{culprit} is gone: {_brief(error)}"
            ) from error

    def _wait(self, work: dist.Work, deadline: float) -> None:
        if self.device.type == "cuda":
            # A bounded wait of NCCL looks every 10 ms only; most exchanges are shorter than that.
            pause = 20e-6
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """Call `on_loss` (from another thread, with a reason) for every rank that is gone, while the mesh is open.

        gloo needs this: when a connection breaks, operations that wait end, but one whose bytes are under way does not.
        """
        if self.device.type == "cuda":
            return
        for rank in range(self.size):
            if rank != self.rank:
                name = f"swarmkit-watch-{rank}"
                threading.Thread(target=self._watch, args=(rank, on_loss), name=name, daemon=True).start()

    def _watch(self, rank: int, on_loss: Callable[[str], None]) -> None:
        group = self._group
        try:
            if group is not None:
                work = group.recv([torch.empty(1)], rank, _WATCH_TAG)
                del group  # or its connections would stay open for as long as we watch
                work.wait(_FOR_EVER)
        except (RuntimeError, dist.DistError) as error:
            if "Application timeout" not in str(error):  # that is our own doing
                on_loss(f"rank{rank} is gone: {_brief(error)}")

    def interrupt(self) -> None:
        """End an exchange that another thread waits in, and every later one; the other ranks notice at once."""
        group = self._group
        if group is None or self.size == 1:
            return
        if self.device.type == "cuda":
            group.abort()
            return
        # The only way out of gloo's wait: a receive that times out closes all connections of the group. One from a rank
        # that is known to be gone fails before that.
        for rank in range(self.size):
            if rank == self.rank:
                continue
            try:
                group.recv([torch.empty(1)], rank, _INTERRUPT_TAG).wait(timedelta(milliseconds=1))
            except (RuntimeError, dist.DistError) as error:
                if "imed out" in str(error):
                    return

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            group, self._group = getattr(self, "_group", None), None
            owned, self._owns_default = self._owns_default, False
        with suppress(RuntimeError, ValueError, dist.DistError):
            if group is not None:
                dist.destroy_process_group(group)
        if owned and dist.is_initialized():
            dist.destroy_process_group()


def _join_torchrun(timeout: float) -> bool:
    """Make the default group if torchrun started us and nobody has yet; True if we made it."""
    if dist.is_initialized():
        return False
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            "torch.distributed is not initialized: start with torchrun, or call init_process_group() first "
            f"(not in the environment: {', '.join(missing)})"
        )
    if torch.cuda.is_available() and dist.is_nccl_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl", timeout=timedelta(seconds=timeout))
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    return True


@contextmanager
def _errors_are_ours() -> Iterator[None]:
    """Keep NCCL's watchdog from killing the process when a rank dies: we report it, and training goes on.

    The group reads this variable when it is made, and has no argument for it.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _brief(error: Exception) -> str:
    """Cut gloo's source position and advice from its message."""
    text = re.sub(r"^(\[[^\]]*\]\s*)+", "", str(error).strip())
    return text.splitlines()[0].split(". ")[0][:200] if text else type(error).__name__
