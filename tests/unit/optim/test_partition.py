"""How a model is cut into fragments: all of it, once, the same everywhere, and as evenly as its layers allow."""

import logging
import os
import subprocess
import sys
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkit.optim import DiLoCo, parameter_names
from swarmkit.optim.partition import partition
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import sgd

GPT = ["embed.weight"] + [f"blocks.{i}.{part}.weight" for i in range(6) for part in ("attn", "mlp")] + ["head.weight"]
SIZES = [90] + [30, 50] * 6 + [70]
BY = st.sampled_from(["strided", "layer"])


def groups(count: int, by: Any, sizes: list[int] = SIZES) -> list[set[str]]:
    names = [name.removesuffix(".weight").removesuffix(".attn").removesuffix(".mlp") for name in GPT]
    return [{names[i] for i in group} for group in partition(GPT, sizes, count, by)]


def test_strided_fragments_have_early_and_late_blocks_and_layers_stay_together() -> None:
    assert groups(3, "strided") == [
        {"embed", "blocks.4"},
        {"blocks.0", "blocks.2", "blocks.5"},
        {"blocks.1", "blocks.3", "head"},
    ]
    assert groups(3, "layer") == [
        {"embed", "blocks.0"},
        {"blocks.1", "blocks.2", "blocks.3"},
        {"blocks.4", "blocks.5", "head"},
    ]


def test_layers_above_an_even_share_have_fragments_to_themselves() -> None:
    vocabulary = [600] + [30, 50] * 6 + [600]
    assert groups(4, "strided", vocabulary) == [
        {"embed"},
        {"head"},
        {"blocks.0", "blocks.2", "blocks.4"},
        {"blocks.1", "blocks.3", "blocks.5"},
    ]
    assert groups(4, "layer", vocabulary) == [
        {"embed"},
        {"blocks.0", "blocks.1", "blocks.2"},
        {"blocks.3", "blocks.4", "blocks.5"},
        {"head"},
    ]


@st.composite
def models(draw: st.DrawFn) -> tuple[list[str], list[int]]:
    """Layers of up to three parameters, numbered or not, in any order, some of them empty or very large."""
    names: list[str] = []
    for i, kind in enumerate(draw(st.lists(st.sampled_from(["blocks.", "other"]), min_size=1, max_size=10))):
        names += [f"{kind}{i}.{'abc'[j]}" for j in range(draw(st.integers(1, 3)))]
    each = st.one_of(st.integers(0, 100), st.sampled_from([0, 10, 10_000]))
    return names, draw(st.lists(each, min_size=len(names), max_size=len(names)))


@settings(max_examples=300, deadline=None)
@given(models(), st.integers(1, 12), BY)
def test_every_parameter_is_in_one_fragment_and_the_largest_keeps_to_its_bound(
    model: tuple[list[str], list[int]], count: int, by: Any
) -> None:
    names, sizes = model
    layers = {name.rpartition(".")[0] for name in names}
    if count > len(layers):
        with pytest.raises(ValueError, match="layers"):
            partition(names, sizes, count, by)
        return
    found = partition(names, sizes, count, by)
    assert len(found) == count
    assert all(found)
    assert sorted(i for group in found for i in group) == list(range(len(sizes)))
    owners = {names[i].rpartition(".")[0]: number for number, group in enumerate(found) for i in group}
    assert all(owners[names[i].rpartition(".")[0]] == number for number, group in enumerate(found) for i in group)
    of_layer = [sum(size for name, size in zip(names, sizes, strict=True) if name.startswith(f"{x}.")) for x in layers]
    total, largest = sum(sizes), max(of_layer)
    most = max(sum(sizes[i] for i in group) for group in found)
    assert count * most <= total + (count - 1) * largest
    if by == "strided":
        assert most <= max(largest, 2 * total / count)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_no_cut_into_runs_has_a_smaller_largest_one(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    names = [f"part{i}" for i in range(len(sizes))]
    found = partition(names, sizes, count, "layer")
    assert [i for group in found for i in group] == list(range(len(sizes)))
    best = min(
        max(sum(sizes[a:b]) for a, b in zip((0, *cuts), (*cuts, len(sizes)), strict=True))
        for cuts in combinations(range(1, len(sizes)), count - 1)
    )
    assert max(sum(sizes[i] for i in group) for group in found) == best


def test_all_peers_derive_the_same_fragments() -> None:
    def parts(collective: LocalCollective, rank: int) -> list[list[str]]:
        net = torch.nn.ModuleDict({f"layer{i}": torch.nn.Linear(3, 1 + i % 3) for i in range(9)})
        optimizer = DiLoCo(sgd(list(net.parameters())), collective=collective, names=parameter_names(net), fragments=4)
        return [fragment.part.names for fragment in optimizer._fragments]

    first, *others = LocalSwarm(3).run(parts)
    assert others == [first] * 2
    script = (
        "from swarmkit.optim.partition import partition\n"
        f"print([partition({GPT}, {SIZES}, 4, by) for by in ('strided', 'layer')])"
    )
    here = [partition(GPT, SIZES, 4, "strided"), partition(GPT, SIZES, 4, "layer")]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == str(here)


class Vocabulary(torch.nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(words, 4)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(6))


@pytest.mark.parametrize(("words", "percent"), [(4, None), (24, 50)])
def test_a_layer_that_keeps_up_the_peak_is_told_of(
    words: int, percent: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    net = Vocabulary(words)
    collective = LocalSwarm(1).collectives[0]
    with caplog.at_level(logging.WARNING):
        optimizer = DiLoCo(sgd(list(net.parameters())), collective=collective, names=parameter_names(net), fragments=3)
    assert sum(optimizer.fragment_shares) == pytest.approx(1)
    assert max(optimizer.fragment_shares) == pytest.approx(3 / 7 if percent is None else percent / 100)
    told = f"the largest has {percent} % of the model, because layer 'embed'"
    assert [told in record.getMessage() for record in caplog.records] == ([] if percent is None else [True])
