"""Links that are cut and mended, and a swarm that falls into halves and finds together again."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.harness_commands import Event
from tests.multiprocess.harness_forked import ROUND_S, SILENCE_S, Peer, Swarm, assert_agree

from .namespaces import Namespaces, namespaces, why_not

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.timeout(170),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
# As 20 seconds are to the default silence_s of 5.
CUT_S = 4 * SILENCE_S
BACK_S = 45.0  # until all meet again


class Four(Swarm):
    """Four peers, each a host of its own."""

    def __init__(self, hosts: Namespaces, folder: Path) -> None:
        super().__init__(folder)
        self.hosts = hosts
        listen = [f"network.listen={address}:31337" for address in hosts.addresses]
        self.start(listen[0], namespace=hosts.names[0])
        for index in (1, 2, 3):
            self.join(listen[index], namespace=hosts.names[index])
        self.ids = [peer.id for peer in self.peers]
        for peer in self.peers:
            peer.wait_for_members(self.ids)

    def meet_again(self, mended: float) -> None:
        """Check that all four train in one swarm again, with the same bits, and that none hung or gave up."""
        numbers = [peer.wait_for_members(self.ids, BACK_S, since=mended)["round"] for peer in self.peers]
        since = max(numbers)
        for peer in self.peers:
            peer.wait_for("two more rounds", lambda at=peer: at.rounds()[-1]["round"] >= since + 2, ROUND_S + 5)
            longest = max(peer.events(0, "round"), key=lambda event: event["seconds"])
            assert longest["seconds"] <= ROUND_S + 5, longest
        assert_agree(self.peers, since)
        losses = [peer.events(0, "train")[-1]["loss"] for peer in self.peers]
        assert all(loss is not None for loss in losses)


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Four]:
    with namespaces(4, rate_mbit=1000) as hosts:
        made = Four(hosts, tmp_path)
        try:
            yield made
        finally:
            made.close()
            for peer in made.peers:
                peer.assert_ended()


def test_a_peer_whose_link_is_cut_is_missed_and_comes_back(four: Four) -> None:
    cut = time.time()
    four.hosts.cut(3)
    for peer in four.peers[:3]:
        assert peer.wait_for_members(four.ids[:3], ROUND_S + 5, since=cut)["seconds"] <= ROUND_S + 5
        assert {event["id"] for event in peer.events(0, "peer_lost") if event["time"] > cut} == {four.ids[3]}
    time.sleep(max(0.0, cut + CUT_S - time.time()))
    # Alone it closes nothing: the others are the majority.
    alone = [event for event in four.peers[3].rounds() if event["time"] > cut + 1 and len(event["members"]) < 4]
    assert not alone
    four.hosts.mend(3)
    four.meet_again(time.time())


def test_halves_that_lost_each_other_become_one_swarm_again(four: Four) -> None:
    parted = time.time()
    four.hosts.part(2, 3)
    for index, half in enumerate([{0, 1}, {0, 1}, {2, 3}, {2, 3}]):
        peer = four.peers[index]
        ids = {four.ids[other] for other in half}

        def ended(at: Peer = peer, half: set[str] = ids) -> list[Event]:
            rounds = [event for event in at.events(0, "round") if event["time"] > parted]
            return [event for event in rounds if event["failed"] or set(event["members"]) <= half]

        # A half may go on or not; it knows in time. A round that flies is told when its window ends.
        [first, *_] = peer.wait_for("the end of a round that was parted", ended, 2 * ROUND_S + 5)
        assert first["seconds"] <= ROUND_S + 5, first
    time.sleep(max(0.0, parted + CUT_S - time.time()))
    four.hosts.mend(2)
    four.hosts.mend(3)
    four.meet_again(time.time())
