"""How a model is cut into fragments: layers dealt out by size, or runs of neighbouring layers (arXiv 2501.18512)."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

FragmentBy = Literal["strided", "layer"]


def partition(names: Sequence[str], sizes: Sequence[int], count: int, by: FragmentBy) -> list[list[int]]:
    """Positions of the parameters of each of `count` fragments, each position once and in order.

    The parameters of one layer stay together: a layer is what shares a name up to its number ("blocks.3."), or else the
    module. "strided" deals the layers out, the largest first, each to the smallest fragment: blocks of one size go
    round in turn, so that every fragment has early and late ones, and a layer above a `count`-th of the model has a
    fragment to itself. "layer" cuts the layers as they come into runs, of which the largest is as small as can be.

    No fragment is larger than (total + (count - 1) * largest layer) / count (Graham 1969; Pinar and Aykanat 2004), nor
    with "strided" than both the largest layer and 2 / `count` of the total. Raises ValueError when there are fewer
    layers than fragments.
    """
    if by not in ("strided", "layer"):
        raise ValueError(f"fragment_by={by!r}: must be strided or layer")
    layers: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        layers.setdefault(layer_of(name), []).append(i)
    if len(layers) < count:
        raise ValueError(f"fragments={count}: the model has only {len(layers)} layers")
    weights = {layer: sum(sizes[i] for i in positions) for layer, positions in layers.items()}
    deal = _deal if by == "strided" else _cut
    return [sorted(i for layer in group for i in layers[layer]) for group in deal(weights, count)]


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return name.rpartition(".")[0] or name


def _deal(weights: dict[str, int], count: int) -> list[list[str]]:
    groups: list[list[str]] = [[] for _ in range(count)]
    held = [0] * count
    for layer in sorted(weights, key=lambda found: -weights[found]):  # of equal ones, the earlier first
        # An empty fragment first, whatever the sizes: each must have something to send.
        smallest = min(range(count), key=lambda p: (bool(groups[p]), held[p], p))
        groups[smallest].append(layer)
        held[smallest] += weights[layer]
    return groups


def _cut(weights: dict[str, int], count: int) -> list[list[str]]:
    """Runs whose largest is as small as can be, and of these the most even: those with the least sum of squares."""
    layers, sizes = list(weights), list(weights.values())
    limit = bisect_left(
        range(sum(sizes)), True, lo=max(sizes, default=0), key=lambda most: _num_runs(sizes, most) <= count
    )
    start_of = list(accumulate(sizes, initial=0))
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}  # by layers used: sum of squares, where runs end
    for run in range(count):
        longer: dict[int, tuple[int, list[int]]] = {}
        for start, (squares, ends) in best.items():
            for end in range(start + 1, len(layers) - (count - run - 1) + 1):  # one layer for each run that is left
                size = start_of[end] - start_of[start]
                if size > limit:
                    break
                found = squares + size**2, [*ends, end]
                longer[end] = min(found, longer.get(end, found))
        best = longer
    ends = best[len(layers)][1]
    return [layers[start:end] for start, end in pairwise([0, *ends])]


def _num_runs(sizes: Sequence[int], most: int) -> int:
    """The fewest runs of at most that size each, where no single one is larger."""
    runs, held = 1, 0
    for size in sizes:
        held += size
        if held > most:
            runs, held = runs + 1, size
    return runs
