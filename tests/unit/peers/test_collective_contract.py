"""The contract that every Collective keeps: one suite for threads, torch.distributed and the swarm."""

import itertools
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from swarmkit.optim.collective import Collective
from swarmkit.optim.mean import weighted_mean

from . import scenarios, wires
from .harness_members import Group, Member, MemberDied, run
from .harness_swarms import HARNESSES, Harness
from .scenarios import Build, Outcome

_INDICES = itertools.count()
# On top of round_timeout, for whoever waits for the dead.
GRACE_S = 5.0
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture(scope="module", params=list(HARNESSES))
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    harness = HARNESSES[request.param]()
    yield harness
    harness.close()


def agreed(outcomes: Sequence[Outcome]) -> Outcome:
    """The one outcome of all: the same members, weights and bits, and nobody's inputs touched."""
    assert [outcome.kind for outcome in outcomes] == ["result"] * len(outcomes), [o.reason for o in outcomes]
    assert len({(outcome.digest, outcome.members, outcome.weights) for outcome in outcomes}) == 1
    assert all(outcome.inputs_unchanged for outcome in outcomes)
    return outcomes[0]


def ranks(group: Group, outcome: Outcome) -> list[int]:
    return [group.peer_ids.index(member) for member in outcome.members]


def assert_mean(group: Group, outcome: Outcome, build: Build) -> None:
    """The result is the weighted mean over the members that it names."""
    members = ranks(group, outcome)
    offered = [build(rank) for rank in members]
    assert outcome.dtypes == [str(tensor.dtype) for tensor in offered[0]]
    assert outcome.shapes == [tuple(tensor.shape) for tensor in offered[0]]
    for position, value in enumerate(outcome.values):
        parts = [tensors[position].detach() for tensors in offered]
        mean = sum(w * part.double() for w, part in zip(outcome.weights, parts, strict=True)) / sum(outcome.weights)
        tolerance = TOLERANCE[parts[0].dtype]
        torch.testing.assert_close(
            torch.tensor(value, dtype=torch.float64).view(mean.shape), mean, rtol=tolerance, atol=tolerance
        )


def expected_digest(group: Group, outcome: Outcome, build: Build) -> str:
    """The bits that the shared arithmetic gives for the members in the result's order."""
    offered = [build(rank) for rank in ranks(group, outcome)]
    return scenarios.digest([weighted_mean(parts, outcome.weights) for parts in zip(*offered, strict=True)])


# -- the mean --------------------------------------------------------------------------------------------------------


def test_a_collective_satisfies_the_protocol(harness: Harness) -> None:
    assert run(harness.group(1), check_protocol) == [True]


def check_protocol(member: Member) -> bool:
    return isinstance(member.collective, Collective) and isinstance(member.collective.peer_id, str)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_members_get_the_mean_of_all(harness: Harness, size: int) -> None:
    group = harness.group(size)
    outcome = agreed(run(group, scenarios.reduce, next(_INDICES), scenarios.small))
    assert sorted(ranks(group, outcome)) == list(range(size))
    assert_mean(group, outcome, scenarios.small)


def test_a_round_of_one_returns_what_was_offered_bit_for_bit(harness: Harness) -> None:
    outcome = agreed(run(harness.group(1), scenarios.reduce, next(_INDICES), scenarios.every_dtype, [0.3]))
    assert outcome.digest == scenarios.digest(scenarios.every_dtype(0))


@pytest.mark.parametrize(
    "build",
    [
        scenarios.small,
        scenarios.every_dtype,
        scenarios.beyond_half,
        scenarios.odd_shapes,
        scenarios.only_empty,
        scenarios.nothing,
        scenarios.not_contiguous,
        scenarios.with_grad,
        scenarios.fewer_elements_than_members,
        scenarios.many,
    ],
)
def test_three_members_get_the_mean_of(harness: Harness, build: Build) -> None:
    group = harness.group(3)
    outcome = agreed(run(group, scenarios.reduce, next(_INDICES), build))
    assert_mean(group, outcome, build)


@pytest.mark.parametrize("weights", [(1.0, 2.0, 5.0), (0.0, 1.0, 3.0), (7.5, 0.0, 0.0), (1e-3, 1e6, 1.0)])
def test_weights_count_and_are_named(harness: Harness, weights: tuple[float, ...]) -> None:
    group = harness.group(3)
    outcome = agreed(run(group, scenarios.reduce, next(_INDICES), scenarios.small, weights))
    assert [weights[rank] for rank in ranks(group, outcome)] == list(outcome.weights)
    assert sorted(ranks(group, outcome)) == [0, 1, 2]
    assert_mean(group, outcome, scenarios.small)


def test_a_round_of_zero_weights_fails_for_all_and_the_next_one_works(harness: Harness) -> None:
    group = harness.group(3)
    outcomes = run(group, scenarios.reduce, next(_INDICES), scenarios.small, [0.0, 0.0, 0.0])
    assert [outcome.kind for outcome in outcomes] == ["failed"] * 3
    assert all("weight" in outcome.reason and not outcome.missed for outcome in outcomes)
    agreed(run(group, scenarios.reduce, next(_INDICES), scenarios.small))


def test_sixteen_megabytes_come_out_equal_on_all_and_the_same_each_time(harness: Harness) -> None:
    group = harness.group(3)
    first = agreed(run(group, scenarios.reduce, next(_INDICES), scenarios.big, [1.0, 2.0, 3.0]))
    second = agreed(run(group, scenarios.reduce, next(_INDICES), scenarios.big, [1.0, 2.0, 3.0]))
    assert first.digest == second.digest
    assert ranks(group, first) == ranks(group, second)


def test_all_implementations_compute_the_same_bits(harness: Harness) -> None:
    """For members in the same order; each implementation has an order of its own."""
    group = harness.group(3)
    outcome = agreed(run(group, scenarios.reduce, next(_INDICES), scenarios.every_dtype, [1.0, 2.0, 4.0]))
    assert outcome.digest == expected_digest(group, outcome, scenarios.every_dtype)


# -- the gather ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_gather_keeps_every_payload_as_it_was(harness: Harness, size: int) -> None:
    group = harness.group(size)
    outcome = agreed(run(group, scenarios.gather, next(_INDICES), scenarios.unequal_payload))
    assert sorted(ranks(group, outcome)) == list(range(size))
    expected = [tensor for rank in ranks(group, outcome) for tensor in scenarios.unequal_payload(rank)]
    assert [len(payload) for payload in outcome.values] == [
        len(scenarios.unequal_payload(rank)) for rank in ranks(group, outcome)
    ]
    assert outcome.digest == scenarios.digest(expected)


@pytest.mark.parametrize(
    "build", [scenarios.nothing, scenarios.only_empty, scenarios.not_contiguous, scenarios.with_grad]
)
def test_three_members_gather(harness: Harness, build: Build) -> None:
    group = harness.group(3)
    outcome = agreed(run(group, scenarios.gather, next(_INDICES), build, [0.0, 1.0, 2.0]))
    assert outcome.digest == scenarios.digest([tensor for rank in ranks(group, outcome) for tensor in build(rank)])
    assert [float(rank) for rank in ranks(group, outcome)] == list(outcome.weights)


# -- a mean through a wire -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "weights"), [(1, [0.3]), (2, None), (3, [1.0, 0.0, 3.0]), (4, [1.0, 2.0, 4.0, 1.0])])
def test_an_exact_wire_gives_the_bits_of_a_plain_reduction(
    harness: Harness, size: int, weights: list[float] | None
) -> None:
    group = harness.group(size)
    told = run(group, wires.reduce, next(_INDICES), wires.exact, wires.vector, weights)
    outcome = agreed([one.outcome for one in told])
    assert sorted(ranks(group, outcome)) == list(range(size))
    assert outcome.digest == expected_digest(group, outcome, wires.vector)
    for rank, one in enumerate(told):
        offered = wires.vector(rank)[0].tolist()
        assert one.sent == (offered if weights is None or weights[rank] > 0 else [0.0] * len(offered))
        assert not any(one.left)
    assert sum(len(one.left) for one in told) == 104  # every slice has one owner


@pytest.mark.parametrize("build", [wires.one_block, wires.no_numbers])
def test_a_wire_carries_fewer_blocks_than_there_are_members(harness: Harness, build: Build) -> None:
    group = harness.group(3)
    outcome = agreed([one.outcome for one in run(group, wires.reduce, next(_INDICES), wires.exact, build)])
    assert outcome.digest == expected_digest(group, outcome, build)


def test_a_lossy_wire_tells_each_member_what_it_sent_and_what_its_own_slice_lacks(harness: Harness) -> None:
    group = harness.group(3)
    weights = [1.0, 2.0, 5.0]
    told = run(group, wires.reduce, next(_INDICES), wires.int8, wires.vector, weights)
    outcome = agreed([one.outcome for one in told])
    order = ranks(group, outcome)
    mean = weighted_mean([torch.tensor(told[rank].sent) for rank in order], outcome.weights)
    left = torch.cat([torch.tensor(told[rank].left) for rank in sorted(order, key=lambda rank: told[rank].start)])
    torch.testing.assert_close(torch.tensor(outcome.values[0]) + left, mean, rtol=1e-6, atol=1e-6)
    # Two roundings to a grid of 127 steps: once what each sends, once the mean.
    truth = weighted_mean([wires.vector(rank)[0] for rank in order], outcome.weights)
    largest = max(float(wires.vector(rank)[0].abs().max()) for rank in order)
    assert 0 < float((torch.tensor(outcome.values[0]) - truth).abs().max()) <= 2 * largest / 254 * 1.01


def test_bytes_through_a_wire_are_two_payloads_at_most(harness: Harness) -> None:
    group = harness.group(3)
    for one in run(group, wires.reduce, next(_INDICES), wires.exact, scenarios.four_megabytes):
        assert one.outcome.bytes_sent == pytest.approx(2 * 2 / 3 * (4 << 20), rel=0.02)
        assert one.outcome.bytes_received == pytest.approx(2 * 2 / 3 * (4 << 20), rel=0.02)


def test_what_no_wire_carries_is_refused_at_once(harness: Harness) -> None:
    group = harness.group(2)
    for said in run(group, wires.offer_rubbish, next(_INDICES)):
        words = ["flat", "flat", "float32", "form", "5", "finite"]
        assert all(word in text for word, text in zip(words, said, strict=True))
    agreed([one.outcome for one in run(group, wires.reduce, next(_INDICES), wires.exact, wires.vector)])


def test_members_with_wires_of_another_form_do_not_mix(harness: Harness) -> None:
    group = harness.group(3)
    told = run(group, wires.reduce, next(_INDICES), wires.last_has_another_form, wires.vector)
    outcomes = [one.outcome for one in told]
    assert outcomes[2].kind == "failed"
    assert "exact" in outcomes[2].reason
    assert "other" in outcomes[2].reason
    if harness.majority_rules:
        assert sorted(ranks(group, agreed(outcomes[:2]))) == [0, 1]
        assert outcomes[2].missed
    else:
        assert [outcome.kind for outcome in outcomes] == ["failed"] * 3


@pytest.mark.parametrize("as_owner", [False, True])
@pytest.mark.parametrize("lie", ["short", "oversize", "empty", "not finite"])
def test_who_sends_what_cannot_be_read_is_named_and_spoils_nothing(harness: Harness, lie: str, as_owner: bool) -> None:
    group = harness.group(3)
    told = run(group, wires.reduce, next(_INDICES), wires.Liar(lie, as_owner), wires.vector)
    outcomes = [one.outcome for one in told]
    assert outcomes[2].kind == "failed"
    if harness.shrinks:
        outcome = agreed(outcomes[:2])
        assert sorted(ranks(group, outcome)) == [0, 1]
        assert outcome.digest == expected_digest(group, outcome, wires.vector)
        assert outcomes[2].missed
    else:
        assert [outcome.kind for outcome in outcomes] == ["failed"] * 3
        assert all("rank2" in outcome.reason for outcome in outcomes[:2])
        if lie == "oversize":
            group.broken = True  # the liar goes on with what nobody takes from it
            return
    agreed([one.outcome for one in run(group, wires.reduce, next(_INDICES), wires.exact, wires.vector)])


# -- what does not fit -----------------------------------------------------------------------------------------------


def test_rubbish_is_refused_at_once_and_names_the_position(harness: Harness) -> None:
    group = harness.group(2)
    for said in run(group, scenarios.offer_rubbish, next(_INDICES)):
        assert "1" in said["nan"]
        assert "2" in said["inf"]
        assert "0" in said["int"]
        assert "int64" in said["int"]
        assert "1" in said["bool"]
        assert "bool" in said["bool"]
        assert "-1" in said["negative weight"]
        assert "nan" in said["nan weight"]
        assert "inf" in said["infinite weight"]
        assert "-1" in said["gather weight"]
    agreed(run(group, scenarios.reduce, next(_INDICES), scenarios.small))


def test_two_members_with_different_shapes_both_hear_both(harness: Harness) -> None:
    group = harness.group(2)
    outcomes = run(group, scenarios.reduce, next(_INDICES), scenarios.both_differ)
    assert [outcome.kind for outcome in outcomes] == ["failed", "failed"]
    for outcome in outcomes:
        assert "[4, 3]" in outcome.reason
        assert "[5]" in outcome.reason
    agreed(run(group, scenarios.reduce, next(_INDICES), scenarios.small))


def test_one_of_three_with_another_shape_does_not_spoil_the_mean(harness: Harness) -> None:
    group = harness.group(3)
    outcomes = run(group, scenarios.reduce, next(_INDICES), scenarios.one_differs)
    assert outcomes[2].kind == "failed"
    assert "[4, 3]" in outcomes[2].reason
    assert "[5]" in outcomes[2].reason
    if harness.majority_rules:
        assert sorted(ranks(group, agreed(outcomes[:2]))) == [0, 1]
        assert outcomes[2].missed
    else:
        assert [outcome.kind for outcome in outcomes] == ["failed"] * 3
    agreed(run(group, scenarios.reduce, next(_INDICES), scenarios.small))


# -- several rounds, cancelled and closed ones -----------------------------------------------------------------------


def test_two_rounds_can_be_in_flight(harness: Harness) -> None:
    group = harness.group(3)
    outcomes = run(group, scenarios.reduce_and_gather_in_flight, next(_INDICES), scenarios.small)
    assert_mean(group, agreed([first for first, _ in outcomes]), scenarios.small)
    agreed([second for _, second in outcomes])


def test_who_cancels_is_out_of_the_round_and_in_the_next(harness: Harness) -> None:
    group = harness.group(3)
    index = next(_INDICES)
    [cancelled] = run(group, scenarios.call_and_cancel, index, scenarios.small, ranks=[0])
    assert cancelled.kind == "cancelled"
    others = run(group, scenarios.reduce, index, scenarios.small, ranks=[1, 2])
    assert all(outcome.seconds < harness.round_timeout + GRACE_S for outcome in others)
    if others[0].kind == "result":
        assert sorted(ranks(group, agreed(others))) == [1, 2]
    else:
        assert [outcome.kind for outcome in others] == ["failed", "failed"]
    agreed(run(group, scenarios.reduce, next(_INDICES), scenarios.small))


def test_closing_ends_rounds_in_flight_and_refuses_later_ones(harness: Harness) -> None:
    group = harness.group(2)
    group.broken = True
    [outcomes] = run(group, scenarios.call_and_close, next(_INDICES), scenarios.small, ranks=[0])
    assert [outcome.kind for outcome in outcomes] == ["failed"] * 3
    assert all("closed" in outcome.reason for outcome in outcomes)
    assert all(outcome.seconds < harness.round_timeout for outcome in outcomes)


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_bytes_of_a_reduction_are_those_of_a_ring(harness: Harness) -> None:
    group = harness.group(3)
    outcomes = run(group, scenarios.reduce, next(_INDICES), scenarios.four_megabytes)
    for outcome in outcomes:
        assert outcome.bytes_sent == pytest.approx(2 * 2 / 3 * (4 << 20), rel=0.02)
        assert outcome.bytes_received == pytest.approx(2 * 2 / 3 * (4 << 20), rel=0.02)


def test_bytes_of_a_gather_are_the_payload_to_each_other_member(harness: Harness) -> None:
    group = harness.group(3)
    outcomes = run(group, scenarios.gather, next(_INDICES), scenarios.payload_of_rank)
    sizes = [100_000 * (rank + 1) for rank in range(3)]
    for rank, outcome in enumerate(outcomes):
        assert outcome.bytes_sent == pytest.approx(2 * sizes[rank], rel=0.02)
        assert outcome.bytes_received == pytest.approx(sum(sizes) - sizes[rank], rel=0.02)


# -- late and dead members -------------------------------------------------------------------------------------------


def test_a_late_member_does_not_hold_the_others_up_for_longer_than_the_timeout(harness: Harness) -> None:
    group = harness.group(3)
    index = next(_INDICES)
    punctual = run(group, scenarios.reduce, index, scenarios.small, ranks=[0, 1])
    assert all(outcome.seconds < harness.round_timeout + GRACE_S for outcome in punctual)
    [late] = run(group, scenarios.reduce, index, scenarios.small, ranks=[2])
    assert late.kind == "failed"
    assert late.seconds < harness.round_timeout + GRACE_S
    if harness.knows_missed:
        assert sorted(ranks(group, agreed(punctual))) == [0, 1]
        assert late.missed
        assert late.seconds < 2.0
        agreed(run(group, scenarios.reduce, next(_INDICES), scenarios.small))
    else:
        assert [outcome.kind for outcome in punctual] == ["failed", "failed"]
        group.broken = True


def assert_survived(harness: Harness, group: Group, outcomes: Sequence[Outcome], dead: int) -> bool:
    """Survivors agree: on a result, which names who is in it, or on failure; and in time. True for a result."""
    assert all(outcome.seconds < harness.round_timeout + GRACE_S for outcome in outcomes)
    assert all(outcome.inputs_unchanged for outcome in outcomes)
    if any(outcome.kind == "result" for outcome in outcomes):
        survivors = [rank for rank in range(group.size) if rank != dead]
        assert sorted(ranks(group, agreed(outcomes))) in (survivors, list(range(group.size)))
        return True
    assert all(outcome.kind == "failed" and outcome.reason for outcome in outcomes)
    assert not harness.shrinks, outcomes[0].reason
    return False


@pytest.mark.parametrize("dead", [0, 2])
def test_the_others_go_on_when_a_member_dies_between_rounds(harness: Harness, dead: int) -> None:
    """Whether it is the first, which coordinates in a swarm, or another one."""
    group = harness.group(3)
    survivors = [rank for rank in range(3) if rank != dead]
    before = agreed(run(group, scenarios.reduce, next(_INDICES), scenarios.small))
    assert sorted(ranks(group, before)) == [0, 1, 2]
    group.kill(dead)
    outcomes = run(group, scenarios.reduce, next(_INDICES), scenarios.small, ranks=survivors)
    if assert_survived(harness, group, outcomes, dead):
        assert outcomes[0].digest == expected_digest(group, outcomes[0], scenarios.small)
    # What was learnt of the death is remembered.
    started = time.monotonic()
    outcomes = run(group, scenarios.reduce, next(_INDICES), scenarios.small, ranks=survivors)
    assert_survived(harness, group, outcomes, dead)
    assert time.monotonic() - started < 2.0
    if harness.shrinks:
        assert sorted(ranks(group, agreed(outcomes))) == survivors


@pytest.mark.parametrize(("dead", "delay"), [(2, 0.0), (2, 0.06), (0, 0.04)])
def test_the_others_agree_when_a_member_dies_in_a_reduction(harness: Harness, dead: int, delay: float) -> None:
    group = harness.group(3)
    survivors = [rank for rank in range(3) if rank != dead]
    index = next(_INDICES)
    [victim] = group.start(scenarios.call_and_die, "reduce", index, scenarios.big, delay, ranks=[dead])
    outcomes = run(group, scenarios.reduce, index, scenarios.big, ranks=survivors)
    assert isinstance(victim.exception(10), MemberDied)
    if assert_survived(harness, group, outcomes, dead):
        assert outcomes[0].digest == expected_digest(group, outcomes[0], scenarios.big)


@pytest.mark.parametrize(("dead", "delay"), [(2, 0.0), (2, 0.06), (0, 0.04)])
def test_the_others_agree_when_a_member_dies_in_a_reduction_through_a_wire(
    harness: Harness, dead: int, delay: float
) -> None:
    group = harness.group(3)
    survivors = [rank for rank in range(3) if rank != dead]
    index = next(_INDICES)
    [victim] = group.start(wires.call_and_die, index, scenarios.big, delay, ranks=[dead])
    told = run(group, wires.reduce, index, wires.exact, scenarios.big, ranks=survivors)
    outcomes = [one.outcome for one in told]
    assert isinstance(victim.exception(10), MemberDied)
    if assert_survived(harness, group, outcomes, dead):
        assert outcomes[0].digest == expected_digest(group, outcomes[0], scenarios.big)


@pytest.mark.parametrize(("dead", "delay"), [(2, 0.03), (0, 0.06)])
def test_the_others_have_the_same_payloads_when_a_member_dies_in_a_gather(
    harness: Harness, dead: int, delay: float
) -> None:
    group = harness.group(3)
    survivors = [rank for rank in range(3) if rank != dead]
    index = next(_INDICES)
    [victim] = group.start(scenarios.call_and_die, "gather", index, scenarios.big, delay, ranks=[dead])
    outcomes = run(group, scenarios.gather, index, scenarios.big, ranks=survivors)
    assert isinstance(victim.exception(10), MemberDied)
    if assert_survived(harness, group, outcomes, dead):
        payloads = [tensor for rank in ranks(group, outcomes[0]) for tensor in scenarios.big(rank)]
        assert outcomes[0].digest == scenarios.digest(payloads)


def test_a_frozen_member_does_not_hold_the_others_up(harness: Harness) -> None:
    group = harness.group(3)
    group.freeze(2)
    outcomes = run(group, scenarios.reduce, next(_INDICES), scenarios.small, ranks=[0, 1])
    assert_survived(harness, group, outcomes, 2)


@pytest.mark.parametrize("lineages", [("a", "a", "b"), ("", "a", "a")])
def test_members_with_another_past_than_the_majority_miss_the_round(
    harness: Harness, lineages: tuple[str, ...]
) -> None:
    group = harness.group(3)
    outcomes = run(group, scenarios.reduce_from, next(_INDICES), scenarios.small, lineages)
    if "b" not in lineages:  # who has no past fits all
        assert len(agreed(outcomes).members) == 3
        return
    assert outcomes[2].kind == "failed"
    if harness.shrinks:
        assert sorted(ranks(group, agreed(outcomes[:2]))) == [0, 1]
        assert outcomes[2].missed
    else:
        assert all("start from different states" in outcome.reason for outcome in outcomes)
