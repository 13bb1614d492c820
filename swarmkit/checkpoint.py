"""Checkpoints: safetensors and a manifest, written whole or not at all, verified before they are used."""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from swarmkit.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
TENSORS = "state.safetensors"
_HASH_CHUNK = 1 << 20
_NAME = re.compile(r"^step-(\d+)(?:-(\d+))?$", re.ASCII)


def save(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, keep: int) -> Path:
    """Write a checkpoint into `folder` and return its path, `folder/step-00001234`.

    `meta` is JSON and has a "step"; the same step once more, after a resume, goes to step-00001234-2. Everything is
    written under a temporary name, flushed to the disk and renamed; when anything goes wrong the temporary files go and
    the older checkpoints stay. Then all but the `keep` newest are removed, never the one just written. Raises OSError
    when the disk is full or read-only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    final = _free_name(folder, int(meta["step"]))
    temporary = folder / f".{final.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir()
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        _write(contiguous, temporary / TENSORS)
        _flush(temporary / TENSORS)
        manifest = {"format": FORMAT, "files": {TENSORS: _sha256(temporary / TENSORS)}, "meta": dict(meta)}
        manifest["checksum"] = _manifest_checksum(manifest)
        (temporary / MANIFEST).write_text(json.dumps(manifest))
        _flush(temporary / MANIFEST)
        _flush(temporary)
        temporary.rename(final)
        _flush(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # What was just written is known to be whole and stays, even below damaged checkpoints of later steps.
    others = [path for path in _candidates(folder) if path != final]
    for old in others[max(0, keep - 1) :]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        safetensors.torch.save_file(tensors, path)
    except safetensors.SafetensorError as error:
        # What the library makes of an error of the disk.
        raise OSError(str(error)) from error


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verify and read one checkpoint; raises CheckpointError naming what is wrong with which file."""
    meta = verify(path)
    try:
        return safetensors.torch.load_file(path / TENSORS), meta
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path / TENSORS} cannot be read: {error}") from error


def verify(path: Path) -> dict[str, Any]:
    """Check a checkpoint against its manifest and return its meta; raises CheckpointError naming the file."""
    files, meta = _read_manifest(path)
    for name, expected in files.items():
        if Path(name).name != name:
            raise CheckpointError(f"{path / MANIFEST} names {name!r}, a file outside the checkpoint")
        file = path / name
        if not file.is_file() or file.is_symlink():
            raise CheckpointError(f"{file} is missing")
        if _sha256(file) != expected:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not that of the manifest")
    return meta


def read_meta(path: Path) -> dict[str, Any]:
    """The meta of a checkpoint whose files were verified before; raises CheckpointError naming the manifest."""
    return _read_manifest(path)[1]


def _read_manifest(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    manifest_path = path / MANIFEST
    if not manifest_path.is_file() or manifest_path.is_symlink():
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads(manifest_path.read_text())
        files, meta, checksum = dict(manifest["files"]), dict(manifest["meta"]), manifest["checksum"]
        version = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{manifest_path} is damaged: {error}") from error
    if version != FORMAT:
        raise CheckpointError(f"{manifest_path} has format {version}, this version reads {FORMAT}")
    if checksum != _manifest_checksum(manifest):
        raise CheckpointError(f"{manifest_path} is damaged: its checksum does not fit")
    if TENSORS not in files:
        raise CheckpointError(f"{manifest_path} does not list {TENSORS}")
    return files, meta


def latest(folder: Path) -> Path:
    """The newest checkpoint that is whole; a damaged one is named in a warning and the one before it is taken.

    Raises CheckpointError when there is none.
    """
    found = _candidates(folder)
    for path in found:
        try:
            verify(path)
        except CheckpointError as error:
            warnings.warn(f"skipping a checkpoint: {error}", stacklevel=2)
        else:
            return path
    what = f"none of the {len(found)} checkpoints is whole" if found else "there is no checkpoint"
    raise CheckpointError(f"{folder}: {what}")


def _free_name(folder: Path, step: int) -> Path:
    """A name after those taken: replacing a folder takes two renames, and between them there would be none."""
    last = max((attempt for found, attempt in map(_order, _candidates(folder)) if found == step), default=0)
    return folder / (f"step-{step:08d}" if last == 0 else f"step-{step:08d}-{last + 1}")


def _candidates(folder: Path) -> list[Path]:
    """Checkpoint folders, the newest first."""
    found = [path for path in folder.glob("step-*") if _NAME.match(path.name)]
    found = [path for path in found if path.is_dir() and not path.is_symlink()]
    return sorted(found, key=_order, reverse=True)


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.match(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a writer that was killed left, but not what one that lives is writing."""
    for path in folder.glob(".step-*.tmp"):
        pid = path.name.split(".")[-2]
        if not pid.isdigit() or int(pid) == os.getpid() or not _is_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's entries, before what depends on it is written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _manifest_checksum(manifest: Mapping[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def describe(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, for people: step, round, digest, tensors and bytes."""
    tensors, meta = load(path)
    return {
        "path": str(path),
        "step": meta.get("step"),
        "round": meta.get("round"),
        "digest": meta.get("digest"),
        "tensors": len(tensors),
        "bytes": sum(t.numel() * t.element_size() for t in tensors.values() if isinstance(t, torch.Tensor)),
    }
