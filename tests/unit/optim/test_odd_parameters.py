"""Frozen, tied, unused, convolutional, 0-d and empty parameters, and offloaded anchors, under every strategy."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from swarmkit.optim import AllReduce, SyncedOptimizer
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.matrix import DEMO, PAYLOADS, STRATEGIES, Coded, Strategy

ALL = STRATEGIES | {"DeMo": DEMO}
CODED = {name: PAYLOADS[name] for name in ("none", "int4", "topk", "topk sharded", "powersgd", "qsgd adaptive")}
every_pair = pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        pytest.param(strategy, codec, id=f"{name}-{code}")
        for name, strategy in ALL.items()
        for code, codec in CODED.items()
        if strategy is not DEMO or codec is None
    ],
)
UNUSED, ABSENT_HERE = "unused", "sometimes"


class Odd(nn.Module):
    """One parameter of every kind."""

    def __init__(self, frozen: int = 6) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.embedding = nn.Embedding(5, 4)
        self.output = nn.Linear(4, 5, bias=False)
        self.output.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(4, 6))
        self.sometimes = nn.Parameter(torch.ones(6, 4))
        self.frozen = nn.Parameter(torch.ones(frozen, 10), requires_grad=False)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _, parameter in self.trainable():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)


def descend(model: Odd, optimizer: SyncedOptimizer, rank: int, steps: int) -> None:
    """Every parameter but the unused one goes to 0, the second replica never sees one of them."""
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * rank + step)
        for name, parameter in model.trainable():
            noise = torch.randn(parameter.shape, generator=generator) / 10
            if name != UNUSED and not (name == ABSENT_HERE and rank == 1):
                parameter.grad = parameter.detach() + noise
        optimizer.step()
    optimizer.finish()


def trained(
    strategy: Strategy, codec: Coded | None, frozen: int = 6, offload: str | None = None
) -> list[tuple[Odd, SyncedOptimizer, int]]:
    """Models and optimizers of two replicas, and the bytes that each has sent."""

    def task(collective: LocalCollective, rank: int) -> tuple[Odd, SyncedOptimizer, int]:
        model = Odd(frozen)
        with torch.no_grad():
            model.frozen.add_(rank)  # would be averaged if it were sent
        optimizer = strategy(list(model.parameters()), collective, codec, **({"offload": offload} if offload else {}))
        sent: list[int] = []
        failures: list[str | None] = []
        optimizer.on_round.append(lambda report: sent.append(report.bytes_sent))
        optimizer.on_round.append(lambda report: failures.append(report.failed))
        descend(model, optimizer, rank, strategy.steps)
        assert set(failures) == {None}
        return model, optimizer, sum(sent)

    return LocalSwarm(2).run(task)


def same_trainable(left: Odd, right: Odd) -> bool:
    pairs = zip(left.trainable(), right.trainable(), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


@every_pair
def test_odd_parameters_train_replicas_agree_and_bytes_follow_what_is_trainable(
    strategy: Strategy, codec: Coded | None
) -> None:
    (left, one, sent), (right, other, other_sent) = trained(strategy, codec)
    assert one.digest() == other.digest()
    assert same_trainable(left, right)
    assert left.output.weight is left.embedding.weight
    assert len(one.anchor()) == 7  # the two names of the tied one are one parameter, the frozen one is none
    before = dict(Odd().named_parameters())
    for name, parameter in left.trainable():
        assert bool(torch.isfinite(parameter).all())
        assert torch.equal(parameter, before[name]) == (name in ("empty", UNUSED)), name
    for rank, model in enumerate((left, right)):
        assert torch.equal(model.frozen, before["frozen"] + rank)
    if codec is None and strategy is not DEMO:
        numbers = sum(parameter.numel() for _, parameter in left.trainable())
        beside = 4 * 7 if strategy.kind is AllReduce else 8  # which have a gradient; CO2's penalty
        turns = math.ceil(one.round / strategy.fragments)
        assert 4 * numbers * (turns - strategy.fragments + 1) <= sent <= (4 * numbers + beside) * turns

    # With a hundred times as much frozen, and the anchor elsewhere: the same bytes and the same bits.
    again = trained(strategy, codec, 600, "cpu")
    assert [more for _, _, more in again] == [sent, other_sent]
    for (model, optimizer, _), here in zip(again, (left, right), strict=True):
        assert same_trainable(model, here)
        assert {tensor.device.type for tensor in optimizer.anchor().values()} == {"cpu"}
