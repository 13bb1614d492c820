"""Streams: disjoint between slots, complete in an epoch, reproducible, exact after a resume."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from swarmkit.data.config import Split
from swarmkit.data.stream import Stream
from swarmkit.errors import DataError
from tests.unit.swarmkit.data.harness_corpora import Numbered, draw, splits, stream


def shares(size: int, slots: int) -> list[int]:
    return [len(range(slot, size, slots)) for slot in range(slots)]


def epoch_of(source: Stream, count: int) -> list[int]:
    """The first `count` samples: one epoch, when a slot has so many."""
    return draw(source, -(-count // 4))[:count]


@given(st.integers(1, 300), st.integers(1, 9), st.integers(0, 99))
def test_in_an_epoch_the_slots_draw_every_sample_exactly_once(size: int, slots: int, seed: int) -> None:
    assume(size >= slots)
    drawn = [
        number
        for slot, count in enumerate(shares(size, slots))
        for number in epoch_of(stream(Numbered(size), slot, slots, seed=seed), count)
    ]
    assert sorted(drawn) == list(range(size))


@given(st.lists(st.integers(0, 5), min_size=20, max_size=200), st.integers(1, 5), st.sampled_from(list(Split)))
def test_with_every_split_no_sample_belongs_to_two_slots(domains: list[int], slots: int, split: Split) -> None:
    corpus = Numbered(len(domains), domains)
    try:
        drawn = [set(draw(stream(corpus, slot, slots, split=split), 5)) for slot in range(slots)]
    except DataError as error:
        assert "has no sample" in str(error)  # noqa: PT017 - only some draws leave a slot without any
        return
    if split is Split.iid:
        drawn = [
            set(epoch_of(stream(corpus, slot, slots), count)) for slot, count in enumerate(shares(corpus.size, slots))
        ]
    assert sum(map(len, drawn)) == len(set().union(*drawn))


@given(st.integers(10, 100), st.integers(1, 4), st.integers(0, 3))
def test_over_many_epochs_every_sample_is_drawn_equally_often(size: int, epochs: int, seed: int) -> None:
    counts = Counter(epoch_of(stream(Numbered(size), seed=seed), epochs * size))
    assert set(counts) == set(range(size))
    assert set(counts.values()) == {epochs}


def test_every_epoch_has_another_order_and_so_has_every_seed() -> None:
    source = stream(Numbered(40))
    first, second = draw(source, 10), draw(source, 10)
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != draw(stream(Numbered(40), seed=1), 10)
    assert first == draw(stream(Numbered(40)), 10)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 3), splits)
def test_a_resumed_stream_goes_on_as_if_nothing_had_happened(before: int, after: int, slots: int, split: Split) -> None:
    corpus = Numbered(50, [k % 7 for k in range(50)])
    source = stream(corpus, slots - 1, slots, split=split)
    draw(source, before)
    kept = json.loads(json.dumps(source.state()))
    resumed = stream(corpus, slots - 1, slots, split=split)
    draw(resumed, 3)
    resumed.load(kept)
    assert draw(resumed, after) == draw(source, after)
    assert resumed.state() == source.state()


@given(st.integers(0, 100), st.integers(1, 3))
def test_seeking_is_drawing_without_the_samples(batches: int, slots: int) -> None:
    drawn, sought = stream(Numbered(50), 0, slots), stream(Numbered(50), 0, slots)
    draw(drawn, batches)
    sought.seek(4 * batches)
    assert sought.state() == drawn.state()
    assert draw(sought, 2) == draw(drawn, 2)


@given(st.integers(0, 12), st.integers(1, 8), st.integers(1, 8))
def test_going_on_with_other_peers_repeats_nothing_and_skips_next_to_nothing(batches: int, old: int, new: int) -> None:
    size = 400
    corpus = Numbered(size)
    before = [stream(corpus, slot, old) for slot in range(old)]
    drawn = [number for source in before for number in draw(source, batches)]
    assume(len(drawn) < size)
    after = [stream(corpus, slot, new) for slot in range(new)]
    rest = []
    for slot, source in enumerate(after):
        source.load(before[slot % old].state())
        if source.state()["epoch"] == 0:
            left = shares(size, new)[slot] - source.state()["sample"]
            rest += draw(source, -(-left // 4))[:left]
    assert not set(drawn) & set(rest)
    assert len(drawn) + len(rest) > size - new


def test_an_additional_slot_changes_nothing_for_the_planned_ones() -> None:
    planned = draw(stream(Numbered(60), 1, 3), 20)
    volunteer = stream(Numbered(60), 5, 3)
    assert sorted(draw(volunteer, 15)) == list(range(60)), "it draws from everything"
    assert draw(stream(Numbered(60), 5, 3), 15) != draw(stream(Numbered(60), 4, 3), 15), "in an order of its own"
    assert planned == draw(stream(Numbered(60), 1, 3), 20)


def test_an_epoch_that_ends_within_a_batch_is_completed_from_the_next() -> None:
    source = stream(Numbered(3), batch_size=8)
    drawn = draw(source, 3)
    assert [sorted(drawn[k : k + 3]) for k in range(0, 24, 3)] == [[0, 1, 2]] * 8
    assert source.state() == {"epoch": 8, "sample": 0, "slots": 1}


def test_what_a_stream_keeps_does_not_grow_with_the_corpus() -> None:
    """Were the order stored, this would need eight terabytes."""
    corpus = Numbered(1)
    corpus.size = 10**12
    source = stream(corpus, 3, 7)
    numbers = draw(source, 3)
    assert len(set(numbers)) == 12
    source.seek(10**13)
    assert max(draw(source, 100)) > 10**11


@pytest.mark.parametrize("split", [Split.domain, Split.dirichlet])
def test_a_slot_draws_from_its_own_share_in_every_epoch(split: Split) -> None:
    corpus = Numbered(40, [k // 10 for k in range(40)])
    source = stream(corpus, 1, 4, split=split)
    share = set(draw(source, 50))
    assert share == set(draw(source, 50))
    if split is Split.domain:
        assert share == set(range(10, 20))


@pytest.mark.parametrize(
    "state",
    [
        {"epoch": -1, "sample": 0, "slots": 1},
        {"epoch": 0, "sample": -1, "slots": 1},
        {"epoch": 0, "sample": 0, "slots": 0},
    ],
)
def test_a_position_that_never_was_is_refused(state: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        stream(Numbered(10)).load(state)


def test_a_position_beyond_the_data_is_refused_and_says_why() -> None:
    source = stream(Numbered(10))
    with pytest.raises(ValueError, match="10 samples in an epoch; the data, data.split or the number"):
        source.load({"epoch": 0, "sample": 10, "slots": 1})


@pytest.mark.parametrize(("slot", "slots", "batch"), [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_slots_and_batches_that_make_no_sense_are_refused(slot: int, slots: int, batch: int) -> None:
    with pytest.raises(ValueError, match=f"slot={slot}, slots={slots}, batch_size={batch}"):
        stream(Numbered(10), slot, slots, batch_size=batch)


def test_more_slots_than_samples_are_refused() -> None:
    with pytest.raises(DataError, match="slot 3 of 5 has no sample with data.split=iid: use more data"):
        stream(Numbered(3), 3, 5)


def test_samples_come_as_the_corpus_made_them() -> None:
    batch = stream(Numbered(100), batch_size=16).next()
    assert batch.inputs.shape == (16,)
    assert np.array_equal(batch.inputs, batch.targets)
