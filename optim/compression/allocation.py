"""Which compression each tensor gets: the fewest bytes within an error budget (L-GreCo, arXiv 2210.17357).

Pure NumPy and a function of its tables alone: sums are exactly rounded and ties fall the same way everywhere, so peers
that hold the same tables come to the same choices without telling each other.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GAP = 0.01  # relative distance to the bound above which the dynamic programme is tried as well
_MAX_STEPS = 200  # of the search for the multiplier; about ten are needed
_MAX_BRANCHES = 24
_SAME = 1e-12  # relative difference that is rounding


@dataclass(frozen=True, slots=True)
class Allocation:
    """One candidate for each tensor, what it costs, and how far from the optimum it can be at most."""

    choices: tuple[int, ...]  # index of the candidate for each tensor
    bytes: int  # of all tensors together
    error: float  # in the metric that was asked for: sum of norms, or of their squares
    budget: float  # what the error was not to exceed
    bound: float  # no allocation within the budget has fewer bytes (Lagrangian dual)
    gap: float  # bytes / bound - 1
    method: str  # "lagrange", "dynamic programme", "uniform", or "least error" when nothing meets the budget


def allocate(
    sizes: ArrayLike,
    errors: ArrayLike,
    *,
    baseline: int,
    alpha: float = 1.0,
    squared: bool = False,
    names: Sequence[str] | None = None,
) -> Allocation:
    """Choose one candidate per tensor: the fewest bytes with error <= alpha * error of `baseline` for all tensors.

    `sizes` (whole bytes) and `errors` (norms) are tensors x candidates. The error is the sum of the norms, as in the
    paper, or with `squared` of their squares, which is the squared norm of the total error. With alpha >= 1 the result
    never has more bytes than the baseline. When no choice meets the budget (alpha < 1) the result is the least error
    there is. The search starts cold: from another multiplier it may end at another of equally good choices.

    Raises ValueError for tables that are not finite, negative or of different shapes, naming tensor and candidate.
    """
    size_table, error_table = _check_tables(sizes, errors, names)
    tensors, candidates = size_table.shape
    if not (type(baseline) is int and 0 <= baseline < candidates):
        raise ValueError(f"baseline={baseline!r}: must be one of the {candidates} candidates")
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha={alpha!r}: must be positive and finite")
    # A power of two, so that no digit is lost: the result doesn't depend on the gradients' scale.
    exponent = math.frexp(float(error_table.max(initial=0.0)))[1]
    norms = np.ldexp(error_table, -exponent)
    if squared:
        norms, exponent = norms * norms, 2 * exponent
    # Canonical order: that of the tensors has no influence on ties.
    rows = np.hstack([size_table, norms]).astype(">f8")
    order = np.array(sorted(range(tensors), key=lambda row: rows[row].tobytes()), dtype=np.int64)
    budget = alpha * _sum(norms[:, baseline])
    found = _Problem(size_table[order], norms[order], budget).solve(baseline)
    choices = np.empty(tensors, dtype=np.int64)
    choices[order] = found.choices
    cost = int(_sum(found.bytes_of))
    bound = min(float(cost), max(found.bound, 0.0))
    return Allocation(
        choices=tuple(choices.tolist()),
        bytes=cost,
        error=_ldexp(_sum(found.errors_of), exponent),
        budget=_ldexp(budget, exponent),
        bound=bound,
        gap=cost / bound - 1 if bound > 0 else (0.0 if cost == 0 else math.inf),
        method=found.method,
    )


def discretise(errors: Floats, budget: float, buckets: int) -> Ints:
    """Errors in buckets of budget / buckets, rounded up and at least 1, as in the paper; above the budget: buckets + 1.

    Since none is rounded down, choices whose buckets fit have errors that fit.
    """
    if budget <= 0:
        return np.where(errors > 0, buckets + 1, 1).astype(np.int64)
    return np.clip(np.ceil(errors * (buckets / budget)), 1, buckets + 1).astype(np.int64)


def dynamic_programme(sizes: Floats, buckets: Ints, capacity: int) -> Ints | None:
    """The fewest bytes whose buckets add up to at most `capacity`, exact for these buckets; None when none fit.

    Takes time and memory of tensors x candidates x capacity and tensors x capacity.
    """
    tensors = sizes.shape[0]
    width = capacity + 1
    best = np.zeros(width)  # fewest bytes of the tensors so far that use at most so many buckets
    taken = np.empty((tensors, width), dtype=np.int16)
    for tensor in range(tensors):
        now = np.full(width, np.inf)
        choice = np.zeros(width, dtype=np.int16)
        for candidate in range(sizes.shape[1]):
            used = int(buckets[tensor, candidate])
            if used > capacity or not math.isfinite(sizes[tensor, candidate]):
                continue
            total = best[: width - used] + sizes[tensor, candidate]
            better = total < now[used:]
            np.copyto(now[used:], total, where=better)
            choice[used:][better] = candidate
        best, taken[tensor] = now, choice
    if not math.isfinite(best[capacity]):
        return None
    choices = np.empty(tensors, dtype=np.int64)
    left = capacity
    for tensor in reversed(range(tensors)):
        choices[tensor] = taken[tensor, left]
        left -= int(buckets[tensor, choices[tensor]])
    return choices


@dataclass(frozen=True, slots=True)
class _Found:
    choices: Ints
    bytes_of: Floats
    errors_of: Floats
    bound: float
    method: str


@dataclass(frozen=True, slots=True)
class _Node:
    """A part of the problem, its best known choices and its bound; `split` is where it can be halved."""

    problem: "_Problem"
    choices: Ints
    bound: float
    split: tuple[int, int] | None


class _Problem:
    """One instance; candidates are sorted by size, and those that another one dominates are out of reach."""

    def __init__(self, sizes: Floats, errors: Floats, budget: float) -> None:
        self._full = sizes, errors
        self._rows = np.arange(sizes.shape[0])
        self._budget = budget
        by_error = np.argsort(errors, axis=1, kind="stable")
        by_size = np.argsort(np.take_along_axis(sizes, by_error, 1), axis=1, kind="stable")
        self._order = np.take_along_axis(by_error, by_size, 1)
        self._sizes = np.take_along_axis(sizes, self._order, 1)
        self._errors = np.take_along_axis(errors, self._order, 1)
        self._drop_useless()

    def _drop_useless(self) -> None:
        """Put out of reach what is dominated, or too bad even when all other tensors are at their best."""
        errors = self._errors
        if not errors.size:
            return
        before = np.minimum.accumulate(errors, axis=1)[:, :-1]
        useless = np.zeros(errors.shape, dtype=bool)
        useless[:, 1:] = errors[:, 1:] >= before
        least = errors.min(axis=1)
        slack = self._budget - _sum(least)
        if slack >= 0:
            useless |= errors - least[:, None] > slack + _SAME * self._budget
        self._errors = np.where(useless, np.inf, errors)
        self._sizes = np.where(useless, np.inf, self._sizes)

    def solve(self, baseline: int) -> _Found:
        root = self._relax()
        if root is None:
            least = np.argmin(self._errors, axis=1)
            return self._found(least, self._bytes(least), "least error")
        choices, bound, method = root.choices, root.bound, "lagrange"
        if self._bytes(choices) > (1 + GAP) * bound:
            choices, bound = self._branch(root)
        if self._bytes(choices) > (1 + GAP) * bound:
            buckets = max(10_000, 100 * len(self._rows))
            exact = dynamic_programme(self._sizes, discretise(self._errors, self._budget, buckets), buckets)
            if exact is not None and self._error(exact) <= self._budget:
                exact = self._fill(exact)
                if self._bytes(exact) < self._bytes(choices):
                    choices, method = exact, "dynamic programme"
        sizes, errors = (table[:, baseline] for table in self._full)
        if _sum(sizes) < self._bytes(choices) and _sum(errors) <= self._budget:
            whole = np.full(len(self._rows), baseline, dtype=np.int64)
            return _Found(whole, sizes, errors, bound, "uniform")
        return self._found(choices, bound, method)

    def _relax(self) -> "_Node | None":
        """Bound this problem and round its relaxation to choices; None when nothing meets the budget."""
        cheapest, least = np.argmin(self._sizes, axis=1), np.argmin(self._errors, axis=1)
        if self._error(cheapest) <= self._budget:
            return _Node(self, cheapest, self._bytes(cheapest), None)
        if self._error(least) > self._budget:
            return None
        over, under, bound = self._search(cheapest, least)
        choices = min(self._fill(under), self._repair(over), key=self._bytes)
        gaps = np.abs(self._sizes[self._rows, over] - self._sizes[self._rows, under])
        row = int(np.argmax(gaps))
        return _Node(self, choices, bound, (row, min(int(over[row]), int(under[row]))))

    def _branch(self, root: "_Node") -> tuple[Ints, float]:
        """Better choices and a better bound: split the tensor that the relaxation could not decide, worst bound first.

        A few large tensors, between whose candidates the budget's end falls, are what keeps the two apart.
        """
        choices, bound = root.choices, root.bound
        nodes = [root]
        for _ in range(_MAX_BRANCHES):
            node = nodes.pop(min(range(len(nodes)), key=lambda index: nodes[index].bound))
            if node.split is None:  # its choices are its optimum
                nodes.append(node)
                break
            for child in node.problem._split(*node.split):
                solved = child._relax()
                if solved is None:
                    continue
                solved = replace(solved, bound=max(solved.bound, node.bound))
                if self._bytes(solved.choices) < self._bytes(choices):
                    choices = solved.choices
                nodes.append(solved)
            bound = min((node.bound for node in nodes), default=self._bytes(choices))
            if not nodes or self._bytes(choices) <= (1 + GAP) * bound:
                break
        return choices, bound

    def _split(self, row: int, column: int) -> "list[_Problem]":
        """The two halves of the problem: the tensor's candidates up to `column`, and those after it."""
        halves = []
        for lost in (slice(column + 1, None), slice(0, column + 1)):
            half = copy(self)
            half._sizes, half._errors = self._sizes.copy(), self._errors.copy()
            half._sizes[row, lost] = half._errors[row, lost] = np.inf
            if np.isfinite(half._sizes[row]).any():
                halves.append(half)
        return halves

    def _search(self, over: Ints, under: Ints) -> tuple[Ints, Ints, float]:
        """The best multiplier between two choices, one over the budget and one under it; the bound it proves.

        The dual function is concave and made of lines, one for each choice. The next multiplier is where the lines of
        the two choices cross; when no choice lies below the crossing, it is the maximum.
        """
        bound = 0.0
        lower, upper = 0.0, math.inf
        for step in range(_MAX_STEPS):
            gain = self._bytes(under) - self._bytes(over)
            crossing = gain / (self._error(over) - self._error(under))
            if not 0 < crossing < math.inf:  # of a difference that is rounding
                break
            trial = crossing
            # Crossings alone may creep along; every third step halves what is left, on a logarithmic scale.
            if step % 3 == 2 and lower > 0 and upper < math.inf and upper > 2 * lower:
                trial = math.sqrt(lower * upper)
            choices = np.argmin(self._sizes + trial * self._errors, axis=1)
            error, cost = self._error(choices), self._bytes(choices)
            value = cost + trial * (error - self._budget)
            bound = max(bound, value)
            line = self._bytes(over) + trial * (self._error(over) - self._budget)
            if trial == crossing and value >= line - _SAME * abs(line):
                break
            if error > self._budget:
                over, lower = choices, trial
            else:
                under, upper = choices, trial
        return over, under, bound

    def _fill(self, choices: Ints) -> Ints:
        """Spend what is left of the budget on single moves, the one that saves most first."""
        choices = choices.copy()
        while True:
            slack = self._budget - self._error(choices)
            saved, added = self._moves(choices)
            saved = np.where(added <= slack, saved, -np.inf)
            best = float(saved.max())
            if best <= 0:
                return choices
            # Of those that save as much, the one that adds least.
            row, column = divmod(int(np.argmin(np.where(saved == best, added, np.inf))), saved.shape[1])
            previous, choices[row] = choices[row], column
            if self._error(choices) > self._budget:  # rounding
                choices[row] = previous
                return choices

    def _repair(self, choices: Ints) -> Ints:
        """Bring choices that are over the budget under it by single moves, each the cheapest cure."""
        choices = choices.copy()
        while (excess := self._error(choices) - self._budget) > 0:
            saved, added = self._moves(choices)
            cures = added <= -excess
            if cures.any():
                move = int(np.argmin(np.where(cures, -saved, np.inf)))
            else:
                # Bytes for each unit of error that it takes away.
                worth = np.where(added < 0, -saved / np.where(added < 0, -added, 1.0), np.inf)
                move = int(np.argmin(worth))
            row, column = divmod(move, saved.shape[1])
            if not added[row, column] < 0:
                return self._fill(np.argmin(self._errors, axis=1))
            choices[row] = column
        return self._fill(choices)

    def _moves(self, choices: Ints) -> tuple[Floats, Floats]:
        """What each single move saves in bytes and adds in error; -inf and inf for those out of reach."""
        saved = self._sizes[self._rows, choices][:, None] - self._sizes
        return saved, self._errors - self._errors[self._rows, choices][:, None]

    def _bytes(self, choices: Ints) -> float:
        return _sum(self._sizes[self._rows, choices])

    def _error(self, choices: Ints) -> float:
        return _sum(self._errors[self._rows, choices])

    def _found(self, choices: Ints, bound: float, method: str) -> _Found:
        mine = self._order[self._rows, choices]
        return _Found(mine, self._full[0][self._rows, mine], self._full[1][self._rows, mine], bound, method)


def _check_tables(sizes: ArrayLike, errors: ArrayLike, names: Sequence[str] | None) -> tuple[Floats, Floats]:
    tables = [np.asarray(table, dtype=np.float64) for table in (sizes, errors)]
    shape = tables[0].shape
    if len(shape) != 2 or shape[1] == 0 or tables[1].shape != shape:
        raise ValueError(f"tables must be tensors x candidates, alike: sizes {shape}, errors {tables[1].shape}")
    if names is not None and len(names) != shape[0]:
        raise ValueError(f"{len(names)} names for {shape[0]} tensors")
    for what, table in zip(("size", "error"), tables, strict=True):
        wrong = ~np.isfinite(table) | (table < 0)
        if what == "size":
            wrong |= table != np.floor(table)
        if wrong.any():
            row, column = (int(index) for index in np.argwhere(wrong)[0])
            name = repr(names[row]) if names is not None else str(row)
            raise ValueError(f"{what} of tensor {name} at candidate {column} is {table[row, column]}")
    return tables[0], tables[1]


def _sum(values: Floats) -> float:
    """Exactly rounded: of the order of the values and of the machine's vector width nothing remains."""
    return math.fsum(values.tolist())


def _ldexp(value: float, exponent: int) -> float:
    with np.errstate(over="ignore"):
        return float(np.ldexp(value, exponent))
