"""The strategies know torch and the Collective protocol, and nothing of a network or of settings."""

import pkgutil
import subprocess
import sys

import pytest

import swarmkit.optim

MODULES = ["swarmkit.optim"] + sorted(f"swarmkit.optim.{m.name}" for m in pkgutil.iter_modules(swarmkit.optim.__path__))
FORBIDDEN = ("hivemind", "grpc", "hydra", "omegaconf", "swarmkit.peers", "swarmkit.conf")


def loaded_after(code: str) -> set[str]:
    """Modules that a fresh interpreter has loaded once it ran `code`."""
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def forbidden(modules: set[str]) -> list[str]:
    return sorted(m for m in modules if any(m == name or m.startswith(f"{name}.") for name in FORBIDDEN))


def test_no_module_of_optim_pulls_in_a_network_or_settings() -> None:
    loaded = loaded_after("\n".join(f"import {name}" for name in MODULES))
    assert set(MODULES) <= loaded
    assert forbidden(loaded) == []


def test_importing_the_package_alone_does_not_import_torch() -> None:
    assert "torch" not in loaded_after("import swarmkit.optim")


def test_every_public_name_can_be_imported() -> None:
    for name in swarmkit.optim.__all__:
        assert getattr(swarmkit.optim, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Missing'"):
        swarmkit.optim.Missing  # noqa: B018
