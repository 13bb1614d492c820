"""Which checkpoint each peer begins from."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from swarmkit import checkpoint
from swarmkit.compose import load_config
from swarmkit.compression import CompressionConfig, Int4Config, LGreCoConfig, TopKConfig
from swarmkit.config import Config, config_to_json
from swarmkit.errors import CheckpointError
from swarmkit.inner import SGDConfig
from swarmkit.models.config import GPTConfig
from swarmkit.resume import check_fit, find_checkpoints, plan_resume
from swarmkit.resume_fit import as_override
from swarmkit.strategy import AllReduceConfig, CO2Config, DiLoCoConfig, FragmentBy, LocalSGDConfig, SyncConfig


def save(
    run: Path, peer: str, step: int, *, round: int = 0, digest: str = "same", config: Config | None = None
) -> Path:
    meta: dict[str, object] = {} if config is None else {"config": config_to_json(config)}
    meta |= {"step": step, "round": round or step // 10, "digest": digest}
    return checkpoint.save(run / peer / "checkpoints", {"w": torch.zeros(2)}, meta, keep=9)


def test_each_peer_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    paths = [save(tmp_path, f"peer-{k}", 20) for k in range(12)]
    plan = plan_resume(tmp_path)
    assert (plan.exactly, plan.step) == (True, 20)
    assert [plan.for_peer(k) for k in range(12)] == [(path, True) for path in paths]


def test_a_peer_more_than_there_were_begins_from_what_is_shared(tmp_path: Path) -> None:
    first = save(tmp_path, "peer-0", 20)
    save(tmp_path, "peer-1", 20)
    assert plan_resume(tmp_path).for_peer(2) == (first, False)


def test_the_newest_moment_that_all_have_is_taken(tmp_path: Path) -> None:
    for peer, steps in (("peer-0", (10, 20, 30)), ("peer-1", (10, 20))):
        for step in steps:
            save(tmp_path, peer, step)
    assert plan_resume(tmp_path).step == 20


def test_without_a_common_moment_all_begin_from_the_newest(tmp_path: Path) -> None:
    save(tmp_path, "peer-0", 17, round=2)
    newest = save(tmp_path, "peer-1", 19, round=2)
    plan = plan_resume(tmp_path)
    assert not plan.exactly
    assert plan.for_peer(0) == plan.for_peer(1) == (newest, False)


def test_peers_that_had_diverged_do_not_go_on_as_if_they_agreed(tmp_path: Path) -> None:
    save(tmp_path, "peer-0", 20, digest="one")
    save(tmp_path, "peer-1", 20, digest="other")
    assert not plan_resume(tmp_path).exactly


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path: Path) -> None:
    for peer in ("peer-0", "peer-1"):
        save(tmp_path, peer, 10)
        newest = save(tmp_path, peer, 20)
    broken = next(newest.glob("*.safetensors"))
    broken.write_bytes(broken.read_bytes()[:-1] + b"x")
    with pytest.warns(UserWarning, match="peer-1/checkpoints/step-00000020"):
        assert plan_resume(tmp_path).step == 10


def test_the_baseline_is_not_a_peer(tmp_path: Path) -> None:
    save(tmp_path, "peer-0", 10)
    save(tmp_path, "baseline", 40)
    assert plan_resume(tmp_path).step == 10


def test_a_checkpoint_itself_and_its_folders_are_found(tmp_path: Path) -> None:
    path = save(tmp_path, "peer-0", 10)
    for place in (path, path.parent, path.parent.parent, tmp_path):
        assert [found.path for found in find_checkpoints(place)] == [path]


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no whole checkpoint"):
        plan_resume(tmp_path)


def test_a_checkpoint_of_another_model_or_strategy_is_refused_with_what_to_repeat(tmp_path: Path) -> None:
    path = save(tmp_path, "peer-0", 20, config=Config(model=GPTConfig(layers=2, dim=64)))
    check_fit(path, Config(model=GPTConfig(layers=2, dim=64), strategy=LocalSGDConfig(sync=SyncConfig(h=4))))
    with pytest.raises(CheckpointError, match=r"of another model; repeat its settings: model.layers=2 model.dim=64$"):
        check_fit(path, Config())
    with pytest.raises(CheckpointError, match="of another strategy; repeat its settings: strategy=local_sgd$"):
        check_fit(path, Config(model=GPTConfig(layers=2, dim=64), strategy=AllReduceConfig()))


EAGER = DiLoCoConfig(eager=True, fragments=2, sync=SyncConfig(h=6))
TOP_K = TopKConfig(density=0.05)


def test_the_settings_to_repeat_can_be_pasted(tmp_path: Path) -> None:
    path = save(tmp_path, "peer-0", 20, config=Config(strategy=EAGER))
    with pytest.raises(CheckpointError) as caught:
        check_fit(path, Config(strategy=CO2Config()))
    overrides = str(caught.value).partition("repeat its settings: ")[2].split()
    assert overrides[:2] == ["strategy=diloco", "strategy.sync.h=6"]
    assert not any("rule" in override or "nesterov" in override for override in overrides)
    assert load_config(overrides).strategy == EAGER


@pytest.mark.parametrize(("value", "typed"), [(None, "null"), (True, "true"), ("true", "'true'"), ([1, "a b"], None)])
def test_a_value_is_typed_as_the_command_line_reads_it(value: object, typed: str | None) -> None:
    override = shlex.split(as_override("key", value))[0]
    assert typed is None or override == f"key={typed}"
    assert OverridesParser.create().parse_override(override).value() == value


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"compression": Int4Config()}, "compression=topk (not compression=int4)"),
        ({"compression": CompressionConfig()}, "compression=topk (not compression=none)"),
        (
            {"compression": replace(TOP_K, error_feedback=False)},
            "compression.error_feedback=true (not compression.error_feedback=false)",
        ),
        ({"compression": replace(TOP_K, min_size=0)}, "compression.min_size=1024 (not compression.min_size=0)"),
        (
            {"compression": replace(TOP_K, lgreco=LGreCoConfig(period=3))},
            "compression.lgreco.period=0 (not compression.lgreco.period=3)",
        ),
        ({"strategy": replace(EAGER, fragments=3)}, "strategy.fragments=2 (not strategy.fragments=3)"),
        (
            {"strategy": replace(EAGER, fragment_by=FragmentBy.layer)},
            "strategy.fragment_by=strided (not strategy.fragment_by=layer)",
        ),
        ({"strategy": replace(EAGER, eager=False)}, "strategy.eager=true (not strategy.eager=false)"),
        ({"optimizer": SGDConfig()}, "optimizer=adamw (not optimizer=sgd)"),
    ],
)
def test_what_the_saved_state_depends_on_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    saved = Config(strategy=EAGER, compression=TOP_K)
    path = save(tmp_path, "peer-0", 20, config=saved)
    with pytest.raises(CheckpointError) as caught:
        check_fit(path, replace(saved, **changes))
    assert str(caught.value) == f"resume={path}: its optimizer state needs {named}"


def test_what_the_saved_state_does_not_depend_on_may_change(tmp_path: Path) -> None:
    saved = Config(strategy=EAGER, compression=TOP_K)
    path = save(tmp_path, "peer-0", 20, config=saved)
    check_fit(path, replace(saved, strategy=replace(EAGER, outer_lr=0.4, sync=SyncConfig(h=9))))
    check_fit(path, replace(saved, compression=replace(TOP_K, density=0.1, error_feedback=True)))
    check_fit(path, replace(saved, steps=500, batch_size=4, peers=3))


def test_a_checkpoint_without_a_configuration_fits(tmp_path: Path) -> None:
    check_fit(save(tmp_path, "peer-0", 20), Config(compression=TOP_K))


def test_a_run_that_has_ended_is_not_resumed_without_more_steps(tmp_path: Path) -> None:
    path = save(tmp_path, "peer-0", 240, config=Config())
    check_fit(path, Config(steps=241))
    with pytest.raises(CheckpointError, match="at step 240 and training ends at steps=240; raise steps"):
        check_fit(path, Config(steps=240))


def test_a_folder_that_does_not_exist_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        plan_resume(tmp_path / "nowhere")
