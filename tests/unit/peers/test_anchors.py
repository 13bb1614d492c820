"""Peers that hold another anchor than the others are found by its digest, and take over the others' state."""

import hashlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from swarmkit.optim import DiLoCo, Every
from swarmkit.optim.agreement import AT_ONCE_BYTES, MAX_DIVERGED, Agreed, Digests
from swarmkit.optim.collective import RoundKey
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.round_report import RoundReport
from swarmkit.optim.snapshot import digest_parts, digest_tensors
from swarmkit.peers import attach
from swarmkit.peers.agreement import Agreement, check_anchor
from swarmkit.peers.donors import rank_donors
from swarmkit.peers.errors import JoinFailed
from swarmkit.peers.local import LocalSwarm
from swarmkit.peers.node import Node
from swarmkit.peers.reduction import find_diverged
from swarmkit.peers.roster import PeerRecord
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.votes import major_digest, outvoted

pytestmark = pytest.mark.timeout(90)


def peer(name: str, lineage: str, digest: str, joined_at: float = 0.0) -> PeerRecord:
    return PeerRecord(peer_id=name, state="training", lineage=lineage, digest=digest, joined_at=joined_at)


# -- who is in the minority ------------------------------------------------------------------------------------------


def test_the_majority_of_a_lineage_decides_and_the_first_on_a_tie() -> None:
    assert find_diverged([("a", "l", "x"), ("b", "l", "y"), ("c", "l", "y")]).keys() == {"a"}
    assert find_diverged([("a", "l", "x"), ("b", "l", "y")]).keys() == {"b"}
    assert find_diverged([("a", "l", ""), ("b", "l", "y"), ("c", "", "x")]) == {}
    # Who comes from other rounds is refused for these: what he holds now is no vote.
    found = find_diverged([("a", "old", "x"), ("b", "l", "y"), ("c", "l", "y"), ("d", "l", "x")])
    assert {peer: refused.diverged for peer, refused in found.items()} == {"a": False, "d": True}


def test_heartbeats_outvote_a_minority_and_no_more() -> None:
    records = [peer("a", "l", "x"), peer("b", "l", "y"), peer("c", "l", "y"), peer("d", "k", "z"), peer("e", "", "x")]
    assert outvoted(records) == {"a": "y"}
    assert outvoted(records[:2]) == {}
    assert major_digest(records, "l") == "y"
    assert major_digest(records[:2], "l") == major_digest(records, "") == ""
    assert set(rank_donors(records, "me")) == {"b", "c", "d", "e"}


def test_a_peer_compares_what_it_held_with_heartbeats_of_earlier_rounds() -> None:
    me, agreement = peer("me", "l9", "d9", 2.0), Agreement()
    for i in range(10):
        agreement.note(f"l{i}", f"d{i}")
    assert agreement.verdict([me, peer("a", "l3", "d3"), peer("b", "l7", "d7")], me) == ""
    assert agreement.verdict([me, peer("a", "l3", "x"), peer("b", "l7", "d7")], me) == ""
    reason = agreement.verdict([me, peer("a", "l3", "x"), peer("b", "l7", "y")], me)
    assert "2 peers (a, b) held another digest" in reason
    # Of two the one that joined first counts.
    assert agreement.verdict([me, peer("a", "l3", "x", 1.0)], me)
    assert agreement.verdict([me, peer("a", "l3", "x", 3.0)], me) == ""
    agreement.forget()
    assert agreement.verdict([me, peer("a", "l3", "x"), peer("b", "l7", "y")], me) == ""


def test_a_state_that_is_not_what_the_heartbeats_say_is_refused() -> None:
    tensors = {"anchor/w": torch.ones(3), "inner/w/m": torch.zeros(3)}
    right = digest_tensors({"w": torch.ones(3)})
    check_anchor(tensors, {"lineage": "l"}, [peer("a", "l", right)])
    check_anchor(tensors, {"lineage": "l"}, [peer("a", "k", "x")])
    with pytest.raises(JoinFailed, match="not the one that the peers hold"):
        check_anchor(tensors, {"lineage": "l"}, [peer("a", "l", "x"), peer("b", "l", "x"), peer("c", "l", right)])


# -- digests -----------------------------------------------------------------------------------------------------------


def test_slices_give_the_same_digest() -> None:
    tensors = {"a": torch.randn(3, 1000), "b": torch.zeros(()), "c": torch.randn(10, 7).t(), "d": torch.zeros(0, 2)}
    digest = hashlib.blake2b(digest_size=16)
    for part in digest_parts(tensors, 100):
        assert len(part) <= 100
        digest.update(part)
    assert digest.hexdigest() == digest_tensors(tensors)


def test_a_large_anchor_is_hashed_beside_training() -> None:
    lock, lineage = threading.RLock(), ["l"]
    digests, heard = Digests(lock), list[Agreed]()
    digests.on_agreed.append(heard.append)
    tensors = {"w": torch.zeros(AT_ONCE_BYTES // 4 + 1)}
    with lock:  # training has the tensors: nothing waits for that
        digests.take(4, tensors, lambda: lineage[0])
        assert digests.of("l") == ""
    digests.wait(30)
    assert heard == [Agreed(4, "l", digest_tensors(tensors))]
    assert digests.of("l") == heard[0].digest
    with lock:
        digests.take(5, tensors, lambda: lineage[0])
        lineage[0] = "m"  # the next round has closed
    digests.wait(30)
    assert len(heard) == 1


def test_a_state_that_was_taken_over_has_no_digest_of_what_was_there_before() -> None:
    """It may be of the same lineage: the very one of which this peer held the wrong bits."""
    [collective] = LocalSwarm(1).collectives
    model = torch.nn.Linear(4, 4)
    optimizer = DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), collective=collective, sync=Every(2))
    while optimizer.round < 2:
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    lineage = optimizer.lineage
    assert optimizer.digests.of(lineage) == optimizer.digest()
    tensors, meta = optimizer.snapshot()
    optimizer.load_snapshot({name: t + 1 if name.startswith("anchor/") else t for name, t in tensors.items()}, meta)
    assert optimizer.lineage == lineage
    assert optimizer.digests.of(lineage) == ""


def test_who_computes_other_bits_again_and_again_goes_on_without_comparing(caplog: pytest.LogCaptureFixture) -> None:
    digests = Digests(threading.RLock())
    digests.take(0, {"w": torch.zeros(1)}, lambda: "l")
    for _ in range(MAX_DIVERGED - 1):
        digests.note_outcome(diverged=True)
    digests.note_outcome(diverged=False)
    assert digests.of("l")
    with caplog.at_level(logging.ERROR):
        for _ in range(MAX_DIVERGED + 2):
            digests.note_outcome(diverged=True)
    assert digests.of("l") == ""
    assert len(caplog.records) == 1


# -- rounds ------------------------------------------------------------------------------------------------------------


def test_a_round_closes_without_the_member_that_holds_something_else() -> None:
    swarm = LocalSwarm(3)
    futures = [
        collective.all_reduce([torch.ones(2)], round=RoundKey("x", 0, "l", "b" if rank == 1 else "a"), weight=1.0)
        for rank, collective in enumerate(swarm.collectives)
    ]
    assert futures[0].result(10).members == futures[2].result(10).members == ("local0", "local2")
    with pytest.raises(RoundFailed, match="differs from the majority") as caught:
        futures[1].result(10)
    assert caught.value.missed
    assert caught.value.diverged


@pytest.fixture
def trio() -> Iterator[list[Node]]:
    settings = NetworkSettings(heartbeat_s=0.5, silence_s=2.0, round_timeout_s=8.0)
    made = [Node.start("trio", settings=settings)]
    try:
        for _ in range(2):
            made.append(Node.start("trio", initial_peers=[made[0].addresses[0]], settings=settings))
        yield made
    finally:
        for node in made:
            node.close()


def test_a_flipped_bit_is_found_and_healed_within_two_rounds(trio: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of real nodes, each in its own loop; one bit of one anchor flips after the fourth round."""
    bad, flipped_after, rounds = 1, 3, 12
    ready = threading.Barrier(3, timeout=60)
    reports: list[list[RoundReport]] = [[], [], []]
    begun, real = threading.Event(), attach.catch_up
    # All three begin alike: nobody has to fetch the state of one that was quicker.
    monkeypatch.setattr(attach, "catch_up", lambda *pair: real(*pair) if begun.is_set() else None)

    def replica(rank: int) -> str:
        model = torch.nn.Linear(64, 64)
        torch.nn.init.constant_(model.weight, 0.5)
        torch.nn.init.constant_(model.bias, 0.0)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = DiLoCo(inner, collective=trio[rank].collective(joining=True), sync=Every(2), outer_momentum=0.5)

        def flip(report: RoundReport) -> None:
            reports[rank].append(report)
            if rank == bad and report.round == flipped_after:
                optimizer.anchor()["parameter0"].view(torch.int32)[5, 7] ^= 1 << 12

        trio[rank].announce("training")
        assert trio[rank].wait_for_peers(3, timeout=30)
        ready.wait()
        trio[rank].attach(optimizer)
        ready.wait()
        begun.set()
        optimizer.on_round.append(flip)
        generator = torch.Generator().manual_seed(rank)
        while optimizer.round < rounds:
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.digest()

    with ThreadPoolExecutor(3) as threads:
        digests = list(threads.map(replica, range(3)))
    assert len(set(digests)) == 1
    # Of its contributions; to watch a round for healing may take another try.
    [refused] = [report for report in reports[bad] if report.failed is not None and report.weight > 0]
    # Round 4 still takes its contribution and shows the difference; round 5 closes without it.
    assert refused.round == flipped_after + 2
    assert refused.diverged
    assert refused.missed
    assert f"the anchor of {trio[bad].peer_id[-8:]} differs from the majority" in str(refused.failed)
    others = {report.round: report for report in reports[0]}
    assert len(others[flipped_after + 2].members) == 2
    assert len(others[flipped_after + 4].members) == 3
    assert all(report.failed is None for rank in (0, 2) for report in reports[rank])
