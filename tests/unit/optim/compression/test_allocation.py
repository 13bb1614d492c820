"""The allocation of compression over tensors: within its budget, never worse than uniform, as near as it certifies."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from swarmkit.optim.compression import allocation
from swarmkit.optim.compression.allocation import GAP, Allocation, allocate, discretise, dynamic_programme

Floats = NDArray[np.float64]


@st.composite
def tables(draw: st.DrawFn) -> tuple[Floats, Floats, int]:
    """Tables without any order in them, many ties included, and a baseline."""
    tensors, candidates = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    shape = (tensors, candidates)
    cells = tensors * candidates
    sizes = draw(st.lists(st.integers(0, 40) | st.integers(0, 10**9), min_size=cells, max_size=cells))
    kinds = st.integers(0, 6).map(float) | st.floats(0, 1e6, allow_subnormal=False) | st.floats(1e-30, 1e-20)
    errors = draw(st.lists(kinds, min_size=cells, max_size=cells))
    return (
        np.array(sizes, dtype=np.float64).reshape(shape),
        np.array(errors, dtype=np.float64).reshape(shape),
        draw(st.integers(0, candidates - 1)),
    )


def sparse_tables(tensors: int, candidates: int, seed: int) -> tuple[Floats, Floats]:
    """Like a top-k codec's on the tensors of a large network."""
    rng = np.random.default_rng(seed)
    count = np.exp(rng.uniform(np.log(1e3), np.log(4e6), tensors))[:, None]
    density = np.geomspace(0.001, 0.2, candidates)
    decay = rng.uniform(0.6, 9, tensors)[:, None]
    scale = np.exp(rng.normal(0, 1.5, tensors))[:, None] * np.sqrt(count)
    return np.ceil(count * density * 8), scale * np.sqrt(1 - density) * np.exp(-decay * np.sqrt(density))


def totals(sizes: Floats, errors: Floats, choices: tuple[int, ...]) -> tuple[int, float]:
    rows = np.arange(len(sizes))
    return int(sizes[rows, list(choices)].sum()), math.fsum(errors[rows, list(choices)].tolist())


def brute_force(sizes: Floats, errors: Floats, budget: float) -> int | None:
    """The fewest bytes within the budget, by trying all there is."""
    tried = (totals(sizes, errors, choices) for choices in itertools.product(range(sizes.shape[1]), repeat=len(sizes)))
    return min((cost for cost, error in tried if error <= budget), default=None)


def check_promises(sizes: Floats, errors: Floats, baseline: int, alpha: float, squared: bool = False) -> Allocation:
    """Whatever the tables: feasible, no worse than uniform, not below the bound, and honest about both."""
    found = allocate(sizes, errors, baseline=baseline, alpha=alpha, squared=squared)
    scale = 2.0 ** math.frexp(errors.max())[1]
    metric = (errors / scale) ** 2 if squared else errors / scale
    cost, error = totals(sizes, metric, found.choices)
    uniform_cost, uniform_error = totals(sizes, metric, (baseline,) * len(sizes))
    unit = scale**2 if squared else scale
    assert cost == found.bytes
    assert math.isclose(error * unit, found.error, rel_tol=1e-12)
    if found.method == "least error":
        assert alpha < 1
        assert error == math.fsum(metric.min(axis=1).tolist())
        return found
    assert error <= alpha * uniform_error, "over the budget"
    assert alpha < 1 or cost <= uniform_cost, "worse than uniform"
    assert found.bound <= cost, "below its bound"
    assert found.gap >= 0
    if sizes.shape[1] ** len(sizes) <= 1024:
        optimum = brute_force(sizes, metric, alpha * uniform_error)
        assert optimum is not None
        assert optimum <= cost, "fewer bytes than there can be"
        assert found.bound <= optimum * (1 + 1e-9), "the bound is above the optimum"
    return found


@settings(deadline=None, max_examples=150)
@given(tables(), st.sampled_from([0.25, 0.9, 1.0, 1.5, 4.0]), st.booleans())
def test_every_allocation_is_feasible_no_worse_than_uniform_and_not_below_its_bound(
    table: tuple[Floats, Floats, int], alpha: float, squared: bool
) -> None:
    """(30)"""
    check_promises(*table, alpha, squared)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize(("tensors", "candidates"), [(1, 8), (5, 5), (20, 16), (50, 8), (200, 16), (600, 30)])
def test_the_certified_gap_of_tables_like_those_of_networks_is_below_one_percent(
    tensors: int, candidates: int, squared: bool
) -> None:
    """(30)"""
    for seed in range(6):
        table = sparse_tables(tensors, candidates, seed)
        found = check_promises(*table, candidates // 2, 1.0, squared)
        assert found.gap < GAP
    if tensors >= 200:
        assert found.bytes < 0.6 * table[0][:, candidates // 2].sum()


def test_a_larger_budget_never_raises_the_bound() -> None:
    """(31)"""
    for seed in range(5):
        sizes, errors = sparse_tables(80, 12, seed)
        found = [allocate(sizes, errors, baseline=6, alpha=alpha) for alpha in (0.7, 0.9, 1.0, 1.1, 1.4, 2.0, 4.0)]
        bounds = [allocation.bound for allocation in found]
        assert bounds == sorted(bounds, reverse=True)
        assert bounds[0] > bounds[-1]


@settings(deadline=None, max_examples=60)
@given(tables())
def test_what_a_small_budget_allows_is_no_less_than_the_bound_of_a_larger_one(
    table: tuple[Floats, Floats, int],
) -> None:
    """(31)"""
    sizes, errors, baseline = table
    small, large = (allocate(sizes, errors, baseline=baseline, alpha=alpha) for alpha in (1.0, 2.0))
    assert large.bound <= small.bytes


@settings(deadline=None, max_examples=100)
@given(tables(), st.randoms(use_true_random=False), st.integers(-40, 40))
def test_neither_the_scale_of_the_errors_nor_the_order_of_the_tensors_matters(
    table: tuple[Floats, Floats, int], random: "np.random.RandomState", exponent: int
) -> None:
    """(32)"""
    sizes, errors, baseline = table
    found = allocate(sizes, errors, baseline=baseline)
    scaled = allocate(sizes, errors * 2.0**exponent, baseline=baseline)
    assert (scaled.choices, scaled.bytes, scaled.bound) == (found.choices, found.bytes, found.bound)
    order = list(range(len(sizes)))
    random.shuffle(order)
    moved = allocate(sizes[order], errors[order], baseline=baseline)
    assert (moved.bytes, moved.error, moved.bound) == (found.bytes, found.error, found.bound)
    given_rows = [(*sizes[row], *errors[row], found.choices[row]) for row in order]
    moved_rows = [(*sizes[row], *errors[row], choice) for row, choice in zip(order, moved.choices, strict=True)]
    assert sorted(moved_rows) == sorted(given_rows)


def test_the_memory_layout_of_the_tables_does_not_matter() -> None:
    sizes, errors = sparse_tables(60, 16, 0)
    found = allocate(sizes, errors, baseline=8)
    assert allocate(np.asfortranarray(sizes), np.asfortranarray(errors), baseline=8) == found
    assert allocate(sizes.astype(np.int64).tolist(), errors.tolist(), baseline=8) == found
    assert allocate(sizes[::-1][::-1], errors.repeat(2, 1)[:, ::2], baseline=8) == found


def test_a_coarse_dynamic_programme_is_worse_than_uniform_which_the_allocation_never_is() -> None:
    """(33)"""
    worse = 0
    for seed in range(30):
        sizes, errors = sparse_tables(30, 8, seed)
        cost, budget = totals(sizes, errors, (4,) * 30)
        found = dynamic_programme(sizes, discretise(errors, budget, 60), 60)
        worse += found is None or totals(sizes, errors, tuple(found))[0] > cost
        assert allocate(sizes, errors, baseline=4).bytes <= cost
    assert worse > 0


def test_the_dynamic_programme_becomes_exact_as_its_buckets_become_finer() -> None:
    """(34)"""
    rng = np.random.default_rng(0)
    excess = {10**2: 0, 10**4: 0, 10**6: 0}
    for _ in range(5):
        sizes, errors = rng.integers(1, 1000, (4, 4)).astype(float), rng.uniform(0, 1, (4, 4))
        budget = float(errors[:, 2].sum())
        optimum = brute_force(sizes, errors, budget)
        assert optimum is not None
        for buckets in excess:
            found = dynamic_programme(sizes, discretise(errors, budget, buckets), buckets)
            excess[buckets] += 9999 if found is None else totals(sizes, errors, tuple(found))[0] - optimum
    assert excess[10**2] > 0
    assert excess[10**6] == 0


def strict_first_layer(sizes: Floats, buckets: NDArray[np.int64], capacity: int) -> float:
    """The published programme's recursion, element by element: strict `>` for the first layer, `>=` for the others."""
    best = [
        min((sizes[0, c] for c in range(sizes.shape[1]) if used > buckets[0, c]), default=math.inf)
        for used in range(capacity + 1)
    ]
    for layer in range(1, len(sizes)):
        best = [
            min(
                (
                    best[used - buckets[layer, c]] + sizes[layer, c]
                    for c in range(sizes.shape[1])
                    if used >= buckets[layer, c]
                ),
                default=math.inf,
            )
            for used in range(capacity + 1)
        ]
    return float(min(best))


def test_the_published_programme_is_ours_with_one_bucket_less() -> None:
    """(35)"""
    rng = np.random.default_rng(1)
    differs = 0
    for _ in range(20):
        sizes, errors = rng.integers(1, 1000, (5, 4)).astype(float), rng.uniform(0.1, 1, (5, 4))
        buckets = discretise(errors, float(errors[:, 2].sum()), 25)
        published = strict_first_layer(sizes, buckets, 25)
        ours = [dynamic_programme(sizes, buckets, capacity) for capacity in (24, 25)]
        costs = [math.inf if found is None else totals(sizes, errors, tuple(found))[0] for found in ours]
        assert published == costs[0]
        differs += published != costs[1]
    assert differs > 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_a_table_that_is_not_finite_or_negative_is_refused_by_tensor_and_candidate(value: float) -> None:
    """(36) Where the published guard, `np.nan_to_num` with its result dropped, changes nothing."""
    sizes, errors = np.ones((3, 2)), np.ones((3, 2))
    errors[1, 1] = value
    np.nan_to_num(errors)
    assert errors[1, 1] == value or math.isnan(errors[1, 1])
    with pytest.raises(ValueError, match=r"error of tensor 'b' at candidate 1 is -?(nan|inf|1\.0)"):
        allocate(sizes, errors, baseline=0, names=["a", "b", "c"])
    with pytest.raises(ValueError, match=r"size of tensor 1 at candidate 1 is -?(nan|inf|1\.0)"):
        allocate(errors, sizes, baseline=0)


def test_input_that_is_no_table_is_refused() -> None:
    one = np.ones((2, 3))
    for sizes, errors in ((np.ones(3), np.ones(3)), (one, np.ones((3, 2))), (np.ones((2, 0)), np.ones((2, 0)))):
        with pytest.raises(ValueError, match="tensors x candidates"):
            allocate(sizes, errors, baseline=0)
    with pytest.raises(ValueError, match=r"size of tensor 0 at candidate 0 is 0\.5"):
        allocate(one / 2, one, baseline=0)
    for baseline in (3, -1, True, 1.0):
        with pytest.raises(ValueError, match="baseline="):
            allocate(one, one, baseline=baseline)  # type: ignore[arg-type]
    for alpha in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="alpha="):
            allocate(one, one, baseline=0, alpha=alpha)
    with pytest.raises(ValueError, match="1 names for 2"):
        allocate(one, one, baseline=0, names=["a"])


@pytest.mark.parametrize("seed", range(4))
def test_tiny_cases_are_within_one_percent_of_brute_force(seed: int) -> None:
    """Where a bare Lagrange solution can cost more than twice the optimum."""
    rng = np.random.default_rng(seed)
    for _ in range(40):
        sizes = -np.sort(-rng.integers(1, 10_000, (5, 5)).astype(float))
        errors = np.sort(rng.uniform(0, 1, (5, 5)))
        found = check_promises(sizes, errors, 2, 1.0)
        optimum = brute_force(sizes, errors, totals(sizes, errors, (2,) * 5)[1])
        assert optimum is not None
        assert found.bytes <= (1 + GAP) * optimum


def test_the_least_error_is_taken_when_no_choice_meets_the_budget() -> None:
    found = allocate([[1, 9], [2, 8]], [[3.0, 1.0], [4.0, 2.0]], baseline=1, alpha=0.5)
    assert (found.method, found.choices, found.bytes, found.error) == ("least error", (1, 1), 17, 3.0)


def test_no_error_at_all_takes_the_smallest_candidates() -> None:
    found = allocate([[5, 3, 4], [1, 1, 7]], np.zeros((2, 3)), baseline=2)
    assert (found.choices, found.bytes, found.gap, found.error) == ((1, 0), 4, 0.0, 0.0)
    exact = allocate([[5, 3], [9, 7]], [[0.0, 1.0], [0.0, 1.0]], baseline=0)
    assert (exact.choices, exact.error) == ((0, 0), 0.0)


def test_no_tensors_need_no_bytes() -> None:
    found = allocate(np.empty((0, 3)), np.empty((0, 3)), baseline=1)
    assert (found.choices, found.bytes, found.error, found.gap) == ((), 0, 0.0, 0.0)


@pytest.mark.parametrize("scale", [1e-308, 1e-150, 1e150, 1e305])
def test_errors_of_any_magnitude_are_allocated_alike(scale: float) -> None:
    sizes, errors = sparse_tables(40, 8, 3)
    for squared in (False, True):
        reference = allocate(sizes, errors / errors.max(), baseline=4, squared=squared)
        found = allocate(sizes, errors / errors.max() * scale, baseline=4, squared=squared)
        assert abs(found.bytes - reference.bytes) <= GAP * reference.bytes


def test_squared_norms_allow_less_squared_error_for_the_same_bytes() -> None:
    sizes, errors = sparse_tables(100, 16, 2)
    norms = allocate(sizes, errors, baseline=8)
    rows = np.arange(100)
    squared_error = float((errors[rows, list(norms.choices)] ** 2).sum())
    alpha = squared_error / float((errors[:, 8] ** 2).sum())
    squares = allocate(sizes, errors, baseline=8, alpha=alpha, squared=True)
    assert squares.bytes < norms.bytes


def test_the_dynamic_programme_takes_over_where_the_bound_stays_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "_MAX_BRANCHES", 0)
    methods = set()
    rng = np.random.default_rng(4)
    for _ in range(40):
        sizes = -np.sort(-rng.integers(1, 10_000, (5, 5)).astype(float))
        errors = np.sort(rng.uniform(0, 1, (5, 5)))
        methods.add(check_promises(sizes, errors, 2, 1.0).method)
    assert "dynamic programme" in methods


# -- planted slips ---------------------------------------------------------------------------------------------------


def no_uniform(problem: type, patch: pytest.MonkeyPatch) -> None:
    """Rounding the relaxation up only, and uniform is not looked at."""
    patch.setattr(problem, "_fill", lambda self, choices: choices)
    patch.setattr(problem, "_repair", lambda self, choices: np.argmin(self._errors, axis=1))
    patch.setattr(problem, "_branch", lambda self, root: (root.choices, root.bound))
    patch.setattr(allocation, "dynamic_programme", lambda *_: None)
    solve = problem.solve  # type: ignore[attr-defined]

    def without(self: object, baseline: int) -> object:
        full = self._full  # type: ignore[attr-defined]
        self._full = (np.where(np.arange(full[0].shape[1]) == baseline, 1e18, full[0]), full[1])  # type: ignore[attr-defined]
        found = solve(self, baseline)
        rows = np.arange(len(full[0]))
        return replace(found, bytes_of=full[0][rows, found.choices])

    patch.setattr(problem, "solve", without)


def bound_without_budget(problem: type, patch: pytest.MonkeyPatch) -> None:
    """The dual function without its term -price * budget."""
    search = problem._search  # type: ignore[attr-defined]

    def wrong(self: object, *args: object) -> object:
        over, under, bound = search(self, *args)
        price = (self._bytes(under) - self._bytes(over)) / (self._error(over) - self._error(under))  # type: ignore[attr-defined]
        return over, under, bound + price * self._budget  # type: ignore[attr-defined]

    patch.setattr(problem, "_search", wrong)


def bound_of_the_rounded(problem: type, patch: pytest.MonkeyPatch) -> None:
    """What was found, given out as the bound."""
    relax = problem._relax  # type: ignore[attr-defined]

    def wrong(self: object) -> object:
        node = relax(self)
        return node and replace(node, bound=self._bytes(node.choices))  # type: ignore[attr-defined]

    patch.setattr(problem, "_relax", wrong)


def fill_beyond_the_budget(problem: type, patch: pytest.MonkeyPatch) -> None:
    """The choices on the cheap side of the multiplier."""
    patch.setattr(problem, "_repair", lambda self, choices: choices)


SLIPS = {
    no_uniform: "worse than uniform",
    bound_without_budget: "the bound is above",
    bound_of_the_rounded: "the bound is above",
    fill_beyond_the_budget: "over the budget",
}


@pytest.mark.parametrize(("slip", "broken"), SLIPS.items())
def test_a_planted_slip_breaks_a_promise(
    slip: Callable[[type, pytest.MonkeyPatch], None], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    instances = []
    for _ in range(60):
        sizes = -np.sort(-rng.integers(1, 10_000, (5, 4)).astype(float))
        instances.append((sizes, np.sort(rng.uniform(0, 1, (5, 4)))))

    def check_all() -> None:
        for sizes, errors in instances:
            check_promises(sizes, errors, 1, 1.0)

    check_all()
    slip(allocation._Problem, monkeypatch)
    with pytest.raises(AssertionError, match=broken):
        check_all()
