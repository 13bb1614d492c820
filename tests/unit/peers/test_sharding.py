"""ShardedReduction without a network: who is blamed when a member sends what nobody can read."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from swarmkit.optim.mean import weighted_mean
from swarmkit.peers.blame import Blame
from swarmkit.peers.exchange import Agreement
from swarmkit.peers.sharding import ShardedReduction
from swarmkit.peers.transport import Traffic

from .wires import Exact, Hostile, Liar, vector

MEMBERS = ("first", "second", "third")
CHUNK = 64


class Wires:
    """A Bulk whose streams lead straight to the other members' exchanges."""

    def __init__(self, me: str, exchanges: dict[str, ShardedReduction]) -> None:
        self._me = me
        self._exchanges = exchanges

    def open(self, peer_id: str, kind: str, header: Any, outgoing: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        return self._exchanges[peer_id].serve(self._me, outgoing)


def exchange(make: Any) -> list[Any]:
    """What each of three members gets out of one attempt: means, or the Blame that it reports."""

    async def attempt() -> list[Any]:
        agreement = Agreement("attempt", MEMBERS, (1.0, 1.0, 1.0), ())
        exchanges = {}
        for rank, me in enumerate(MEMBERS):
            tensors = vector(rank)
            exchanges[me] = ShardedReduction(agreement, me, tensors, make(rank, tensors), Traffic(), CHUNK)
        runs = [one.run(Wires(me, exchanges)) for me, one in exchanges.items()]  # type: ignore[arg-type]
        return await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 20)

    return asyncio.run(attempt())


def test_three_members_get_the_mean() -> None:
    found = exchange(lambda rank, tensors: Exact(tensors[0].numel()))
    expected = [weighted_mean(parts, (1.0, 1.0, 1.0)) for parts in zip(*map(vector, range(3)), strict=True)]
    for means, _ in found:
        assert all(torch.equal(a, b) for a, b in zip(means, expected, strict=True))


@pytest.mark.parametrize("as_owner", [False, True])
@pytest.mark.parametrize("lie", ["short", "oversize", "empty", "not finite"])
def test_nobody_blames_an_honest_member_whoever_reports_first(lie: str, as_owner: bool) -> None:
    """A coordinator acts on the first report that it hears: none may speak of a broken link to who is honest."""
    for blame in exchange(Liar(lie, as_owner))[:2]:
        assert isinstance(blame, Blame)
        assert (blame.peer_id, blame.is_link) == ("third", False), blame.reason


def test_a_liar_among_owners_may_not_name_a_member_that_there_is_not() -> None:
    async def read(head: bytes) -> Blame:
        agreement = Agreement("attempt", MEMBERS, (1.0, 1.0, 1.0), ())
        one = ShardedReduction(agreement, "first", vector(0), Exact(104), Traffic(), CHUNK)

        async def replies() -> AsyncIterator[bytes]:
            yield head

        with pytest.raises(Blame) as caught:
            await one._receive(2, replies(), 1000)
        return caught.value

    for head in (b"\xff" * 8 + (7).to_bytes(4, "little"), b"\0" * 12, b"\xff" * 8, b"\0" * 40):
        blame = asyncio.run(read(head))
        assert (blame.peer_id, blame.is_link) == ("third", False)
    named = asyncio.run(read(b"\xff" * 8 + (1).to_bytes(4, "little")))
    assert named.peer_id == "second"


def test_the_hostile_wire_is_hostile() -> None:
    part = torch.ones(8)
    for lie in ("short", "oversize", "empty", "not finite"):
        said = Hostile(8, lie=lie).encode(part, 0, is_mean=False)
        assert not torch.equal(said, Exact(8).encode(part, 0, is_mean=False))
