"""Members that lie with their contribution, among real nodes: the others go on without them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from swarmkit.optim.collective import RoundKey
from swarmkit.optim.errors import RoundFailed
from swarmkit.peers.collective import SwarmCollective
from swarmkit.peers.node import Node
from swarmkit.peers.rules import Rules, median_norm
from swarmkit.peers.settings import NetworkSettings

pytestmark = pytest.mark.timeout(90)
SETTINGS = NetworkSettings(heartbeat_s=0.5, silence_s=2.0, stall_s=2.0, round_timeout_s=8.0)
STRICT = Rules(max_norm_ratio=10.0)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    made = [Node.start("liars", settings=SETTINGS)]
    try:
        for _ in range(3):
            made.append(Node.start("liars", initial_peers=[made[0].addresses[0]], settings=replace(SETTINGS)))
        for node in made:
            node.announce("training")
        assert all(node.wait_for_peers(4, timeout=20) for node in made)
        yield made
    finally:
        for node in reversed(made):
            node.close()


class Liar(Rules):
    """Says another norm than its contribution has."""

    said = 0.0

    def norm_of(self, tensors: object) -> float:
        return Liar.said


def meet(nodes: list[Node], rules: list[Rules], name: str, values: list[float]) -> list[object]:
    """One round of everybody; gives results, or the errors of those who had none."""
    collectives: list[SwarmCollective] = [node.collective(rules=own) for node, own in zip(nodes, rules, strict=True)]
    futures = [
        c.all_reduce([torch.full((3000,), value)], round=RoundKey(name, 0), weight=1.0)
        for c, value in zip(collectives, values, strict=True)
    ]
    found: list[object] = []
    for future in futures:
        try:
            found.append(future.result(20))
        except RoundFailed as error:
            found.append(error)
    return found


@pytest.mark.parametrize("said", [0.0, 1e-30, 55.0, 1e30])
@pytest.mark.parametrize("place", [0, 3])
def test_a_huge_contribution_is_named_and_the_round_repeated_without_it(
    nodes: list[Node], said: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Liar, "said", said)
    rules: list[Rules] = [STRICT] * 4
    values = [1.0, 1.0, 1.0, 1.0]
    rules[place], values[place] = Liar(max_norm_ratio=10.0), 1e6
    found = meet(nodes, rules, f"huge {said} {place}", values)
    liar = nodes[place].peer_id
    for result in found[:place] + found[place + 1 :]:
        assert not isinstance(result, RoundFailed), result
        assert torch.equal(result.tensors[0], torch.ones(3000))  # type: ignore[attr-defined]
        assert liar not in result.members  # type: ignore[attr-defined]
        assert len(result.members) == 3  # type: ignore[attr-defined]
    assert isinstance(found[place], RoundFailed)


def test_contributions_of_different_but_honest_size_are_averaged(nodes: list[Node]) -> None:
    found = meet(nodes, [STRICT] * 4, "honest", [0.0, 1.0, 2.0, 9.0])
    assert [result.tensors[0][0].item() for result in found] == [3.0] * 4  # type: ignore[attr-defined]


def test_a_trimmed_mean_is_the_same_on_all_members_and_leaves_the_extremes_out(nodes: list[Node]) -> None:
    found = meet(nodes, [Rules(trim=0.25)] * 4, "trimmed", [-1e6, 1.0, 2.0, 1e6])
    assert all(torch.equal(result.tensors[0], torch.full((3000,), 1.5)) for result in found)  # type: ignore[attr-defined]


def test_who_averages_by_other_rules_is_told_so_and_the_others_go_on(nodes: list[Node]) -> None:
    found = meet(nodes, [STRICT, STRICT, STRICT, Rules(trim=0.25)], "rules", [1.0] * 4)
    assert all(len(result.members) == 3 for result in found[:3])  # type: ignore[attr-defined]
    assert "network.trim" in str(found[3])


def test_who_runs_by_another_configuration_is_told_so(nodes: list[Node]) -> None:
    for node, config in zip(nodes, ("a", "a", "b", ""), strict=True):
        node._roster.say(config=config)
    try:
        found = meet(nodes, [STRICT] * 4, "config", [1.0] * 4)
        assert [len(result.members) for result in (found[0], found[1], found[3])] == [3, 3, 3]  # type: ignore[attr-defined]
        assert "another configuration" in str(found[2])
    finally:
        for node in nodes:
            node._roster.say(config="")


def test_two_members_have_no_median() -> None:
    assert median_norm([1.0, 1e9]) == 0.0
    assert median_norm([1.0, 2.0, 1e9]) == 2.0
    assert Rules(max_norm_ratio=10.0).limit(0.0) == float("inf")
    assert Rules().norm_of([torch.ones(3)]) == 0.0
    assert Rules(max_norm_ratio=10.0).norm_of([torch.full((2,), 3e38)]) == 1e300
