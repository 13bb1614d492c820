"""Defaults are the same in scripts and runs, and settings that were measured to fail are refused."""

import dataclasses
import inspect
from enum import Enum

import pytest
import torch

from swarmkit.advice import settling_limit
from swarmkit.compose import load_config
from swarmkit.errors import ConfigError
from swarmkit.optim import CO2, AllReduce, DeMo, DiLoCo, Every, LocalSGD
from swarmkit.peers.local import LocalSwarm
from swarmkit.strategy import (
    AllReduceConfig,
    CO2Config,
    DeMoConfig,
    DiLoCoConfig,
    LocalSGDConfig,
    StrategyConfig,
)

RESOLVED = {DiLoCo: "outer_momentum"}  # follows from another setting


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        (AllReduceConfig, AllReduce),
        (LocalSGDConfig, LocalSGD),
        (DiLoCoConfig, DiLoCo),
        (CO2Config, CO2),
        (DeMoConfig, DeMo),
    ],
)
def test_settings_and_classes_have_the_same_defaults(config: type[StrategyConfig], strategy: type[object]) -> None:
    """A script gets what a run gets: the defaults that were measured."""
    chosen = dataclasses.asdict(config())
    parameters = inspect.signature(strategy.__init__).parameters  # type: ignore[misc]
    for name, parameter in parameters.items():
        if (
            name not in chosen
            or name in ("sync", RESOLVED.get(strategy))
            or parameter.default is inspect.Parameter.empty
        ):
            continue
        ours = chosen[name].name if isinstance(chosen[name], Enum) else chosen[name]
        theirs = chosen["overlap"] if name == "keep_local" and parameter.default is None else parameter.default
        assert ours == theirs, name


@pytest.mark.parametrize("eager", [False, True, "delayed"])
@pytest.mark.parametrize("members", [1, 2, 4, 8, 64])
def test_the_default_outer_step_settles_among_any_number_of_peers(eager: bool | str, members: int) -> None:
    chosen = DiLoCoConfig(eager=eager)
    parameter = torch.nn.Parameter(torch.zeros(2))
    inner = torch.optim.SGD([parameter], lr=0.1)
    ours = DiLoCo(inner, collective=LocalSwarm(1).collectives[0], sync=Every(4), eager=eager)  # type: ignore[arg-type]
    assert (ours.outer_lr, ours.outer_momentum) == (chosen.outer_lr, chosen.outer_momentum)
    fresh = 1.0 if not eager else 0.0 if eager == "delayed" else 1 / members
    assert ours.outer_lr < settling_limit(ours.outer_momentum, share=fresh)


@pytest.mark.parametrize(
    "overrides",
    [["compression=ternary"], ["compression=qsgd", "compression.norm=l2"], ["compression=qsgd", "compression.bits=2"]],
)
def test_feedback_of_noise_above_the_signal_is_refused(overrides: list[str]) -> None:
    load_config(overrides)
    with pytest.raises(ConfigError, match="grows without end"):
        load_config([*overrides, "compression.error_feedback=true"])


def test_more_fragments_than_the_smallest_window_has_steps_are_refused_under_qsr() -> None:
    qsr = ["strategy=diloco", "strategy.sync.rule=qsr", "strategy.sync.alpha=0.1", "strategy.sync.h=4"]
    load_config([*qsr, "strategy.fragments=4"])
    with pytest.raises(ConfigError, match=r"strategy\.fragments=8"):
        load_config([*qsr, "strategy.fragments=8"])
