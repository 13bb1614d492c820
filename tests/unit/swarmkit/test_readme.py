"""The README's Python runs as it is written."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import swarmkit
from swarmkit.compression import CODEC_CONFIGS
from swarmkit.optim import Collective, CompressedAveraging, DiLoCo, LGreCo, TopK, make_codec
from swarmkit.optim.compression.codec import LinearCodec
from swarmkit.optim.compression.route import Route, choose
from swarmkit.peers.local import LocalSwarm
from swarmkit.peers.node import Node
from swarmkit.strategy import SyncConfig

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


class Net(torch.nn.Module):
    """A model whose output has a loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, batch: torch.Tensor) -> Any:
        class Output:
            loss = self.linear(batch).square().mean()

        return Output


class FakeNode:
    """A node whose run has one peer; it has nothing that a real one has not."""

    def __init__(self) -> None:
        self.attached: list[object] = []

    def __getattribute__(self, name: str) -> Any:
        assert name.startswith("_") or name == "attached" or hasattr(Node, name), f"a node has no {name}"
        return object.__getattribute__(self, name)

    def collective(self) -> Collective:
        return LocalSwarm(1).collectives[0]

    def attach(self, optimizer: object) -> None:
        self.attached.append(optimizer)


def test_the_readme_has_python() -> None:
    assert SNIPPETS


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_runs(snippet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode()
    joined: list[tuple[Any, ...]] = []

    def join(run: str, *, peers: list[str]) -> FakeNode:
        joined.append((run, peers))
        return node

    monkeypatch.setattr(swarmkit, "join", join)
    model = Net()
    before = model.linear.weight.detach().clone()
    loader = [torch.ones(2, 64)] * 101
    found: dict[str, Any] = {"torch": torch, "model": model, "loader": loader}
    exec(compile(snippet, "README.md", "exec"), found)
    assert len(joined) == 1
    (optimizer,) = node.attached
    assert isinstance(optimizer, DiLoCo)
    assert isinstance(optimizer.averaging, CompressedAveraging)
    assert optimizer.round == 1
    assert not torch.equal(model.linear.weight, before)


def test_names_of_the_library_in_the_text_exist() -> None:
    for name in re.findall(r"swarmkit\.optim\.(\w+)", TEXT):
        assert name in swarmkit.optim.__all__, name
    (call,) = re.findall(r"`averaging=(LGreCo\(.*?)`", TEXT)
    names = {"codec": TopK(), "collective": LocalSwarm(1).collectives[0]}
    made = eval(call, {**vars(swarmkit.optim), "LGreCo": LGreCo, "CompressedAveraging": CompressedAveraging}, names)
    assert isinstance(made, LGreCo)
    assert 'make_codec("int4")' in TEXT
    assert swarmkit.optim.make_codec("int4").name == "int4"


# -- the table of strategies and codecs ------------------------------------------------------------------------------

STRATEGIES = {path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml")}
PEERS, SHAPE, H = 8, (1024, 1024), 16
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")]
HEAD = next(row for row in ROWS if row[0] == "strategy")
TABLE = [row for row in ROWS if len(row) == len(HEAD) and row is not HEAD and "-" not in row[0]]
COLUMNS = [(column, name) for column, cell in enumerate(HEAD) for name in re.findall(r"`(\w+)`", cell)]


def bytes_of_a_round(name: str) -> float:
    """What one of the peers sends per parameter."""
    reduced = 2 * (PEERS - 1) / PEERS
    if name == "none":
        return 4 * reduced
    codec, elements = make_codec(name), math.prod(SHAPE)
    payload = codec.payload_bytes(SHAPE)
    gathered = not isinstance(codec, LinearCodec) and choose(PEERS, payload, elements) is Route.gather
    return payload * (PEERS - 1 if gathered else reduced) / elements


def test_the_table_has_every_strategy_and_codec() -> None:
    assert {name for _, name in COLUMNS} == set(CODEC_CONFIGS)
    assert {row[0].split("`")[1] for row in TABLE if row[0].startswith("`")} == STRATEGIES


@pytest.mark.parametrize(("column", "name"), COLUMNS)
def test_the_table_says_what_codecs_send(column: int, name: str) -> None:
    seen = 0
    for row in TABLE:
        strategy = row[0].split("`")[1] if row[0].startswith("`") else ""
        if strategy in ("allreduce", "local_sgd", "diloco", "co2"):
            expected = bytes_of_a_round(name) / (1 if strategy == "allreduce" else H)
            assert math.isclose(float(row[column]), expected, rel_tol=0.03), (row[0], name)
            seen += 1
    assert seen == 6
    assert SyncConfig().h == H
    fed_back, adaptive = TABLE[-2][column], TABLE[-1][column]
    if name != "none":
        codec = CODEC_CONFIGS[name]()
        assert (fed_back.startswith("yes") and name != "qsgd") == make_codec(name).contractive
        assert hasattr(codec, "lgreco") == (adaptive == "yes" or f"`{name}`" in adaptive)
