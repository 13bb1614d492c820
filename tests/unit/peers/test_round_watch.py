"""Delays injected into real rounds of real peers: every member names the right one and what is late."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from swarmkit.optim.collective import RoundKey
from swarmkit.optim.errors import RoundFailed
from swarmkit.peers.lateness import STREAK, Fault
from tests.unit.peers.harness_members import Group, Member, Pool, ProcessGroup, run
from tests.unit.peers.harness_swarms import SwarmKind

pytestmark = pytest.mark.timeout(120)
DELAY_S = 0.7
SLOW = 1


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    pool = Pool()
    made = ProcessGroup(pool, 3, SwarmKind)
    yield made
    made.close()
    pool.close()


def rounds(member: Member, first: int, what: str, slow_rank: int, count: int) -> list[tuple[str, str, bool]]:
    """Take part in `count` rounds, one member with a delay; returns what this member named meanwhile."""
    collective: Any = member.collective
    seen: list[Fault] = []
    collective.watch.on_fault.append(seen.append)
    slow = what if member.rank == slow_rank else ""
    undo = delay_link(collective, slow)
    try:
        for index in range(first, first + count):
            if slow == "compute":
                time.sleep(DELAY_S)  # the fault itself: a step that takes longer
            tensors = [torch.full((30_000,), float(member.rank))]
            result = collective.all_reduce(tensors, round=RoundKey("watched", index), weight=1.0).result(30)
            assert len(result.members) == member.size
    finally:
        undo()
        collective.watch.on_fault.remove(seen.append)
    return [(fault.peer_id, fault.what, fault.ended) for fault in seen]


def delay_link(collective: Any, what: str) -> Any:
    """Have every chunk that goes out (or comes in) take longer; returns what undoes it."""
    bulk = collective._bulk

    async def late(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            await asyncio.sleep(DELAY_S)
            yield chunk

    open_stream, serve = bulk.open, bulk._handlers["reduce"]
    if what == "upload":
        bulk.open = lambda peer, kind, header, outgoing: open_stream(peer, kind, header, late(outgoing))
        bulk._handlers["reduce"] = lambda sender, header, incoming: late(serve(sender, header, incoming))
    elif what == "download":
        bulk.open = lambda peer, kind, header, outgoing: late(open_stream(peer, kind, header, outgoing))
        bulk._handlers["reduce"] = lambda sender, header, incoming: serve(sender, header, late(incoming))

    def undo() -> None:
        bulk.open, bulk._handlers["reduce"] = open_stream, serve

    return undo


@pytest.mark.parametrize("what", ["compute", "upload", "download"])
def test_an_injected_delay_is_named_by_all_and_so_is_its_end(group: Group, what: str) -> None:
    first = {"compute": 0, "upload": 100, "download": 200}[what]
    slow = group.peer_ids[SLOW]
    for found in run(group, rounds, first, what, SLOW, STREAK + 1):
        assert found == [(slow, what, False)]
    for found in run(group, rounds, first + 50, "none", SLOW, STREAK + 1):
        assert found == [(slow, what, True)]


def rounds_until_silent(member: Member, first: int, peer: str) -> bool:
    """Take part in rounds until a peer is called silent, which ends by the test's timeout if it never is."""
    collective: Any = member.collective
    for index in range(first, first + 1000):
        try:
            collective.all_reduce([torch.ones(8)], round=RoundKey("silence", index), weight=1.0).result(30)
        except RoundFailed:
            continue
        if (peer, "silent") in collective.watch.faults:
            return True
    return False


def test_a_frozen_peer_is_called_silent(group: Group) -> None:
    run(group, rounds, 300, "none", SLOW, 1)
    group.freeze(2)
    assert run(group, rounds_until_silent, 400, group.peer_ids[2], ranks=[0, 1]) == [True, True]
