"""A checkpoint is whole or refused by name; whatever happens to a writer, the one before stays."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from swarmkit import checkpoint
from swarmkit.errors import CheckpointError

TENSORS = {
    "model.weight": torch.arange(12.0).reshape(3, 4).t(),
    "model.half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "count": torch.tensor(3),
    "empty": torch.empty(0, 5),
}


def save(folder: Path, step: int, *, keep: int = 3) -> Path:
    return checkpoint.save(folder, TENSORS, {"step": step, "round": step // 10, "digest": "d"}, keep=keep)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path, 40)
    tensors, meta = checkpoint.load(path)
    assert path.name == "step-00000040"
    assert meta == {"step": 40, "round": 4, "digest": "d"}
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name].nan_to_num(), tensor.nan_to_num())
    assert checkpoint.describe(path)["tensors"] == 4


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpoint.save(tmp_path, TENSORS, {"step": 1, "digest": "new"}, keep=3)
    assert checkpoint.verify(checkpoint.latest(tmp_path))["digest"] == "new"
    for keep in (2, 1, 2, 1):
        for i in range(6):
            checkpoint.save(tmp_path, TENSORS, {"step": 1, "digest": f"{keep}/{i}"}, keep=keep)
            assert checkpoint.verify(checkpoint.latest(tmp_path))["digest"] == f"{keep}/{i}"
    assert len(list(tmp_path.iterdir())) == 1


def test_saving_a_step_again_never_removes_the_first_before_the_second_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def killed(source: Path, target: Path) -> Path:
        assert checkpoint.latest(tmp_path).is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, TENSORS, {"step": 1}, keep=1)
    assert checkpoint.verify(checkpoint.latest(tmp_path))["step"] == 1


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, empty, flip, Path.unlink])
@pytest.mark.parametrize("file", [checkpoint.MANIFEST, checkpoint.TENSORS])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(
    tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    damage(newer / file)
    with pytest.raises(CheckpointError, match=file):
        checkpoint.load(newer)
    with pytest.warns(UserWarning, match=file):
        assert checkpoint.latest(tmp_path) == older


@pytest.mark.parametrize("position", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_flipped_bit_anywhere_in_the_manifest_is_noticed(tmp_path: Path, position: float) -> None:
    manifest = save(tmp_path, 1) / checkpoint.MANIFEST
    content = bytearray(manifest.read_bytes())
    content[int(position * len(content))] ^= 1
    manifest.write_bytes(content)
    with pytest.raises(CheckpointError, match=checkpoint.MANIFEST):
        checkpoint.load(manifest.parent)


def test_a_folder_without_a_whole_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.latest(tmp_path)
    truncate(save(tmp_path, 1) / checkpoint.TENSORS)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        checkpoint.latest(tmp_path)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for step in (10, 200, 30, 1000):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000200", "step-00001000"]


def test_the_last_whole_checkpoint_is_never_removed(tmp_path: Path) -> None:
    good = save(tmp_path, 1, keep=1)
    for step in (5, 6):
        save(tmp_path, step, keep=10)
        truncate(tmp_path / f"step-{step:08d}" / checkpoint.TENSORS)
    # After a resume from step 1 the run passes its damaged later steps again, from below.
    written = save(tmp_path, 2, keep=1)
    assert written.is_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert checkpoint.latest(tmp_path) in (good, written)


def test_older_checkpoints_survive_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = save(tmp_path, 1, keep=1)

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, keep=1)
    assert list(tmp_path.iterdir()) == [older]
    assert checkpoint.latest(tmp_path) == older


def test_a_file_that_cannot_be_written_whole_is_an_os_error_and_leaves_no_trace(tmp_path: Path) -> None:
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpoint.save(tmp_path, {"a": torch.zeros(1 << 16)}, {"step": 2}, keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_older_checkpoints_survive_a_failing_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    older = save(tmp_path, 1, keep=1)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(*((os, "fsync", fail) if call == "fsync" else (Path, "rename", fail)))
    with pytest.raises(OSError, match="Input/output"):
        save(tmp_path, 2, keep=1)
    assert list(tmp_path.iterdir()) == [older]


WRITER = """
import sys, torch
from pathlib import Path
from swarmkit import checkpoint
tensors = {f"t{i}": torch.full((50_000,), float(i)) for i in range(8)}
step = int(sys.argv[2])
while True:
    step += 1
    checkpoint.save(Path(sys.argv[1]), tensors, {"step": step}, keep=2)
    print(step, flush=True)
"""


def test_kill_9_of_a_writer_always_leaves_a_loadable_newest_checkpoint(tmp_path: Path) -> None:
    chance, step = random.Random(0), 0
    for _ in range(4):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(step)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            announced = int(writer.stdout.readline())
            # Anywhere within the next few checkpoints: what is tested is that the moment does not matter.
            time.sleep(chance.uniform(0.0, 0.1))
            writer.send_signal(signal.SIGKILL)
            announced = max([announced, *(int(line) for line in writer.stdout if line.endswith("\n"))])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what is there is whole: nothing is skipped
            found = checkpoint.latest(tmp_path)
        tensors, meta = checkpoint.load(found)
        step = meta["step"]
        assert step >= announced
        assert all(bool((tensors[f"t{i}"] == i).all()) for i in range(8))
    save(tmp_path, step + 1)
    assert not list(tmp_path.glob(".*")), "a later writer removes what a killed one left"


# -- checkpoints from strangers ----------------------------------------------------------------------------------------


def forge(path: Path, files: dict[str, str]) -> None:
    manifest = {"format": checkpoint.FORMAT, "files": files, "meta": {"step": 1}}
    manifest["checksum"] = checkpoint._manifest_checksum(manifest)
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a/../../secret", ""])
def test_a_file_outside_the_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    (tmp_path / "secret").write_text("secret")
    files = json.loads((path / checkpoint.MANIFEST).read_text())["files"]
    forge(path, {**files, name: "0"})
    with pytest.raises(CheckpointError, match=r"outside the checkpoint|missing"):
        checkpoint.load(path)


@pytest.mark.parametrize("file", [checkpoint.TENSORS, checkpoint.MANIFEST])
def test_a_symlink_is_refused(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, 1)
    shutil.move(path / file, tmp_path / "elsewhere")
    (path / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=file):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "3", '{"files": 3}', '{"files": {}, "meta": {}}', "\xff", "[" * 20_000],
    ids=["list", "null", "number", "files", "no checksum", "not UTF-8", "deep"],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, 1)
    (path / checkpoint.MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=checkpoint.MANIFEST):
        checkpoint.load(path)


def test_tensors_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / checkpoint.TENSORS).write_bytes(b"\xff" * 64)
    forge(path, {checkpoint.TENSORS: checkpoint._sha256(path / checkpoint.TENSORS)})
    with pytest.raises(CheckpointError, match=checkpoint.TENSORS):
        checkpoint.load(path)


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(CheckpointError, match="has format 1, this version reads 2"):
        checkpoint.load(path)
