"""The standard library as a corpus: deterministic, with whole files held out."""

from pathlib import Path

import numpy as np
import pytest

from swarmkit.data.config import StdlibConfig
from swarmkit.data.corpus import TokenCorpus
from swarmkit.data.stdlib import find_sources, is_held_out, load_stdlib
from swarmkit.errors import DataError


def library(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def trained_on(corpus: TokenCorpus) -> bytes:
    return b"".join(bytes(row) for row in corpus.fetch(np.arange(corpus.size)).inputs.tolist())


def test_this_pythons_library_is_read_the_same_every_time() -> None:
    first, second = (load_stdlib(StdlibConfig(max_bytes=1_000_000), context=128) for _ in range(2))
    assert trained_on(first) == trained_on(second)
    assert b"import " in trained_on(first)
    one, two = ([b.inputs.tolist() for b in corpus.validation(8, 4)] for corpus in (first, second))
    assert one == two


def test_so_much_is_read_as_is_asked_for() -> None:
    corpus = load_stdlib(StdlibConfig(max_bytes=400_000, validation=0.1), context=16)
    assert 0.95 * 360_000 < 16 * corpus.size <= 360_000
    held_out = sum(len(batch.inputs) for batch in corpus.validation(100, 10_000))
    assert 0.9 * 40_000 < 16 * held_out <= 40_000


def test_packages_tests_and_local_files_are_left_out(tmp_path: Path) -> None:
    root = library(
        tmp_path,
        dict.fromkeys(
            [
                "ast.py",
                "json/decoder.py",
                "site-packages/numpy/core.py",
                "test/test_ast.py",
                "unittest/test/support.py",
                "__pycache__/ast.py",
                "_sysconfigdata__linux.py",
                "sitecustomize.py",
                "pydoc_data/topics.py",
                "README.txt",
            ],
            "x",
        ),
    )
    assert sorted(find_sources(root)) == ["ast.py", "json/decoder.py"]


def test_files_are_held_out_whole_and_by_their_names() -> None:
    names = [f"package/module_{k}.py" for k in range(4000)]
    held = {name for name in names if is_held_out(name, 0.1)}
    assert 0.08 < len(held) / len(names) < 0.12
    assert {name for name in names if is_held_out(name, 0.05)} < held
    assert is_held_out("package/module_7.py", 0.1) == ("package/module_7.py" in held)


def test_no_file_is_in_both_parts_and_packages_are_domains(tmp_path: Path) -> None:
    names = [f"{package}/m{k}.py" for package in "ab" for k in range(20)]
    root = library(tmp_path, {name: f"<{name}>".ljust(100) for name in names})
    corpus = load_stdlib(StdlibConfig(validation=0.3), context=16, root=root)
    held_out = b"".join(bytes(row) for batch in corpus.validation(64, 99) for row in batch.inputs.tolist())
    for name in names:
        assert (name.encode() in held_out) == is_held_out(name, 0.3)
        assert (name.encode() in trained_on(corpus)) != is_held_out(name, 0.3)
    assert set(corpus.domains().tolist()) == {0, 1}


def test_a_python_without_sources_says_what_to_use_instead(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="comes without its sources; use data=text instead"):
        load_stdlib(StdlibConfig(), context=16, root=tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    library(tmp_path, {"ast.py": "x" * 100})
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    with pytest.raises(DataError, match=r"gone\.py cannot be read: .*; repair this Python, or use data=text"):
        load_stdlib(StdlibConfig(), context=16, root=tmp_path)
