"""What members report when the streams of one of them fail: it is told as the cause, the others' ends as echoes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from swarmkit.peers.blame import Blame
from swarmkit.peers.errors import PeerUnreachable
from swarmkit.peers.exchange import Agreement, Gathering, Reduction
from swarmkit.peers.layout import Schema
from swarmkit.peers.sharding import ShardedReduction
from swarmkit.peers.transport import Traffic

from .wires import Exact, vector

MEMBERS = ("first", "second", "third")
CHUNK = 64
Make = Callable[[Agreement, str], Any]


def reduction(agreement: Agreement, me: str) -> Reduction:
    return Reduction(agreement, me, vector(MEMBERS.index(me)), Traffic(), CHUNK)


def gathering(agreement: Agreement, me: str) -> Gathering:
    return Gathering(agreement, me, vector(MEMBERS.index(me)), Traffic(), CHUNK)


def sharded(agreement: Agreement, me: str) -> ShardedReduction:
    tensors = vector(MEMBERS.index(me))
    return ShardedReduction(agreement, me, tensors, Exact(tensors[0].numel()), Traffic(), CHUNK)


class Wires:
    """A Bulk whose streams lead straight to the other members' exchanges, but for those that one member opens."""

    def __init__(self, me: str, exchanges: dict[str, Any], blocked: str) -> None:
        self._me, self._exchanges, self._blocked = me, exchanges, blocked

    def open(self, peer_id: str, kind: str, header: Any, outgoing: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        return self._fail() if self._me == self._blocked else self._exchanges[peer_id].serve(self._me, outgoing)

    async def _fail(self) -> AsyncIterator[bytes]:
        raise PeerUnreachable("blocked")
        yield b""


@pytest.mark.parametrize(("make", "blocked"), [(reduction, "third"), (gathering, "first"), (sharded, "third")])
def test_only_whose_streams_break_speaks_of_a_broken_stream(make: Make, blocked: str) -> None:
    async def attempt() -> list[Any]:
        schemas = tuple(Schema.of(vector(rank)) for rank in range(3))
        agreement = Agreement("attempt", MEMBERS, (1.0, 1.0, 1.0), schemas)
        exchanges = {me: make(agreement, me) for me in MEMBERS}
        runs = [asyncio.ensure_future(one.run(Wires(me, exchanges, blocked))) for me, one in exchanges.items()]
        # Who hears of nothing is told by the coordinator, once the others have reported.
        _, waiting = await asyncio.wait(runs, timeout=1.0)
        for run in waiting:
            run.cancel()
        return await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 20)

    found = dict(zip(MEMBERS, asyncio.run(attempt()), strict=True))
    cause = found.pop(blocked)
    assert isinstance(cause, Blame)
    assert (cause.peer_id in MEMBERS, cause.is_link, cause.is_echo) == (True, True, False)
    for other in found.values():
        assert isinstance(other, asyncio.CancelledError | Blame)
        assert isinstance(other, asyncio.CancelledError) or other.is_echo or other.peer_id == blocked, repr(other)
