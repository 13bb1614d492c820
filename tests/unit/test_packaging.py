"""What is installed holds everything that is needed."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("swarmkit", "peers", "optim", "conf")
FILES = ("pyproject.toml", "README.md", "LICENSE")


def copy_of_the_project(folder: Path) -> Path:
    """A copy as a clone has it: symlinks as they are, nothing that a build left behind."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


def needed() -> set[str]:
    """Paths below the import name that an installation must have."""
    modules = {
        f"swarmkit/{path.relative_to(ROOT)}" for name in ("optim", "peers") for path in (ROOT / name).rglob("*.py")
    }
    modules |= {str(path.relative_to(ROOT)) for path in (ROOT / "swarmkit").rglob("*.py")}
    settings = {f"swarmkit/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    return modules | settings | {"swarmkit/py.typed", "swarmkit/conf/__init__.py"}


def build(command: list[str], folder: Path) -> None:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_of_the_project(tmp_path_factory.mktemp("wheel"))
    build(["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", "dist", "."], folder)
    (made,) = (folder / "dist").glob("*.whl")
    return made


def test_the_wheel_holds_every_module_and_every_setting(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert needed() <= names
    assert "swarmkit/optim/diloco.py" in names
    assert "swarmkit/conf/config.yaml" in names
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"swarmkit"}, "a bare optim, peers or conf"


def test_the_wheel_has_the_command_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "swarmkit = swarmkit.cli:main" in archive.read(entry_points).decode()
    assert any(name.endswith("LICENSE") for name in names)


def test_the_wheel_composes_its_configuration_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import swarmkit; from swarmkit.compose import load_config; "
        "assert swarmkit.__file__.startswith(sys.argv[1]); print(load_config(['network=wan']).network.listen)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0.0.0.0:31337\n"), done.stderr


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    folder = copy_of_the_project(tmp_path / "copy")
    build(["-c", "from setuptools import build_meta; build_meta.build_sdist('dist')"], folder)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", "dist", "."]
    build(command, source)
    (again,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert set(second.namelist()) == set(first.namelist())
