"""From overrides to a configuration: Hydra composes it, and every mistake is told in one line."""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import get_origin, get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from swarmkit.config import GROUPS, Config, to_config
from swarmkit.errors import ConfigError

_DEFAULT_CHOICES = {
    "model": "gpt",
    "data": "stdlib",
    "strategy": "local_sgd",
    "compression": "none",
    "optimizer": "adamw",
    "network": "local",
}


def load_config(overrides: Sequence[str] = ()) -> Config:
    """Compose and check the configuration; raises ConfigError naming every key, value and reason, one a line."""
    check_overrides(overrides)
    _register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(config_module="swarmkit.conf", version_base="1.3"):
            composed = compose("config", overrides=[_as_hydra_takes_it(override, overrides) for override in overrides])
        # Interpolations of one's own command line are fine; from here on there are only values.
        OmegaConf.resolve(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides)) from error
    return to_config(composed)


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError for keys and choices that do not exist, naming the nearest that do."""
    problems = [problem for override in overrides if (problem := _refuse(override, overrides)) is not None]
    if problems:
        raise ConfigError("\n".join(problems))


def _as_hydra_takes_it(override: str, overrides: Sequence[str]) -> str:
    """A key of a free-form dictionary is added or replaced, an experiment chosen, whichever way it was written."""
    plain = override.lstrip("+")
    key = plain.partition("=")[0]
    if _is_free_form(key, overrides) or _is_free_form(f"{key}.", overrides):
        return f"++{plain}"
    return plain if key == "experiment" else override


def _register() -> None:
    store = ConfigStore.instance()
    schema = OmegaConf.structured(Config)
    for group in GROUPS:
        # Of the group's type but without a value: a default of one choice would not let another be merged in.
        schema[group] = MISSING
    store.store(name="schema", node=schema)
    for group, choices in GROUPS.items():
        for name, node in choices.items():
            # Under a name of its own: conf/<group>/<name>.yaml begins with it and says what differs.
            store.store(group=group, name=f"{name}_schema", node=node)


def experiments() -> list[str]:
    """Names of the ready-made combinations in conf/experiment."""
    folder = resources.files("swarmkit.conf") / "experiment"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir()) if folder.is_dir() else []


# -- what Hydra would accept, or would refuse in several lines ---------------------------------------------------------


def _refuse(override: str, overrides: Sequence[str]) -> str | None:
    """Why an override cannot work, as far as it can be seen before composing."""
    sign = override[: len(override) - len(override.lstrip("+~"))]
    key, equals, value = override.removeprefix(sign).partition("=")
    if sign.startswith("~"):
        return f"{override}: no setting can be removed; write {key}=VALUE to change it"
    if not equals or not key:
        return f"{override}: not KEY=VALUE"
    if key == "experiment":
        if value in experiments():
            return None
        return f"experiment={value}: no such experiment; {_nearest(value, experiments())}"
    if _is_free_form(key, overrides):
        return None
    valid = list(valid_keys(overrides))
    if key not in valid:
        return _unknown_key(key, valid)
    group, _, rest = key.partition(".")
    if group in GROUPS and rest == "name":
        return f"{override}: choose with {group}={value}, which brings its keys along"
    if sign:
        return f"{override}: {key} exists already; write {key}={value}"
    choice = value.strip("'\"")
    if key in GROUPS and choice not in GROUPS[key]:
        return f"{override}: no such {key}; {_nearest(choice, list(GROUPS[key]))}"
    return None


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """One line for what Hydra and OmegaConf say in several: the key, the value and the reason."""
    text = "\n".join(str(part) for part in (error, error.__cause__) if part is not None)
    merging = re.search(r"Error merging override (.*)", text)
    override = (merging[1] if merging is not None else _culprit(text, overrides)).lstrip("+")
    key = override.partition("=")[0]
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return _unknown_key(str(cause.full_key or key), list(valid_keys(overrides)))
    for pattern, reason in _REASONS:
        match = re.search(pattern, text)
        if match is not None:
            hint = _enum_hint(match) if "expected one of" in pattern else ""
            return f"{override}: {match.expand(reason)}{hint}"
    line = next(line for line in str(cause).splitlines() if line.strip())
    full_key = getattr(cause, "full_key", None)
    return f"{override or full_key or 'configuration'}: {line}"


# What the libraries say -> what is meant.
_REASONS: tuple[tuple[str, str], ...] = (
    (r"Value '(.*)' of type '.*' could not be converted to Integer", r"'\1' is not an integer"),
    (r"Value '(.*)' of type '.*' could not be converted to Float", r"'\1' is not a number"),
    (r"Value '(.*)' is not a valid bool", r"'\1' is neither true nor false"),
    (r"Cannot convert '(\w+)' to string", r"a text is wanted, not a \1"),
    (r"Invalid value '(.*)', expected one of \[(.*)\]", r"must be one of \2"),
    (r"field '.*' is not Optional", r"cannot be null"),
    (r"Interpolation key '(.*)' not found", r"there is no key \1 to take the value from"),
    (r"is not a ListConfig, list or tuple", r"must be a list, as [a,b]"),
    (r"Invalid type assigned: \w+ is not a subclass of \w+", r"is a section; set one of its keys instead"),
    (r"Value '(.*)' of type '\w+' is incompatible with type hint 'Union", r"'\1' is neither a number nor a text"),
    (r"Cannot assign (\w+) to", r"a \1 does not fit here"),
    (r"Ambiguous value for argument", r"one value is wanted; a list is [a,b], a text with commas is 'a,b' in quotes"),
    (r"raised while resolving interpolation: (.*)", r"\1"),
    (
        r"Error parsing override|LexerNoViableAlt|no viable alternative|mismatched input|extraneous input",
        "cannot be read; put a value with special characters in quotes twice, as KEY='\"VALUE\"'",
    ),
)


def _enum_hint(match: re.Match[str]) -> str:
    close = difflib.get_close_matches(match[1], match[2].split(", "), n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else ""


def _culprit(text: str, overrides: Sequence[str]) -> str:
    """The override that an error without its name is about."""
    full_key = re.search(r"full_key: (\S+)", text)
    for override in overrides:
        key, _, value = override.partition("=")
        if (full_key is not None and full_key[1] == key) or override in text or (len(value) > 1 and value in text):
            return override
    return full_key[1] if full_key is not None else (overrides[0] if len(overrides) == 1 else "")


def _unknown_key(key: str, valid: list[str]) -> str:
    """Say that a key does not exist, and where it does or which one is near."""
    group, _, rest = key.partition(".")
    owners = [
        name
        for name, node in GROUPS.get(group, {}).items()
        if rest in {entry.name for entry in dataclasses.fields(node)}
    ]
    if owners:
        return f"{key}: unknown key here; only {group}={' or '.join(owners)} has it"
    return f"{key}: unknown key; {_nearest(key, valid)}"


def _nearest(wrong: str, valid: list[str]) -> str:
    # The right word in the wrong section is more likely than a far-fetched spelling.
    last = wrong.rpartition(".")[2]
    close = [key for key in valid if key.rpartition(".")[2] == last][:1]
    close = close or difflib.get_close_matches(wrong, valid, n=1, cutoff=0.5)
    listed = ", ".join(valid) if len(valid) <= 12 else "see `swarmkit config`"
    return f"did you mean {close[0]}? (valid: {listed})" if close else f"valid: {listed or 'none'}"


def _chosen(overrides: Sequence[str]) -> dict[str, str]:
    """The choice of each group."""
    chosen = dict(_DEFAULT_CHOICES)
    for override in overrides:
        key, _, value = override.partition("=")
        if key in GROUPS and value.strip("'\"") in GROUPS[key]:
            chosen[key] = value.strip("'\"")
    return chosen


def _is_free_form(key: str, overrides: Sequence[str]) -> bool:
    """True for a key of a dictionary whose keys are the user's own, as model.config of model=hf."""
    group, _, rest = key.partition(".")
    name, dot, _ = rest.partition(".")
    kind = GROUPS.get(group, {}).get(_chosen(overrides).get(group, ""))
    return bool(dot) and kind is not None and get_origin(get_type_hints(kind).get(name)) is dict


def valid_keys(overrides: Sequence[str] = ()) -> Iterator[str]:
    """Every dotted key that the choices in `overrides` leave valid."""
    chosen = _chosen(overrides)

    def walk(kind: type, prefix: str) -> Iterator[str]:
        for entry in dataclasses.fields(kind):
            name = f"{prefix}{entry.name}"
            yield name
            inner = GROUPS[entry.name][chosen[entry.name]] if not prefix and entry.name in chosen else entry.type
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):
                yield from walk(inner, f"{name}.")

    yield from walk(Config, "")
