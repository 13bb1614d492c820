"""Text files: packed or plain, alone or in folders; which are domains, and what is refused."""

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest

from swarmkit.data.config import TextConfig
from swarmkit.data.corpus import TokenCorpus
from swarmkit.data.text import find_domains, load_text
from swarmkit.errors import DataError

POEM = b"".join(b"line %d of the poem\n" % k for k in range(200))


def load(*paths: Path | str, context: int = 16, **settings: float) -> TokenCorpus:
    return load_text(TextConfig(paths=[str(path) for path in paths], **settings), context=context)


def trained_on(corpus: TokenCorpus) -> bytes:
    return b"".join(bytes(row) for row in corpus.fetch(np.arange(corpus.size)).inputs.tolist())


def held_out(corpus: TokenCorpus) -> bytes:
    return b"".join(bytes(row) for batch in corpus.validation(64, 1000) for row in batch.inputs.tolist())


def write(root: Path, *names: str, content: bytes = POEM) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def test_packed_files_equal_plain_ones(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(POEM)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(POEM))
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(POEM))
    plain, *packed = (load(tmp_path / name) for name in ("a.txt", "a.txt.gz", "a.txt.xz"))
    for corpus in packed:
        assert trained_on(corpus) == trained_on(plain)
        assert held_out(corpus) == held_out(plain)


def test_the_end_of_every_domain_is_held_out(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    corpus = load(tmp_path / "a.txt", validation=0.25)
    cut = len(POEM) - round(0.25 * len(POEM))
    assert POEM[:cut].startswith(trained_on(corpus))
    assert POEM[cut:].startswith(held_out(corpus))
    assert cut - len(trained_on(corpus)) <= 17
    assert len(POEM) - cut - len(held_out(corpus)) <= 17


def test_a_plain_file_is_mapped_not_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte: reading it would fail."""
    with (tmp_path / "huge.txt").open("wb") as file:
        file.write(POEM)
        file.truncate(2**40)
    corpus = load(tmp_path / "huge.txt")
    assert bytes(corpus.fetch(np.array([0])).inputs[0].tolist()) == POEM[:16]
    assert corpus.fetch(np.array([corpus.size - 1])).inputs.sum() == 0


def test_a_file_or_a_folder_is_a_domain_and_so_is_each_match_of_a_glob(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "books/b2.txt", "books/b1.txt", "books/deep/b3.txt", "more/c.txt", "more/d.txt")
    found = find_domains([str(tmp_path / "a.txt"), str(tmp_path / "books"), str(tmp_path / "more" / "*.txt")])
    assert [[path.name for path in domain] for domain in found] == [
        ["a.txt"],
        ["b1.txt", "b2.txt", "b3.txt"],
        ["c.txt"],
        ["d.txt"],
    ]
    assert set(load(tmp_path / "a.txt", tmp_path / "books").domains().tolist()) == {0, 1}


def test_a_file_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "sub/b.txt")
    patterns = [str(tmp_path / "a.txt"), str(tmp_path), str(tmp_path / "**")]
    assert [[path.name for path in domain] for domain in find_domains(patterns)] == [["a.txt"], ["b.txt"]]


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", ".hidden", ".git/objects/x")
    assert [[path.name for path in domain] for domain in find_domains([str(tmp_path)])] == [["a.txt"]]


def test_a_limit_is_shared_between_the_domains(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "b.txt")
    corpus = load(tmp_path / "a.txt", tmp_path / "b.txt", max_bytes=2000)
    assert 2 * 880 < len(trained_on(corpus)) <= 2 * 950
    assert np.bincount(corpus.domains()).tolist() == [59, 59]


@pytest.mark.parametrize("name", ["nowhere.txt", "*.rst", "empty"])
def test_a_path_without_files_is_refused_and_says_where_it_was_looked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"data\.paths: '.*' matches no file, looked for from /"):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.txt.gz", gzip.compress(POEM)[:-20]),
        ("wrong.txt.gz", POEM),
        ("flipped.txt.gz", gzip.compress(POEM)[:-6] + b"\0\0" + gzip.compress(POEM)[-4:]),
        ("cut.txt.xz", lzma.compress(POEM)[:-20]),
        ("wrong.txt.xz", POEM),
    ],
)
def test_a_damaged_archive_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} cannot be read: .*; fetch it again or leave it out of data\.paths"):
        load(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"too short"])
def test_too_little_text_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, "a.txt", content=content)
    with pytest.raises(DataError, match=r"a\.txt: the training part has no text of context \+ 1 = 17 tokens"):
        load(tmp_path / "a.txt")


def test_no_path_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.paths=\[\]: name at least one file"):
        TextConfig()
