"""Who is named for holding the rounds up, from timings alone: the right peer, the right cause, once, and its end."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.lateness import LEARNT, STREAK, Fault, LatenessWatch, SilenceWatch
from swarmkit.peers.timings import Measured, RoundTimings, combine, lower_median

NAMES = ("alice", "bob", "carol", "dave", "erin")


def exchange(
    up: Sequence[float], down: Sequence[float], arrived: Sequence[float], weights: Sequence[float] | None = None
) -> RoundTimings:
    """A butterfly all-reduce among peers whose links take `up` and `down` seconds for a slice."""
    count = len(up)
    weights = weights or [1.0] * count
    link = [[up[i] + down[j] for j in range(count)] for i in range(count)]  # from i to j
    ready = [max([link[i][j] for i in range(count) if i != j and weights[i] > 0], default=0.0) for j in range(count)]
    measured: dict[str, Measured | None] = {
        NAMES[j]: Measured(
            parts=tuple(link[i][j] if i != j and weights[i] > 0 else None for i in range(count)),
            ready=ready[j],
            means=tuple(ready[i] + link[i][j] if i != j else None for i in range(count)),
        )
        for j in range(count)
    }
    return combine(NAMES[:count], weights, {NAMES[i]: 100.0 + arrived[i] for i in range(count)}, measured)


def watch(rounds: Sequence[RoundTimings], period_s: float = 2.0) -> list[tuple[int, Fault]]:
    judge = LatenessWatch()
    found = []
    for index, timings in enumerate(rounds):
        members = NAMES[: len(timings.arrived)]
        found += [(index, fault) for fault in judge.observe("parameters", index, members, timings, period_s)]
    return found


def one_slow(count: int, who: int, what: str, seconds: float) -> RoundTimings:
    up, down, arrived = [0.1] * count, [0.1] * count, [0.0] * count
    {"upload": up, "download": down, "compute": arrived}[what][who] += seconds
    return exchange(up, down, arrived)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(3, 5),
    st.integers(0, 4),
    st.sampled_from(["compute", "upload", "download"]),
    st.floats(1.0, 100.0),
    st.integers(0, 2 * LEARNT),
)
def test_the_slow_one_is_named_once_with_what_is_late_and_again_when_it_ends(
    count: int, who: int, what: str, seconds: float, before: int
) -> None:
    who %= count
    normal, slow = one_slow(count, who, what, 0.0), one_slow(count, who, what, seconds)
    found = watch([normal] * before + [slow] * (STREAK + 3) + [normal] * (STREAK + 3))
    assert [(index, fault.peer_id, fault.what, fault.ended) for index, fault in found] == [
        (before + STREAK - 1, NAMES[who], what, False),
        (before + 2 * STREAK + 2, NAMES[who], what, True),
    ]
    assert found[0][1].seconds >= 0.9 * seconds


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 5), st.integers(0, 1 << 30))
def test_noise_that_all_have_names_nobody(count: int, seed: int) -> None:
    chance = random.Random(seed)

    def noise(scale: float) -> list[float]:
        return [scale * chance.uniform(0.7, 1.3) for _ in range(count)]

    rounds = [exchange(noise(1.0), noise(1.0), noise(0.2)) for _ in range(60)]
    assert watch(rounds) == []


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 5), st.floats(2.0, 50.0))
def test_rounds_that_grow_for_all_are_nobodys_fault(count: int, times: float) -> None:
    small = exchange([0.3] * count, [0.3] * count, [0.0] * count)
    large = exchange([0.3 * times] * count, [0.3 * times] * count, [0.0] * count)
    assert watch([small] * 20 + [large] * 20) == []


def test_a_single_late_round_is_forgiven() -> None:
    normal, slow = one_slow(4, 1, "compute", 0.0), one_slow(4, 1, "compute", 5.0)
    assert watch(([normal] * 5 + [slow] * (STREAK - 1)) * 5) == []


def test_who_is_slow_from_the_first_round_on_is_named_too() -> None:
    ((index, fault),) = watch([one_slow(4, 2, "upload", 3.0)] * 50)
    assert (index, fault.peer_id, fault.what) == (STREAK - 1, "carol", "upload")


def test_a_lateness_that_is_small_beside_the_work_holds_nobody_up() -> None:
    rounds = [one_slow(4, 1, "compute", 2.0)] * 10
    assert watch(rounds, period_s=60.0) == []
    assert [fault.peer_id for _, fault in watch(rounds, period_s=5.0)] == ["bob"]


def test_one_that_is_early_makes_nobody_late() -> None:
    assert watch([exchange([0.1] * 4, [0.1] * 4, [0.0, 5.0, 5.0, 5.0])] * 10) == []


def test_of_two_the_link_is_named_when_it_gets_worse() -> None:
    normal, slow = exchange([0.1, 0.1], [0.1, 0.1], [0, 0]), exchange([3.0, 0.1], [0.1, 0.1], [0, 0])
    found = watch([normal] * 10 + [slow] * 5 + [normal] * 5)
    assert [(fault.peer_id, fault.what, fault.ended) for _, fault in found] == [
        ("alice", "link", False),
        ("alice", "link", True),
    ]
    late = watch([exchange([0.1, 0.1], [0.1, 0.1], [0, 4.0])] * 5)
    assert [(fault.peer_id, fault.what) for _, fault in late] == [("bob", "compute")]


def test_a_joiner_that_only_looks_on_is_not_judged_by_when_it_came() -> None:
    timings = exchange([0.1] * 4, [0.1] * 4, [0.0, 0.0, 0.0, 9.0], weights=[1, 1, 1, 0])
    assert timings.arrived[3] is None
    assert watch([timings] * 10) == []


def test_a_member_that_lies_about_the_others_is_outvoted() -> None:
    lie = Measured(parts=(90.0, None, 90.0, 90.0), ready=0.0, means=(90.0, None, 90.0, 90.0))
    honest = {
        name: Measured(
            parts=tuple(None if i == j else 0.1 for i in range(4)),
            ready=0.1,
            means=tuple(None if i == j else 0.2 for i in range(4)),
        )
        for j, name in enumerate(NAMES[:4])
    }
    timings = combine(NAMES[:4], [1] * 4, dict.fromkeys(NAMES[:4], 0.0), {**honest, "bob": lie})
    assert {fault.peer_id for _, fault in watch([timings] * 10)} <= {"bob"}


def test_what_nobody_measured_is_not_judged() -> None:
    timings = combine(NAMES[:3], [1, 1, 1], dict.fromkeys(NAMES[:3], 0.0), {})
    assert timings.upload == timings.download == (None, None, None)
    assert watch([timings] * 10) == []
    assert lower_median([]) is None
    assert lower_median([None, 3.0, 1.0]) == 1.0


def test_timings_travel_unchanged() -> None:
    timings = one_slow(3, 1, "upload", 2.0)
    assert RoundTimings.from_message(timings.to_message(), 3) == timings
    assert RoundTimings.from_message(None, 3) is None
    measured = Measured(parts=(None, 0.5), ready=None, means=(0.25, None))
    assert Measured.from_message(measured.to_message()) == measured


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300, "1", True, [1.0], 1 << 200])
def test_timings_that_make_no_sense_are_refused(value: object) -> None:
    good = Measured(parts=(0.5,), ready=0.5, means=(0.5,)).to_message()
    for changed in ({"parts": [value]}, {"ready": value}, {"means": [value]}):
        with pytest.raises(ProtocolError):
            Measured.from_message({**good, **changed})
    with pytest.raises(ProtocolError):
        RoundTimings.from_message({"arrived": [value], "upload": [0.0], "download": [0.0]}, 1)
    with pytest.raises(ProtocolError, match="other than 2 members"):
        RoundTimings.from_message({"arrived": [0.0], "upload": [0.0], "download": [0.0]}, 2)
    with pytest.raises(ProtocolError, match="must be a map"):
        Measured.from_message([value])


def silence(ages: dict[str, float | None], left: set[str]) -> SilenceWatch:
    return SilenceWatch(lambda peer: ages.get(peer), lambda peer: peer in left, limit_s=5.0)


def test_a_peer_that_is_not_heard_any_more_is_named_and_again_when_it_is_back() -> None:
    ages: dict[str, float | None] = {"bob": 1.0}
    judge = silence(ages, set())
    assert judge.observe(0, ["alice", "bob"]) == ([], [])
    assert judge.observe(1, ["alice"]) == ([], [])  # it still beats: it only missed this round
    ages["bob"] = 7.0
    faults, _ = judge.observe(2, ["alice"])
    assert [(fault.peer_id, fault.what, fault.seconds, fault.ended) for fault in faults] == [
        ("bob", "silent", 7.0, False)
    ]
    assert judge.observe(3, ["alice"]) == ([], [])
    faults, _ = judge.observe(4, ["alice", "bob"])
    assert [(fault.peer_id, fault.ended, fault.gone) for fault in faults] == [("bob", True, False)]


def test_a_silent_peer_that_stays_away_is_gone() -> None:
    ages: dict[str, float | None] = {"bob": 7.0}
    judge = silence(ages, set())
    judge.observe(0, ["alice", "bob"])
    judge.observe(1, ["alice"])
    ages["bob"] = None  # its record has expired
    faults, gone = judge.observe(2, ["alice"])
    assert [(fault.ended, fault.gone, fault.text) for fault in faults] == [(True, True, "bob is gone")]
    assert gone == ["bob"]
    assert judge.observe(3, ["alice"]) == ([], [])


def test_a_peer_that_said_good_bye_is_not_silent() -> None:
    judge = silence({"bob": 60.0}, {"bob"})
    judge.observe(0, ["alice", "bob"])
    assert judge.observe(1, ["alice"]) == ([], ["bob"])


def test_what_a_peer_was_named_for_ends_when_it_leaves() -> None:
    judge = LatenessWatch()
    for index in range(STREAK):
        judge.observe("parameters", index, NAMES[:4], one_slow(4, 1, "upload", 5.0), 2.0)
    assert [(fault.what, fault.ended) for fault in judge.forget("bob", 9)] == [("upload", True)]
    assert judge.forget("bob", 9) == []
