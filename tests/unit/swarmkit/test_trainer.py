"""The training loop with replicas as threads: agreement, progress, resuming, and what stops it."""

import dataclasses
import errno
import threading
from pathlib import Path

import pytest
import torch

from swarmkit import checkpoint
from swarmkit.build import Together, open_corpus, open_stream
from swarmkit.config import CheckpointConfig, EvalConfig
from swarmkit.errors import JoinFailed, NotInvited, TrainingDiverged
from swarmkit.evaluation import at_anchor, evaluate
from swarmkit.optim.synced import RoundReport
from swarmkit.peers.errors import Refusal
from swarmkit.peers.local import LocalCollective, LocalSwarm
from swarmkit.surroundings import Surroundings
from swarmkit.trainer import Outcome, Trainer
from swarmkit.training_state import flatten, model_tensors, restore
from tests.unit.swarmkit.harness_replicas import STRATEGIES, Donor, Recorder, small_config, small_trainer


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replicas_learn_and_end_with_the_same_parameters(strategy: str, tmp_path: Path) -> None:
    config = small_config(strategy, steps=48, eval=EvalConfig(every=16, batches=4))
    recorders = [Recorder(), Recorder()]

    def replica(collective: LocalCollective, rank: int) -> Outcome:
        return small_trainer(config, collective, rank, tmp_path, events=recorders[rank]).run()

    outcomes = LocalSwarm(2).run(replica)
    assert outcomes[0].digest == outcomes[1].digest
    assert all(outcome.finished and outcome.step == 48 for outcome in outcomes)
    scores = [event["loss"] for event in recorders[0].of("eval")]
    assert len(scores) == 3
    assert scores[-1] < scores[0] - 0.2
    # The anchor is the same everywhere, so one member evaluates for all.
    assert not recorders[1].of("eval")
    assert outcomes[1].score is None


def test_events_tell_where_the_time_went(tmp_path: Path) -> None:
    config = small_config(steps=8)
    recorders = [Recorder(), Recorder()]
    LocalSwarm(2).run(lambda c, rank: small_trainer(config, c, rank, tmp_path, events=recorders[rank]).run())
    train = recorders[0].of("train")
    assert [event["step"] for event in train] == [1, 4, 8]
    assert train[-1]["tokens"] == 8 * 8 * 16
    assert all(event["compute_s"] > 0 and event["tokens_per_s"] > 0 for event in train)
    rounds = recorders[0].of("round")
    assert [event["round"] for event in rounds] == [0, 1]
    assert [event["digest"] for event in rounds] == [event["digest"] for event in recorders[1].of("round")]


def test_the_learning_rate_follows_the_step(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = small_trainer(small_config(steps=8), LocalSwarm(1).collectives[0], 0, tmp_path, events=recorder)
    trainer.run()
    rates = {event["step"]: event["lr"] for event in recorder.of("train")}
    assert rates[1] == pytest.approx(1e-2 / 3)
    assert rates[4] > rates[8] > 1e-3


def _run_to_the_end(folder: Path, strategy: str, resume: Path | None = None) -> list[tuple[Outcome, Trainer]]:
    config = small_config(strategy)

    def replica(collective: LocalCollective, rank: int) -> tuple[Outcome, Trainer]:
        trainer = small_trainer(config, collective, rank, folder)
        if resume is not None:
            # Of streaming, rounds land a step after the eighth.
            first = min((resume / f"peer-{rank}" / "checkpoints").iterdir())
            trainer.resume(checkpoint.load(first), exactly=True)
            assert 8 <= trainer.optimizer.step_count < config.steps
        return trainer.run(), trainer

    return LocalSwarm(2).run(replica)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    whole = _run_to_the_end(tmp_path / "whole", strategy)
    resumed = _run_to_the_end(tmp_path / "resumed", strategy, tmp_path / "whole")
    for (expected, _), (outcome, _) in zip(whole, resumed, strict=True):
        assert (outcome.digest, outcome.tokens, outcome.round) == (expected.digest, expected.tokens, expected.round)
    for (_, one), (_, other) in zip(whole, resumed, strict=True):
        held: list[dict[str, torch.Tensor]] = [{}, {}]
        first, second = (flatten(t.optimizer.state_dict(), "x", held[i]) for i, t in enumerate((one, other)))
        assert first == second
        assert all(torch.equal(tensor, held[1][name]) for name, tensor in held[0].items())
        assert one.source.state() == other.source.state()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_in_the_middle_of_a_window_resumes_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    config = small_config(strategy, peers=1)
    trainer = small_trainer(config, LocalSwarm(1).collectives[0], 0, tmp_path / "first")
    for _ in range(6):
        trainer.step()
    path = trainer.save()
    again = small_trainer(config, LocalSwarm(1).collectives[0], 0, tmp_path / "second")
    again.resume(checkpoint.load(path), exactly=True)
    assert again.run().digest == trainer.run().digest


def test_a_checkpoint_starts_more_peers_than_there_were(tmp_path: Path) -> None:
    _run_to_the_end(tmp_path / "two", "diloco")
    state = checkpoint.load(tmp_path / "two" / "peer-0" / "checkpoints" / "step-00000008")
    config = small_config(peers=3)

    def replica(collective: LocalCollective, rank: int) -> Outcome:
        trainer = small_trainer(config, collective, rank, tmp_path / "three")
        trainer.resume(state, exactly=False)
        assert (trainer.optimizer.step_count, trainer.optimizer.digest()) == (8, state[1]["digest"])
        return trainer.run()

    assert len({outcome.digest for outcome in LocalSwarm(3).run(replica)}) == 1


@pytest.mark.parametrize("strategy", ["eager", "eager fragments", "co2", "streaming"])
def test_a_peer_more_than_there_were_observes_the_rounds_that_were_under_way(strategy: str, tmp_path: Path) -> None:
    config = small_config(strategy.partition(" ")[0], peers=3, steps=24)
    if strategy == "eager fragments":
        config.strategy = dataclasses.replace(config.strategy, fragments=2)  # type: ignore[call-arg]

    def before(collective: LocalCollective, rank: int) -> Path:
        trainer = small_trainer(config, collective, rank, tmp_path / "two")
        while trainer.optimizer.step_count < 9 or not trainer.optimizer.snapshot()[1]["missing"]:
            trainer.step()
        return trainer.save()

    paths = LocalSwarm(2).run(before)
    recorders = [Recorder() for _ in range(3)]

    def after(collective: LocalCollective, rank: int) -> Outcome:
        trainer = small_trainer(config, collective, rank, tmp_path / "three", events=recorders[rank])
        own = rank < 2
        trainer.resume(checkpoint.load(paths[rank % 2]), exactly=own, beside=not own)
        return trainer.run()

    outcomes = LocalSwarm(3).run(after)
    assert len({outcome.digest for outcome in outcomes}) == 1
    first, second, added = ([event["round"] for event in recorder.of("round")] for recorder in recorders)
    assert first == second
    assert added == first[-len(added) :], "what the others had applied is in the state"
    assert len(added) >= 3
    assert not [event for recorder in recorders for event in recorder.of("round") if event["failed"]]


def test_a_checkpoint_after_a_round_holds_the_parameters_once(tmp_path: Path) -> None:
    trainer = small_trainer(small_config(peers=1, steps=8), LocalSwarm(1).collectives[0], 0, tmp_path)
    trainer.run()
    tensors, meta = checkpoint.load(tmp_path / "peer-0" / "checkpoints" / "step-00000008")
    assert not [name for name in tensors if name.startswith("model/")]
    found = model_tensors((tensors, meta))
    assert found.keys() == trainer.model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in trainer.model.state_dict().items())


def test_a_full_disk_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **settings: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    events = Recorder()
    trainer = small_trainer(small_config(peers=1), LocalSwarm(1).collectives[0], 0, tmp_path, events=events)
    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        outcome = trainer.run()
    assert outcome.finished
    assert [event["step"] for event in events.of("checkpoint") if "No space" in event["failed"]] == [8, 16, 16]


def test_the_last_step_is_saved_once(tmp_path: Path) -> None:
    trainer = small_trainer(small_config(peers=1), LocalSwarm(1).collectives[0], 0, tmp_path)
    trainer.run()
    saved = sorted(path.name for path in (tmp_path / "peer-0" / "checkpoints").iterdir())
    assert saved == ["step-00000008", "step-00000016"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_and_leaves_the_checkpoints(bad: float, tmp_path: Path) -> None:
    trainer = small_trainer(small_config(peers=1), LocalSwarm(1).collectives[0], 0, tmp_path)
    loss = trainer.model.loss
    calls = 0

    def poisoned(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        value: torch.Tensor = loss(inputs, targets)  # type: ignore[operator]
        return value * bad if calls == 11 else value

    trainer.model.loss = poisoned  # type: ignore[assignment]
    with pytest.raises(TrainingDiverged, match="in step 11 on peer local0"):
        trainer.run()
    kept = list((tmp_path / "peer-0" / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["step-00000008"]
    checkpoint.verify(kept[0])


def test_what_was_agreed_on_before_a_divergence_is_kept(tmp_path: Path) -> None:
    config = small_config(peers=1, checkpoint=CheckpointConfig(every=0))
    trainer = small_trainer(config, LocalSwarm(1).collectives[0], 0, tmp_path)
    step = trainer.optimizer.step
    digests: list[str] = []

    def poison() -> None:
        digests.append(trainer.optimizer.digest())
        step()
        if trainer.optimizer.step_count == 10:
            for parameter in trainer.model.parameters():
                parameter.data.fill_(float("nan"))

    trainer.optimizer.step = poison  # type: ignore[method-assign, assignment]
    with pytest.raises(TrainingDiverged, match="in step 11"):
        trainer.run()
    tensors, meta = checkpoint.load(tmp_path / "peer-0" / "checkpoints" / "step-00000008")
    assert (meta["round"], meta["digest"]) == (2, digests[-1])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    again = small_trainer(config, LocalSwarm(1).collectives[0], 0, tmp_path / "again")
    again.resume((tensors, meta), exactly=True)
    assert again.run().finished


def test_a_peer_whose_last_round_was_missed_when_the_others_had_left_says_so_and_saves(tmp_path: Path) -> None:
    trainer = small_trainer(small_config(peers=1), LocalSwarm(1).collectives[0], 0, tmp_path)
    trainer.stop.wait = lambda timeout=None: False  # type: ignore[method-assign]
    finish = trainer.optimizer.finish

    def miss() -> None:
        finish()
        trainer.optimizer.needs_state = True

    trainer.optimizer.finish = miss  # type: ignore[method-assign]
    outcome = trainer.run()
    assert "this peer has nobody to fetch a state from" in outcome.left_behind
    assert outcome.score is None
    checkpoint.verify(tmp_path / "peer-0" / "checkpoints" / "step-00000016")


def test_a_peer_that_joins_goes_on_in_its_share_of_the_data(tmp_path: Path) -> None:
    config = small_config(peers=1)
    first = small_trainer(config, LocalSwarm(1).collectives[0], 0, tmp_path)
    for _ in range(8):
        first.step()
    donor = Donor(first.optimizer.snapshot)
    joiner = small_trainer(config, LocalSwarm(1).collectives[0], 0, tmp_path / "joiner", surroundings=donor)
    joiner.take_over(first.ledger.mark)
    joiner.join(observe=False)
    assert joiner.source.state() == first.source.state()
    assert first.ledger.mark == 64


def test_a_run_resumed_on_another_number_of_peers_does_not_begin_its_data_anew(tmp_path: Path) -> None:
    _run_to_the_end(tmp_path / "two", "diloco")
    state = checkpoint.load(tmp_path / "two" / "peer-0" / "checkpoints" / "step-00000008")
    config = small_config(peers=1)
    trainer = small_trainer(config, LocalSwarm(1).collectives[0], 0, tmp_path / "one")
    trainer.resume(state, exactly=False)
    position = trainer.source.state()
    # Two peers have drawn eight batches of eight each.
    assert position["epoch"] * trainer.corpus.size + position["sample"] == 2 * 8 * 8


def test_a_peer_that_missed_a_round_fetches_the_state_and_agrees_again(tmp_path: Path) -> None:
    config = small_config(steps=24)
    swarm = LocalSwarm(2, round_timeout=1.5)
    closed = threading.Event()
    leader: list[Trainer] = []
    donor = Donor(lambda: leader[0].optimizer.snapshot())
    recorder = Recorder()

    def on_time(collective: LocalCollective, rank: int) -> Outcome:
        leader.append(small_trainer(config, collective, rank, tmp_path))
        leader[0].optimizer.on_round.append(lambda report: closed.set())
        return leader[0].run()

    def late(collective: LocalCollective, rank: int) -> Outcome:
        trainer = small_trainer(config, collective, rank, tmp_path, surroundings=donor, events=recorder)
        assert closed.wait(30)
        return trainer.run()

    outcomes = swarm.run(lambda collective, rank: (on_time if rank == 0 else late)(collective, rank))
    assert donor.fetched >= 1
    assert any(event["missed"] for event in recorder.of("round"))
    assert outcomes[0].digest == outcomes[1].digest
    assert outcomes[1].finished
    # Rounds wait for it again: they do not for one that downloads.
    assert donor.said[:2] == ["downloading", "training"]


def test_a_peer_that_cannot_get_the_state_gives_up_after_bounded_attempts(tmp_path: Path) -> None:
    trainer = small_trainer(small_config(peers=1), LocalSwarm(1).collectives[0], 0, tmp_path)
    waits: list[float] = []
    trainer.stop.wait = lambda timeout=None: bool(waits.append(timeout or 0.0))  # type: ignore[method-assign]
    with pytest.raises(JoinFailed, match="8 attempts; the last: this peer has nobody"):
        trainer.join()
    assert waits == sorted(waits)
    assert len(waits) == 8


def test_a_peer_that_is_not_let_in_any_more_does_not_ask_again(tmp_path: Path) -> None:
    def refuse() -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        raise NotInvited("the invitation of 'alice' was revoked", Refusal.revoked)

    donor = Donor(refuse)
    trainer = small_trainer(small_config(peers=1), LocalSwarm(1).collectives[0], 0, tmp_path, surroundings=donor)
    with pytest.raises(NotInvited, match="revoked"):
        trainer.join()
    assert donor.fetched == 1


def test_asked_to_stop_it_hands_its_work_in_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    config = small_config()

    def replica(collective: LocalCollective, rank: int) -> Outcome:
        trainer = small_trainer(config, collective, rank, tmp_path)
        before = trainer.optimizer.inner.step

        def step_and_stop(*arguments: object) -> object:
            if trainer.optimizer.step_count == 5:
                trainer.stop.set()
            return before()

        trainer.optimizer.inner.step = step_and_stop  # type: ignore[method-assign, assignment]
        return trainer.run()

    outcomes = LocalSwarm(2).run(replica)
    assert [(outcome.step, outcome.finished, outcome.round) for outcome in outcomes] == [(6, False, 2)] * 2
    assert outcomes[0].digest == outcomes[1].digest
    checkpoint.verify(tmp_path / "peer-0" / "checkpoints" / "step-00000006")


def test_without_enough_peers_it_stops_in_order(tmp_path: Path) -> None:
    class Lonely(Surroundings):
        def may_go_on(self, report: RoundReport | None) -> bool:
            return report is None or report.round < 1

    trainer = small_trainer(small_config(peers=1), LocalSwarm(1).collectives[0], 0, tmp_path, surroundings=Lonely())
    outcome = trainer.run()
    assert not outcome.finished
    assert outcome.step == 8


def test_evaluating_the_anchor_leaves_the_peers_own_parameters_alone(tmp_path: Path) -> None:
    trainer = small_trainer(small_config(peers=1), LocalSwarm(1).collectives[0], 0, tmp_path)
    for _ in range(6):
        trainer.step()
    own = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    anchor = trainer.optimizer.anchor()
    with at_anchor(trainer.model, trainer.optimizer):
        named = dict(trainer.model.named_parameters())
        assert all(torch.equal(named[name], tensor) for name, tensor in anchor.items())
        assert not all(torch.equal(own[name], tensor) for name, tensor in named.items())
    assert all(torch.equal(own[name], tensor) for name, tensor in trainer.model.state_dict().items())


def test_an_evaluation_weighs_every_prediction_alike(tmp_path: Path) -> None:
    config = small_config()
    trainer = small_trainer(config, LocalSwarm(1).collectives[0], 0, tmp_path)
    device = torch.device("cpu")
    by_threes = evaluate(trainer.model, trainer.corpus.validation(3, 4), device)
    at_once = evaluate(trainer.model, trainer.corpus.validation(12, 1), device)
    assert by_threes.targets == at_once.targets
    assert by_threes.loss == pytest.approx(at_once.loss, rel=1e-5)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(trainer.model, iter(()), device)


def test_one_process_reads_what_the_swarm_reads(tmp_path: Path) -> None:
    config = small_config(peers=3)
    corpus = open_corpus(config)
    apart = [open_stream(config, corpus, slot) for slot in range(3)]
    together = Together([open_stream(config, corpus, slot) for slot in range(3)])
    for _ in range(2):
        for stream in apart:
            assert torch.equal(together.next().inputs, stream.next().inputs)
    together.next()
    copy = Together([open_stream(config, corpus, slot) for slot in range(3)])
    copy.load(together.state())
    assert torch.equal(copy.next().inputs, together.next().inputs)


def test_accumulating_equals_one_larger_batch(tmp_path: Path) -> None:
    """The loss is a mean, so two half batches average to the whole one."""
    half = small_config("allreduce", peers=1, batch_size=4, accumulate=2, steps=4, checkpoint=CheckpointConfig())
    whole = small_config("allreduce", peers=1, batch_size=8, steps=4, checkpoint=CheckpointConfig())
    trainers = [small_trainer(c, LocalSwarm(1).collectives[0], 0, tmp_path / str(c.accumulate)) for c in (half, whole)]
    for trainer in trainers:
        trainer.run()
    for one, other in zip(*(trainer.model.parameters() for trainer in trainers), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_nested_state_survives_json(tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    tree = {"state": {0: {"step": torch.tensor(3.0), "on": True}}, "groups": [{"betas": (0.9, 0.95), "lr": 0.1 + 0.2}]}
    skeleton = flatten(tree, "t", tensors)
    checkpoint.save(tmp_path, tensors, {"step": 1, "tree": skeleton}, keep=1)
    loaded, meta = checkpoint.load(tmp_path / "step-00000001")
    assert restore(meta["tree"], loaded) == tree
    with pytest.raises(TypeError, match="a set cannot be part"):
        flatten({"x": {1}}, "t", tensors)
