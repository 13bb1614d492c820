"""Files that a joiner reads: the run proposes, the joiner's user decides."""

from collections.abc import Sequence
from dataclasses import fields

from swarmkit.config import Config, with_own_settings
from swarmkit.errors import ConfigError

# Whoever publishes a configuration must not choose which files of other machines are learnt from, or loaded.
PATHS = ("data.paths", "data.folder", "data.path", "data.tokenizer", "model.folder")


def split_paths(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Sort a joiner's overrides into those that name files, and the others."""
    named = [override for override in overrides if override.lstrip("+").partition("=")[0] in PATHS]
    return named, [override for override in overrides if override not in named]


def with_paths(run: Config, overrides: Sequence[str]) -> Config:
    """Put the joiner's own files into a run's configuration; raises ConfigError for files that only the run names."""
    named = {override.lstrip("+").partition("=")[0] for override in overrides}
    problems = [_question(key, run) for key in PATHS if key not in named and _is_foreign(key, run)]
    if problems:
        raise ConfigError("\n".join(problems))
    return with_own_settings(run, overrides, PATHS) if overrides else run


def _is_foreign(key: str, run: Config) -> bool:
    """True when the run names files other than the default ones, which every user of this version has accepted."""
    section, _, name = key.partition(".")
    part = getattr(run, section)
    defaults = {field.name: field.default for field in fields(part)}
    return name in defaults and bool(getattr(part, name)) and getattr(part, name) != defaults[name]


def _question(key: str, run: Config) -> str:
    section, _, name = key.partition(".")
    value = getattr(getattr(run, section), name)
    shown = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
    # A stranger's text ends up on a terminal.
    clean = "".join(c if c.isprintable() else "?" for c in shown)[:200]
    return (
        f"{key}={clean}: this run reads files of each peer's machine; when these, or others, are what you want it to "
        f"read, say so: swarmkit join ADDRESS '{key}={clean}'"
    )
