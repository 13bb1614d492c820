"""Which checkpoint each peer begins from when a run is resumed, on as many peers or on others."""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from swarmkit.checkpoint import MANIFEST, read_meta, verify
from swarmkit.config import Config, config_from_json
from swarmkit.errors import CheckpointError
from swarmkit.resume_fit import as_override, settings, unfit


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint that is whole."""

    path: Path
    round: int
    step: int
    digest: str  # of the anchor

    @property
    def age(self) -> tuple[int, int]:
        """Sort key: the newest last."""
        return (self.round, self.step)

    @property
    def moment(self) -> tuple[int, int, str]:
        """Equal for checkpoints of two peers that can go on together."""
        return (self.round, self.step, self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where peers begin: peer k from `paths[k]`; those beyond, and all when not `exactly`, from what is shared."""

    paths: list[Path]
    exactly: bool
    step: int

    def for_peer(self, number: int) -> tuple[Path, bool]:
        """The checkpoint of a peer, and whether it is its own."""
        if self.exactly and number < len(self.paths):
            return self.paths[number], True
        return self.paths[0], False


def find_checkpoints(path: Path) -> list[Found]:
    """All whole checkpoints at a path (one itself, a peer's or a run's folder), the newest last.

    A damaged one is named in a warning and left out.
    """
    if (path / MANIFEST).is_file():
        folders = [path]
    else:
        folders = [found.parent for pattern in ("*", "*/*", "*/*/*") for found in path.glob(f"{pattern}/{MANIFEST}")]
    whole = []
    for folder in folders:
        if folder.name.startswith(".") or "baseline" in folder.relative_to(path).parts:
            continue
        try:
            meta = verify(folder)
        except CheckpointError as error:
            if folder == path:
                raise
            warnings.warn(f"skipping a checkpoint: {error}", stacklevel=2)
            continue
        whole.append(Found(path=folder, round=int(meta["round"]), step=int(meta["step"]), digest=str(meta["digest"])))
    return sorted(whole, key=lambda found: (found.age, str(found.path)))


def find_whole(path: Path) -> list[Found]:
    """As `find_checkpoints`, but raises CheckpointError when there is none."""
    if not path.exists():
        raise CheckpointError(f"resume={path} does not exist")
    found = find_checkpoints(path)
    if not found:
        raise CheckpointError(f"resume={path}: there is no whole checkpoint")
    return found


def check_fit(path: Path, config: Config) -> None:
    """Raise CheckpointError when a run cannot go on from a whole checkpoint, naming what to change.

    It may be of another model or strategy, its optimizer state may depend on settings that are others now, or its run
    has ended. One that says nothing of its configuration, written by somebody's own loop, passes.
    """
    meta = read_meta(path)
    if not isinstance(meta.get("config"), str):
        return
    theirs = config_from_json(meta["config"])
    for group in ("model", "strategy"):
        wanted, have = settings(group, getattr(theirs, group)), settings(group, getattr(config, group))
        if wanted[group] != have[group] or (group == "model" and wanted != have):
            known = have if wanted[group] == have[group] else settings(group, type(getattr(theirs, group))())
            known[group] = have[group]
            repeat = " ".join(as_override(key, value) for key, value in wanted.items() if known.get(key) != value)
            raise CheckpointError(f"resume={path}: it is of another {group}; repeat its settings: {repeat}")
    if others := unfit(theirs, config):
        told = ", ".join(f"{as_override(key, saved)} (not {as_override(key, given)})" for key, saved, given in others)
        raise CheckpointError(f"resume={path}: its optimizer state needs {told}")
    if int(meta["step"]) >= config.steps:
        raise CheckpointError(
            f"resume={path}: it is at step {meta['step']} and training ends at steps={config.steps}; raise steps"
        )


def plan_resume(path: Path) -> Plan:
    """Decide how to resume; raises CheckpointError when there is nothing whole.

    Each peer goes on from its own checkpoint, bit for bit, at the newest moment that all peers of the run have. When
    they have none in common, all begin from what was shared in the newest one.
    """
    found = find_whole(path)
    owners: dict[Path, list[Found]] = {}
    for one in found:
        owners.setdefault(one.path.parent, []).append(one)
    folders = sorted(owners, key=_number)
    common = set.intersection(*({one.moment for one in owners[folder]} for folder in folders))
    if not common:
        return Plan(paths=[found[-1].path], exactly=False, step=found[-1].step)
    moment = max(common)
    paths = [next(one.path for one in owners[folder] if one.moment == moment) for folder in folders]
    return Plan(paths=paths, exactly=True, step=moment[1])


def _number(folder: Path) -> tuple[int, str]:
    """The number in peer-<k>, so that peer-10 comes after peer-9."""
    match = re.search(r"peer-(\d+)", str(folder))
    return (int(match[1]) if match else 0, str(folder))
