"""eval and generate find the checkpoint that one means, and say so when there is none."""

from pathlib import Path

import pytest
import torch

from swarmkit import checkpoint
from swarmkit.config import Config, config_to_json
from swarmkit.errors import CheckpointError
from swarmkit.inspect import evaluate_checkpoint, find_checkpoint, generate_text


def save(folder: Path, step: int, **meta: object) -> Path:
    return checkpoint.save(folder, {"x": torch.ones(2)}, {"step": step, **meta}, keep=5)


def test_a_checkpoint_is_found_from_itself_its_folder_its_peer_and_its_run(tmp_path: Path) -> None:
    save(tmp_path / "run" / "peer-0" / "checkpoints", 5)
    newest = save(tmp_path / "run" / "peer-1" / "checkpoints", 20)
    for folder in (newest, newest.parent, newest.parent.parent, tmp_path / "run"):
        assert find_checkpoint(folder) == newest


def test_an_older_checkpoint_can_be_named(tmp_path: Path) -> None:
    older, _ = save(tmp_path, 1), save(tmp_path, 2)
    assert find_checkpoint(older) == older


def test_the_baseline_is_not_the_run(tmp_path: Path) -> None:
    save(tmp_path / "baseline" / "checkpoints", 900)
    of_the_run = save(tmp_path / "peer-0" / "checkpoints", 5)
    assert find_checkpoint(tmp_path) == of_the_run


def test_the_baseline_is_found_when_it_is_meant(tmp_path: Path) -> None:
    found = save(tmp_path / "baseline" / "checkpoints", 900)
    assert find_checkpoint(tmp_path / "baseline") == found


def test_a_damaged_checkpoint_of_one_peer_leads_to_another_one(tmp_path: Path) -> None:
    whole = save(tmp_path / "peer-0" / "checkpoints", 5)
    damaged = save(tmp_path / "peer-1" / "checkpoints", 9)
    (damaged / checkpoint.TENSORS).write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"):
        assert find_checkpoint(tmp_path) == whole


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, "does not say which model"),
        ({"config": "{}", "spec": 3}, "does not say which model"),
        ({"config": config_to_json(Config()), "spec": {}}, "does not say which model"),
        ({"config": config_to_json(Config()), "spec": {"kind": "tokens", "classes": 3, "shape": 3}}, "does not say"),
        (
            {
                "config": config_to_json(Config()),
                "spec": {"kind": "images", "classes": 10, "shape": [8]},
                "aliases": {},
            },
            "not one that",
        ),
    ],
)
def test_a_checkpoint_that_does_not_describe_itself_is_refused(
    tmp_path: Path, meta: dict[str, object], message: str
) -> None:
    save(tmp_path, 1, **meta)
    with pytest.raises(CheckpointError, match=message):
        generate_text(str(tmp_path), prompt="a", tokens=1, temperature=0.0, top_k=1, seed=0)


def test_a_checkpoint_that_does_not_fit_its_configuration_is_refused(tmp_path: Path) -> None:
    spec = {"kind": "tokens", "classes": 256, "shape": [128]}
    save(tmp_path, 1, config=config_to_json(Config()), spec=spec, aliases={})
    with pytest.raises(CheckpointError, match="does not fit its own configuration"):
        generate_text(str(tmp_path), prompt="a", tokens=1, temperature=0.0, top_k=1, seed=0)
    with pytest.raises(CheckpointError, match="--prompt is empty"):
        generate_text(str(tmp_path), prompt="", tokens=1, temperature=0.0, top_k=1, seed=0)
    with pytest.raises(ValueError, match=r"only eval, batch_size can be set here"):
        evaluate_checkpoint(str(tmp_path), ["steps=3"])
