"""kill -9 in each phase of a round: the others close it without the dead, alike, in time, and say who it was."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.harness_commands import Event
from tests.multiprocess.harness_forked import ROUND_S, Peer, Swarm, assert_agree

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Two peers that outlive the tests."""
    made = Swarm(tmp_path_factory.mktemp("others"))
    try:
        made.start()
        made.join()
        yield made
    finally:
        made.close()


def die_in(phase: str, victim: Peer, survivors: list[Peer]) -> None:
    """Stop the victim in a phase of a round with all, kill it there, and check what the others do."""
    everybody = {victim.id, *(peer.id for peer in survivors)}
    for peer in survivors:
        peer.wait_for_members(everybody)
    victim.arm()
    victim.wait_for(f"the phase {phase}", victim.is_stopped)
    killed = time.time()  # the others may be done without it before its end has been waited for
    victim.kill()
    for peer in survivors:
        alone = rounds_without(victim, peer, since=killed)
        assert alone[0]["time"] - killed < ROUND_S + 5
        assert max(event["seconds"] for event in peer.events(0, "round")) < ROUND_S + 5
        lost = [event for event in peer.events(0, "peer_lost") if event["id"] == victim.id][-1]
        assert lost["round"] == alone[0]["round"]
        assert victim.id[-8:] in lost["reason"]
        assert not peer.events(0, "diverged")
        # None went on alone.
        assert {*alone[0]["members"]} == {one.id for one in survivors}
    assert_agree(survivors)
    victim.assert_ended()


def rounds_without(victim: Peer, peer: Peer, *, since: float) -> list[Event]:
    def found() -> list[Event]:
        return [event for event in peer.rounds() if victim.id not in event["members"] and event["time"] > since]

    return peer.wait_for("three rounds without the dead", lambda: found()[2:] and found(), ROUND_S + 10)


@pytest.mark.parametrize("phase", ["before_hello", "while_sending", "while_reducing", "before_report"])
def test_a_member_that_is_killed_costs_the_others_a_round_at_most(phase: str, others: Swarm) -> None:
    survivors = others.peers[:2]
    die_in(phase, others.join(phase=phase), survivors)


def test_a_coordinator_that_is_killed_before_it_commits_takes_nobody_with_it(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    try:
        victim = swarm.start(phase="before_commit")
        die_in("before_commit", victim, [swarm.join(), swarm.join()])
    finally:
        swarm.close()
