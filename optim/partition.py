"""How a model is cut into fragments: layers dealt out in turn, or runs of neighbouring layers (arXiv 2501.18512)."""

from collections.abc import Sequence
from typing import Literal

FragmentBy = Literal["strided", "layer"]


def partition(names: Sequence[str], sizes: Sequence[int], count: int, by: FragmentBy) -> list[list[int]]:
    """Positions of the parameters of each of `count` fragments, each position once and in order.

    The parameters of one layer stay together: a layer is what shares a name up to its number ("blocks.3."), or else the
    module. "strided" deals the numbered layers out in turn, so that every fragment has early and late ones, and gives
    the others (embeddings, head), largest first, to the smallest fragment; "layer" cuts the layers as they come into
    runs of about equal size. Raises ValueError when there are fewer layers than fragments.
    """
    if by not in ("strided", "layer"):
        raise ValueError(f"fragment_by={by!r}: must be strided or layer")
    layers: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        layers.setdefault(_layer(name), []).append(i)
    if len(layers) < count:
        raise ValueError(f"fragments={count}: the model has only {len(layers)} layers")
    weights = {layer: sum(sizes[i] for i in positions) for layer, positions in layers.items()}
    deal = _deal if by == "strided" else _cut
    return [sorted(i for layer in group for i in layers[layer]) for group in deal(weights, count)]


def _layer(name: str) -> str:
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return name.rpartition(".")[0] or name


def _deal(weights: dict[str, int], count: int) -> list[list[str]]:
    groups: list[list[str]] = [[] for _ in range(count)]
    held = [0] * count
    numbered = [layer for layer in weights if layer.rpartition(".")[2].isdigit()]
    for i, layer in enumerate(numbered):
        groups[i % count].append(layer)
        held[i % count] += weights[layer]
    for layer in sorted(set(weights) - set(numbered), key=lambda found: (-weights[found], found)):
        # An empty fragment first, whatever the sizes: each must have something to send.
        smallest = min(range(count), key=lambda p: (bool(groups[p]), held[p], p))
        groups[smallest].append(layer)
        held[smallest] += weights[layer]
    return groups


def _cut(weights: dict[str, int], count: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    total, done = sum(weights.values()), 0
    layers = list(weights)
    for i, layer in enumerate(layers):
        full = done + weights[layer] / 2 > total * len(groups) / count
        must = len(layers) - i <= count - len(groups)  # one layer for each fragment that is left
        if groups[-1] and len(groups) < count and (full or must):
            groups.append([])
        groups[-1].append(layer)
        done += weights[layer]
    return groups
