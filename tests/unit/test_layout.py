"""The rules of the house that no linter knows."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tree

ROOT = Path(__file__).parents[2]
PACKAGES = ("swarmkit", "peers", "optim")
PRODUCT = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TEXTS = [*PRODUCT, *TESTS, *sorted((ROOT / "conf").rglob("*.yaml")), ROOT / "README.md", ROOT / "pyproject.toml"]
# What a module of the package may import of our own.
ALLOWED = {"optim": ("swarmkit.optim",), "peers": ("swarmkit.peers", "swarmkit.optim"), "swarmkit": ("swarmkit",)}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            if node.module == "swarmkit":
                yield from (f"swarmkit.{alias.name}" for alias in node.names if alias.name != "__version__")


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@pytest.mark.parametrize("path", [*PRODUCT, *TESTS], ids=name)
def test_no_file_is_longer_than_500_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_a_module_says_in_its_first_line_what_it_is(path: Path) -> None:
    summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()
    assert summary, "no docstring"
    assert re.fullmatch(r"\S.*\.", summary[0]), summary[0]
    assert summary[1:2] in ([], [""]), "the sentence does not end in the first line"


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_arrows_between_the_packages_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        assert not module.startswith("."), f"relative import {module}"
        assert module.partition(".")[0] not in ("optim", "peers", "conf"), f"{module} under a second name"
        if module.startswith("swarmkit.") or (module == "swarmkit" and package != "swarmkit"):
            allowed = module == "swarmkit" or module.startswith(ALLOWED[package])
            assert allowed, f"{package} imports {module}"
        if package == "optim":
            assert module.partition(".")[0] not in ("hivemind", "grpc", "hydra", "omegaconf"), module
        if package == "peers":
            assert module.partition(".")[0] not in ("hydra", "omegaconf", "typer"), module


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    assert not {"pickle", "dill", "cloudpickle", "marshal", "shelve", "yaml"} & set(imports(path))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            forbidden = {"eval", "exec", "torch.load", "yaml.load", "os.system", "__import__"}
            assert dotted(node.func) not in forbidden, f"line {node.lineno}"
            assert not any(keyword.arg == "shell" for keyword in node.keywords), f"line {node.lineno}: a shell"


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_files_are_ascii(path: Path) -> None:
    assert path.read_text(encoding="utf-8").isascii()


def test_the_readme_holds_the_tree_as_it_is() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    written = text.partition(tree.BEGIN)[2].partition(tree.END)[0].strip()
    assert written == tree.tree(), "run python -m tests.tree"


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    without_tree = text.partition(tree.BEGIN)[0] + text.partition(tree.END)[2]
    assert len(without_tree.splitlines()) <= 200


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("http", "#"))]
    assert [link for link in links if not (ROOT / link).exists()] == []
