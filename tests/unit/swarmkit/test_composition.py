"""Every strategy with every codec, through the configuration, the trainer and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from swarmkit import checkpoint
from swarmkit.compression import CODEC_CONFIGS, LGreCoConfig, PowerSGDConfig, QSGDConfig, RandomKConfig, TopKConfig
from swarmkit.config import Config
from swarmkit.inner import SGDConfig
from swarmkit.peers.local import LocalCollective, LocalSwarm
from swarmkit.trainer import Outcome
from tests.unit.swarmkit.harness_replicas import STRATEGIES, Recorder, small_config, small_trainer

CODECS: dict[str, dict[str, Any]] = {name: {"min_size": 64} for name in CODEC_CONFIGS if name != "none"}
CODECS["topk"]["density"] = CODECS["randomk"]["density"] = 0.05
CODECS["powersgd"]["rank"] = 2
ADAPTIVE = {
    "topk": TopKConfig(min_size=64, density=0.05, lgreco=LGreCoConfig(period=2, window=1)),
    "qsgd": QSGDConfig(min_size=64, bits=4, lgreco=LGreCoConfig(period=2, window=1)),
    "randomk": RandomKConfig(min_size=64, density=0.05, lgreco=LGreCoConfig(period=2, window=1)),
    "powersgd": PowerSGDConfig(min_size=64, rank=2, lgreco=LGreCoConfig(period=2, window=1)),
}
COMPRESSED = [name for name in STRATEGIES if name != "demo"]


def run(config: Config, folder: Path, resume: Path | None = None) -> list[tuple[Outcome, int]]:
    """Outcome and bytes sent of each of two replicas; every round must have given a result."""
    recorders = [Recorder(), Recorder()]

    def replica(collective: LocalCollective, rank: int) -> Outcome:
        trainer = small_trainer(config, collective, rank, folder, events=recorders[rank])
        if resume is not None:
            # Of streaming, rounds land a step after the eighth.
            first = min((resume / f"peer-{rank}" / "checkpoints").iterdir())
            trainer.resume(checkpoint.load(first), exactly=True)
            assert 8 <= trainer.optimizer.step_count < config.steps
        return trainer.run()

    outcomes = LocalSwarm(2).run(replica)
    rounds = [recorder.of("round") for recorder in recorders]
    assert not [event for event in rounds[0] + rounds[1] if event["failed"]]
    return [(outcome, sum(e["bytes_sent"] for e in events)) for outcome, events in zip(outcomes, rounds, strict=True)]


@pytest.mark.parametrize("strategy", COMPRESSED)
@pytest.mark.parametrize("codec", [*CODECS, *(f"{name} adaptive" for name in ADAPTIVE)])
def test_a_codec_sends_less_agrees_and_resumes_bit_for_bit(strategy: str, codec: str, tmp_path: Path) -> None:
    name, _, adaptive = codec.partition(" ")
    compression = ADAPTIVE[name] if adaptive else CODEC_CONFIGS[name](**CODECS[name])
    plain = run(small_config(strategy), tmp_path / "plain")
    whole = run(small_config(strategy, compression=compression), tmp_path / "whole")
    assert whole[0][0].digest == whole[1][0].digest != plain[0][0].digest
    assert whole[0][1] < 0.75 * plain[0][1]
    resumed = run(small_config(strategy, compression=compression), tmp_path / "resumed", tmp_path / "whole")
    assert [outcome.digest for outcome, _ in resumed] == [outcome.digest for outcome, _ in whole]


def test_demo_sends_a_fraction_of_the_gradients(tmp_path: Path) -> None:
    plain = run(small_config("allreduce"), tmp_path / "plain")
    optimizer = SGDConfig(lr=0.3, momentum=0.0, warmup_steps=2)
    found = run(small_config("demo", optimizer=optimizer), tmp_path / "demo")
    assert found[0][0].digest == found[1][0].digest
    assert found[0][1] < 0.1 * plain[0][1]


@pytest.mark.parametrize("strategy", ["eager", "co2", "streaming"])
def test_a_checkpoint_with_a_round_in_flight_resumes_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    config = small_config(strategy, peers=1)
    trainer = small_trainer(config, LocalSwarm(1).collectives[0], 0, tmp_path / "first")
    for _ in range(5):
        trainer.step()
    path = trainer.save()
    again = small_trainer(config, LocalSwarm(1).collectives[0], 0, tmp_path / "second")
    again.resume(checkpoint.load(path), exactly=True)
    ends = trainer.run(), again.run()
    assert ends[0].digest == ends[1].digest
    states = [dict(one.model.state_dict()) for one in (trainer, again)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
