"""The data phase of a TorchCollective's reduction through a wire: sizes, parts, sizes, means."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarmkit.optim.collective import Reduced, RoundKey
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.shards import Shards, Wire
from swarmkit.peers.layout import Schema
from swarmkit.peers.mesh import Mesh
from swarmkit.peers.torch_rounds import TorchRound


class ShardedRound(TorchRound[Reduced]):
    """Member j decodes slice j of all contributions, averages it in member order and hands it to everybody, encoded.

    Nothing is sent before all have heard how large it is, and all hear the same: what nobody can take, or could make
    no sense of, so fails the round on all for the same reason and leaves the group as it was.
    """

    operation = "reduce"

    def __init__(self, tensors: Sequence[Tensor], key: RoundKey, weight: float, timeout: float, wire: Wire) -> None:
        super().__init__(tensors, key, weight, timeout)
        self.schema = Schema.of(tensors, wire)
        self._wire = wire

    def move(self, mesh: Mesh, weights: Sequence[float], schemas: Sequence[Schema]) -> str | None:
        """See TorchRound.move."""
        shards = Shards(self._wire, self.tensors, weights, mesh.rank)
        others = [rank for rank in range(mesh.size) if rank != mesh.rank]
        nothing = torch.empty(0, dtype=torch.uint8, device=mesh.device)
        outgoing = dict.fromkeys(range(mesh.size), nothing)
        if mesh.rank in shards.contributors:
            outgoing = {owner: shards.outgoing(owner).to(mesh.device) for owner in range(mesh.size)}
        sizes = self._tell(mesh, [message.numel() for message in outgoing.values()])
        for sender, told in enumerate(sizes):
            for owner, size in enumerate(told):
                _check_size(sender, size, shards.limit(owner) if sender in shards.contributors else 0)
        parts = self._swap(mesh, outgoing, {rank: sizes[rank][mesh.rank] for rank in others})
        parts[mesh.rank] = outgoing[mesh.rank]
        mean, verdict = _reduce(shards, parts)
        verdicts = [told[0] for told in self._tell(mesh, [verdict])]
        for owner, said in enumerate(verdicts):
            if said < 0:
                what = f"what rank{-1 - said} sent" if -1 - said < mesh.size else "the mean, which overflows its dtype"
                raise RoundFailed(f"rank{owner} can't use {what}")
            _check_size(owner, said, shards.limit(owner))
        means = self._swap(mesh, dict.fromkeys(others, mean.to(mesh.device)), {o: verdicts[o] for o in others})
        wrong = None
        for owner, message in means.items():
            try:
                shards.adopt(owner, message)
            except ValueError as error:
                wrong = f"the mean of rank{owner} can't be read: {error}"
        self._means, self._wired = shards.result()
        return wrong

    def _tell(self, mesh: Mesh, numbers: Sequence[int]) -> list[list[int]]:
        """Give as many numbers as they give to all members and get theirs, by rank."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=mesh.device)
        theirs = {rank: torch.empty_like(mine) for rank in range(mesh.size) if rank != mesh.rank}
        self.exchange(mesh, dict.fromkeys(theirs, mine), theirs)
        return [list(numbers) if rank == mesh.rank else theirs[rank].tolist() for rank in range(mesh.size)]

    def _swap(self, mesh: Mesh, outgoing: Mapping[int, Tensor], sizes: Mapping[int, int]) -> dict[int, Tensor]:
        """Send messages to other members and take theirs, of agreed sizes."""
        incoming = {rank: torch.empty(size, dtype=torch.uint8, device=mesh.device) for rank, size in sizes.items()}
        self.exchange(mesh, {rank: outgoing[rank] for rank in sizes}, incoming)
        return incoming

    def result(self, members: tuple[str, ...], weights: tuple[float, ...]) -> Reduced:
        """See TorchRound.result."""
        return Reduced(tensors=self._means, wired=self._wired, **self._stats(members, weights))


def _reduce(shards: Shards, parts: Mapping[int, Tensor]) -> tuple[Tensor, int]:
    """The message of the own slice's mean and its size, or nothing and -1 - the rank to blame (past the last: none)."""
    for sender in shards.contributors:
        try:
            shards.accept(sender, parts[sender])
        except ValueError:
            return torch.empty(0, dtype=torch.uint8), -1 - sender
    try:
        mean = shards.mean()
    except OverflowError:
        return torch.empty(0, dtype=torch.uint8), -1 - len(parts)
    return mean, mean.numel()


def _check_size(rank: int, size: int, limit: int) -> None:
    """Raise RoundFailed, on all members alike, for a message larger than a slice's can be."""
    if not 0 <= size <= limit:
        raise RoundFailed(f"rank{rank} announces {size} bytes for a slice of {limit} at most")
