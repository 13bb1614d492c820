"""LocalSwarm loses members, takes them back, closes rounds in time and reports the first error."""

from concurrent.futures import CancelledError, Future

import pytest
import torch

from swarmkit.optim import Reduced, RoundFailed, RoundKey
from swarmkit.peers.local import LocalCollective, LocalSwarm

ONES = [torch.ones(4)]


def key(index: int = 0) -> RoundKey:
    return RoundKey("test", index)


def test_a_killed_member_is_not_waited_for() -> None:
    swarm = LocalSwarm(3)
    first = swarm.collectives[0].all_reduce(ONES, round=key(), weight=1.0)
    second = swarm.collectives[1].all_reduce(ONES, round=key(), weight=1.0)
    assert not first.done()
    swarm.kill("local2")
    assert first.result(5).members == second.result(5).members == ("local0", "local1")


def test_what_a_killed_member_offered_is_void() -> None:
    swarm = LocalSwarm(3)
    futures = [c.all_reduce([torch.full((4,), 100.0)], round=key(), weight=1.0) for c in swarm.collectives[:1]]
    swarm.kill("local0", "it burned down")
    futures += [c.all_reduce(ONES, round=key(), weight=1.0) for c in swarm.collectives[1:]]
    with pytest.raises(RoundFailed, match="it burned down"):
        futures[0].result(5)
    for future in futures[1:]:
        assert torch.equal(future.result(5).tensors[0], ONES[0])


def test_killing_twice_and_killing_a_stranger_do_nothing() -> None:
    swarm = LocalSwarm(2)
    swarm.kill("local1")
    swarm.kill("local1")
    swarm.kill("stranger")
    assert swarm.collectives[0].all_reduce(ONES, round=key(), weight=1.0).result(5).members == ("local0",)


def test_a_killed_member_can_offer_nothing() -> None:
    swarm = LocalSwarm(2)
    swarm.kill("local1")
    with pytest.raises(RoundFailed, match="local1 was lost"):
        swarm.collectives[1].all_reduce(ONES, round=key(), weight=1.0).result(5)


def test_closing_a_collective_is_leaving() -> None:
    swarm = LocalSwarm(2)
    first = swarm.collectives[0].all_reduce(ONES, round=key(), weight=1.0)
    swarm.collectives[1].close()
    assert first.result(5).members == ("local0",)


def test_a_revived_member_is_waited_for_again_and_keeps_its_place() -> None:
    swarm = LocalSwarm(2)
    swarm.kill("local0")
    back = swarm.revive("local0")
    waiting = swarm.collectives[0].all_reduce(ONES, round=key(), weight=1.0)
    assert swarm.collectives[0].peer_id == "local1"
    assert not waiting.done()
    back.all_reduce(ONES, round=key(), weight=1.0)
    assert waiting.result(5).members == ("local0", "local1")


def test_a_stranger_can_join() -> None:
    swarm = LocalSwarm(1)
    newcomer = swarm.revive("newcomer")
    first = swarm.collectives[0].all_reduce(ONES, round=key(), weight=1.0)
    newcomer.all_reduce(ONES, round=key(), weight=1.0)
    assert first.result(5).members == ("local0", "newcomer")


def test_a_round_closes_in_its_timeout_with_those_who_came_and_the_late_one_missed_it() -> None:
    swarm = LocalSwarm(3, round_timeout=0.05)
    futures = [c.all_reduce(ONES, round=key(), weight=1.0) for c in swarm.collectives[:2]]
    assert [future.result(5).members for future in futures] == [("local0", "local1")] * 2
    with pytest.raises(RoundFailed, match="closed without this peer") as caught:
        swarm.collectives[2].all_reduce(ONES, round=key(), weight=1.0).result(5)
    assert caught.value.missed


def test_the_late_one_meets_the_others_in_the_next_round() -> None:
    swarm = LocalSwarm(2, round_timeout=0.05)
    swarm.collectives[0].all_reduce(ONES, round=key(0), weight=1.0).result(5)
    futures = [c.all_reduce(ONES, round=key(1), weight=1.0) for c in swarm.collectives]
    assert futures[0].result(5).members == ("local0", "local1")


def test_a_cancelled_contribution_is_not_in_the_result() -> None:
    swarm = LocalSwarm(2)
    withdrawn = swarm.collectives[0].all_reduce([torch.full((4,), 9.0)], round=key(), weight=1.0)
    assert withdrawn.cancel()
    with pytest.raises(CancelledError):
        withdrawn.result(5)
    swarm.kill("local0")
    result = swarm.collectives[1].all_reduce(ONES, round=key(), weight=1.0).result(5)
    assert torch.equal(result.tensors[0], ONES[0])


def test_a_key_is_used_once_and_for_one_operation() -> None:
    swarm = LocalSwarm(2)
    first = swarm.collectives[0].all_reduce(ONES, round=key(), weight=1.0)
    with pytest.raises(ValueError, match="used once"):
        swarm.collectives[0].all_reduce(ONES, round=key(), weight=1.0)
    with pytest.raises(ValueError, match="one operation"):
        swarm.collectives[1].all_gather(ONES, round=key(), weight=1.0)
    swarm.collectives[1].all_reduce(ONES, round=key(), weight=1.0)
    assert first.result(5).members == ("local0", "local1")


def test_a_callback_may_start_the_next_round() -> None:
    swarm = LocalSwarm(1)
    collective = swarm.collectives[0]
    chained: Future[Future[Reduced]] = Future()
    first = collective.all_reduce(ONES, round=key(0), weight=1.0)
    first.add_done_callback(lambda _: chained.set_result(collective.all_reduce(ONES, round=key(1), weight=1.0)))
    assert chained.result(5).result(5).members == ("local0",)

    # Here the callback runs in the thread that closes the round.
    swarm.revive("local1")
    later: Future[Future[Reduced]] = Future()
    waiting = collective.all_reduce(ONES, round=key(2), weight=1.0)
    waiting.add_done_callback(lambda _: later.set_result(collective.all_reduce(ONES, round=key(3), weight=1.0)))
    swarm.kill("local1")
    assert later.result(5).result(5).members == ("local0",)


def test_run_gives_results_in_the_order_of_ranks() -> None:
    def task(collective: LocalCollective, rank: int) -> tuple[int, str]:
        collective.all_reduce(ONES, round=key(), weight=1.0).result(5)
        return rank, collective.peer_id

    assert LocalSwarm(3).run(task) == [(0, "local0"), (1, "local1"), (2, "local2")]


def test_run_leaves_out_the_dead() -> None:
    swarm = LocalSwarm(3)
    swarm.kill("local1")
    assert swarm.run(lambda collective, rank: rank) == [0, 2]


def test_run_raises_the_first_error_and_the_others_do_not_wait_for_who_failed() -> None:
    reached: list[int] = []

    def task(collective: LocalCollective, rank: int) -> None:
        if rank == 1:
            raise KeyError("rank 1 fell over")
        collective.all_reduce(ONES, round=key(), weight=1.0).result(5)
        reached.append(rank)

    with pytest.raises(KeyError, match="fell over"):
        LocalSwarm(3).run(task)
    assert sorted(reached) == [0, 2]


def test_a_swarm_can_run_again_with_the_same_members() -> None:
    swarm = LocalSwarm(2)

    def task(collective: LocalCollective, index: int) -> tuple[str, ...]:
        return collective.all_reduce(ONES, round=key(index), weight=1.0).result(5).members

    for index in range(3):
        found = swarm.run(lambda collective, _, index=index: task(collective, index))  # type: ignore[misc]
        assert found == [("local0", "local1")] * 2


def test_an_empty_swarm_is_refused() -> None:
    with pytest.raises(ValueError, match="size=0"):
        LocalSwarm(0)
