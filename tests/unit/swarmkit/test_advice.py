"""Configurations that work but disappoint get a note, others none."""

import pytest
import torch

from swarmkit.advice import notes, settling_limit
from swarmkit.compose import load_config
from swarmkit.optim import DiLoCo, Every
from swarmkit.optim.diloco import Eager
from swarmkit.peers.local import LocalCollective, LocalSwarm


def test_diloco_with_few_rounds_is_told_what_to_do() -> None:
    [note] = notes(load_config(["strategy=diloco", "steps=320", "strategy.sync.h=32"]))
    assert "10 rounds" in note
    assert "strategy=local_sgd" in note


def test_what_is_fine_gets_no_note() -> None:
    assert not list(notes(load_config([])))
    assert not list(notes(load_config(["strategy=diloco", "steps=4000", "strategy.sync.h=32"])))


def distance_after(rounds: int, *, outer_lr: float, momentum: float, peers: int, eager: Eager, nesterov: bool) -> float:
    """How far from the minimum the anchor is, from 1, when a window goes all the way there."""

    def replica(collective: LocalCollective, rank: int) -> float:
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = DiLoCo(
            torch.optim.SGD([parameter], lr=1.0),
            collective=collective,
            sync=Every(1),
            outer_lr=outer_lr,
            outer_momentum=momentum,
            nesterov=nesterov,
            eager=eager,
        )
        for _ in range(rounds):
            parameter.grad = parameter.detach().clone()
            optimizer.step()
        (anchor,) = optimizer.anchor().values()
        return float(anchor.abs().max())

    return max(LocalSwarm(peers).run(replica))


@pytest.mark.parametrize(
    ("momentum", "peers", "eager", "nesterov"),
    [(0.0, 4, True, True), (0.5, 2, True, True), (0.9, 2, True, True), (0.9, 4, True, True), (0.9, 1, "delayed", True)]
    + [(0.5, 2, True, False), (0.9, 2, True, False)],
)
def test_outer_steps_settle_below_the_limit_and_not_above(
    momentum: float, peers: int, eager: Eager, nesterov: bool
) -> None:
    limit = settling_limit(momentum, share=1 / peers if eager is True else 0.0, nesterov=nesterov)
    options = {"momentum": momentum, "peers": peers, "eager": eager, "nesterov": nesterov}
    assert distance_after(200, outer_lr=0.6 * limit, **options) < 0.1  # type: ignore[arg-type]
    assert distance_after(200, outer_lr=1.4 * limit, **options) > 10  # type: ignore[arg-type]


def test_the_limit_falls_with_the_share_that_is_fresh() -> None:
    limits = [settling_limit(0.9, share=share) for share in (1, 1 / 2, 1 / 4, 1 / 8, 0)]
    assert limits == pytest.approx([1.36, 0.775, 0.415, 0.32, 0.255], abs=0.006)


def test_eager_with_an_outer_step_that_swings_is_told_what_to_do() -> None:
    common = ["strategy=diloco", "steps=4000", "strategy.eager=true", "strategy.outer_momentum=0.9", "peers=4"]
    [note] = notes(load_config([*common, "strategy.outer_lr=0.4"]))
    assert "from 0.42 never settle" in note
    assert "outer_momentum=0, or an outer_lr below 0.29" in note
    assert not list(notes(load_config([*common, "strategy.outer_lr=0.2"])))
    assert not list(notes(load_config([*common, "strategy.outer_lr=0.7", "strategy.outer_momentum=0"])))
