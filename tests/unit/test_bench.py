"""How benchmarks end: with 1 and the aim that was missed."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest

from swarmkit.compose import load_config
from tests.bench import __main__ as bench
from tests.bench import aims, demo_step, strategies

BENCHES = Path(bench.__file__).parent


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    aims.add_options(parser)
    return parser.parse_args(arguments)


def test_a_missed_aim_is_named_and_ends_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missed = aims.at_most("a round", 0.2, 0.1, " s") + aims.at_least("share", 0.9, 0.85)
    with pytest.raises(SystemExit) as ended:
        aims.conclude(missed, {"rows": [1]}, options("--json", str(tmp_path / "found.json")))
    assert ended.value.code == 1
    assert capsys.readouterr().out == "missed: a round: 0.2 s, not at most 0.1 s\n"
    assert json.loads((tmp_path / "found.json").read_text()) == {"rows": [1]}
    aims.conclude(missed, {}, options("--no-check"))
    aims.conclude([], {}, options())
    assert capsys.readouterr().out.endswith("all aims are met\n")


def test_what_is_no_number_misses_every_aim() -> None:
    assert aims.at_most("x", math.nan, 1.0)
    assert aims.at_least("x", math.nan, 1.0)
    assert aims.at_most("x", 1.0, 1.0) == aims.at_least("x", 1.0, 1.0) == []


@pytest.mark.parametrize("name", [name for name in bench.names() if name != "demo"])
def test_every_benchmark_ends_by_its_aims(name: str) -> None:
    assert "aims.conclude(" in (BENCHES / f"{name}.py").read_text(encoding="utf-8")


def test_helpers_are_no_benchmarks() -> None:
    assert set(bench.names()) == {path.stem for path in BENCHES.glob("*.py")} - {"__main__", *bench.HELPERS}


SMALL = [
    "steps=4", "batch_size=1", "threads=1", "device=cpu", "model.layers=1", "model.dim=32", "model.heads=2",
    "model.context=8", "eval.every=0", "eval.batches=1", "sample.tokens=0",
]  # fmt: skip


def row(method: str, codec: str, loss: float, bytes_per_step: float, payload: float = 0.0) -> dict[str, Any]:
    kept = {"method": method, "codec": codec, "seed": 0, "loss": loss, "bytes_per_step": bytes_per_step}
    return {**kept, "payload_per_step": payload, "peers": 4, "parameters": 1000}


def test_strategies_are_judged_beside_what_they_are_compared_with() -> None:
    base = row("allreduce", "none", 2.0, 6000)
    assert strategies.missed([base, row("demo", "none", 2.019, 79)], 0) == []
    assert len(strategies.missed([base, row("demo", "none", 2.021, 81)], 0)) == 2
    assert len(strategies.missed([row("demo", "none", 2.5, 81)], 0)) == 1  # nothing to compare its loss with
    assert strategies.missed([base, row("demo", "none", 9.0, 81)], seed=1) == []
    local = row("local_sgd", "none", 2.0, 600)
    assert strategies.missed([local, row("co2", "none", 2.059, 600)], 0) == []
    (late,) = strategies.missed([local, row("co2", "none", 2.061, 600)], 0)
    assert late.startswith("co2 with none, seed 0, loss beside local_sgd")
    plain, coded = row("streaming", "none", 2.0, 1200, 800), row("streaming", "fp4", 2.0, 300, 100)
    assert strategies.missed([plain, coded], 0) == []
    (heavy,) = strategies.missed([plain, row("streaming", "fp4", 2.0, 360, 120)], 0)
    assert "smaller payloads" in heavy


@pytest.mark.parametrize("peers", [2, 3, 9])
@pytest.mark.parametrize("strategy", ["allreduce", "local_sgd"])
def test_payloads_are_counted_alike_whatever_the_number_of_peers(strategy: str, peers: int) -> None:
    """And so 8 times smaller with 4 bits, though a gather among 9 sends more often than an all-reduce."""
    settings = [f"strategy={strategy}", f"peers={peers}", *SMALL, *(["strategy.sync.h=2"] * (strategy == "local_sgd"))]
    plain = strategies.train(load_config(settings))
    coded = strategies.train(load_config([*settings, "compression=fp4", "compression.min_size=0"]))
    dense = 4 * plain["parameters"] / (2 if strategy == "local_sgd" else 1)
    assert plain["payload_per_step"] == pytest.approx(dense, rel=0.02)
    assert plain["bytes_per_step"] == pytest.approx(dense * 2 * (peers - 1) / peers, rel=0.02)
    assert 7.0 < plain["payload_per_step"] / coded["payload_per_step"] <= 8.0


def test_a_slow_step_of_demo_misses_its_aim() -> None:
    good = {"size": "10M", "ratio": 4.1, "flips": 0.0, "bytes_per_coefficient": {"sign": 1.6, "int8": 2.5}}
    assert demo_step.missed(good) == []
    assert demo_step.missed({**good, "ratio": 2.6}) == ["10M, times faster than the plain form: 2.6, not at least 4"]
