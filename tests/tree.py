"""Rewrites the tree in README.md from the first lines of the modules' docstrings: python -m tests.tree."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- tree: made by `python -m tests.tree` -->", "<!-- end of tree -->"
FOLDERS = {
    "swarmkit": "the product: command, configuration, trainer; may import peers and optim",
    "peers": "the network on hivemind's DHT and libp2p; may import optim",
    "optim": "the algorithms; torch only",
}


def summary(path: Path) -> str:
    """The first line of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return (docstring.splitlines() or [""])[0].removesuffix(".")


def _branch(folder: Path, indent: str) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name.startswith(("_", ".")):
            continue
        if path.suffix == ".py":
            yield f"{indent + path.name:<24} {summary(path)}"
        elif (path / "__init__.py").is_file():
            yield f"{indent + path.name + '/':<24} {summary(path / '__init__.py')}"
            yield from _branch(path, indent + "  ")


def tree() -> str:
    """The tree as it is now, one line per module."""
    lines = ["```"]
    for name, what in FOLDERS.items():
        lines.append(f"{name + '/':<24} {what}")
        lines += _branch(ROOT / name, "  ")
    choices = ", ".join(sorted(path.name for path in (ROOT / "conf").iterdir() if any(path.glob("*.yaml"))))
    lines.append(f"{'conf/':<24} Hydra's files, one per choice: {choices}")
    lines.append(f"{'tests/':<24} unit/ (as the packages), network/ (namespaces, root), bench/")
    return "\n".join([*lines, "```"])


def main() -> None:
    """Write the tree between its marks in README.md."""
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n{tree()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
