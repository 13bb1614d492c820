"""CompressedAveraging: error feedback in two phases, resuming, chains of rounds, healing, large groups."""

from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmkit.optim import DiLoCo, Every
from swarmkit.optim.averaging import Pending
from swarmkit.optim.collective import Collective, Reduced, RoundKey
from swarmkit.optim.compression import CODECS, Blockwise, CompressedAveraging, TopK, make_codec
from swarmkit.optim.errors import RoundFailed
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.compression.offers import FED, Recorder, averaging_of, contribution, exact_ones
from tests.unit.optim.replicas import adamw, trained

# -- two phases, resuming ----------------------------------------------------------------------------------------------


def equal_states(left: dict[str, Any], right: dict[str, Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, list):
            return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)

    return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)


@pytest.mark.parametrize("name", FED)
def test_a_round_that_fails_or_is_cancelled_leaves_the_state_as_it_was(name: str) -> None:
    recorder = Recorder(LocalSwarm(1).collectives[0])
    averaging = averaging_of(name, recorder, error_feedback=True)
    averaging.begin(contribution(0), round=RoundKey("x", 0), weight=1.0).result()
    before = averaging.state_dict()
    recorder.fail = [RoundFailed("the network")]
    pending = averaging.begin(contribution(0, 1), round=RoundKey("x", 1), weight=1.0)
    assert pending.done()
    assert equal_states(averaging.state_dict(), before)
    with pytest.raises(RoundFailed, match="the network"):
        pending.result()
    assert equal_states(averaging.state_dict(), before)
    recorder.hold = True
    pending = averaging.begin(contribution(0, 1), round=RoundKey("x", 2), weight=1.0)
    assert not pending.done()
    pending.cancel()
    with pytest.raises(CancelledError):
        pending.result()
    assert equal_states(averaging.state_dict(), before)


@pytest.mark.parametrize("name", FED)
def test_a_round_begun_again_after_resuming_sends_the_same_bits_and_ends_alike(name: str) -> None:
    recorder = Recorder(LocalSwarm(1).collectives[0])
    averaging = averaging_of(name, recorder, error_feedback=True, generator=5)
    for index in range(3):
        averaging.begin(contribution(0, index), round=RoundKey("x", index), weight=1.0).result()
    recorder.sent.clear()
    pending = averaging.begin(contribution(0, 3), exact_ones(0), round=RoundKey("x", 3), weight=1.0)
    state = averaging.state_dict()  # in the middle of the round
    reduced = pending.result()

    again = Recorder(LocalSwarm(1).collectives[0])
    resumed = averaging_of(name, again, error_feedback=True, generator=99)
    resumed.load_state_dict(state)
    assert equal_states(resumed.state_dict(), state)
    repeated = resumed.begin(contribution(0, 3), exact_ones(0), round=RoundKey("x", 3), weight=1.0).result()
    assert len(recorder.sent) == len(again.sent)
    for left, right in zip(recorder.sent, again.sent, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(reduced.tensors, repeated.tensors, strict=True))
    assert equal_states(averaging.state_dict(), resumed.state_dict())


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    def fresh(name: str, **options: Any) -> CompressedAveraging:
        return averaging_of(name, LocalSwarm(1).collectives[0], **options)

    source = fresh("int8", error_feedback=True)
    source.begin(contribution(0), round=RoundKey("x", 0), weight=1.0).result()
    state = source.state_dict()
    for target, words in (
        (fresh("int4", error_feedback=True), "is of codec 'int8', this run has 'int4'"),
        (fresh("int8"), "residuals of error feedback"),
    ):
        before = target.state_dict()
        with pytest.raises(ValueError, match=words):
            target.load_state_dict(state)
        assert equal_states(target.state_dict(), before)
    with pytest.raises(ValueError, match="lacks 'residual'"):
        source.load_state_dict({key: value for key, value in state.items() if key != "residual"})
    other = fresh("int8", error_feedback=True)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="residual is of tensors"):
        other.begin([torch.zeros(500)], round=RoundKey("x", 0), weight=1.0)
    used = fresh("int8", error_feedback=True)
    used.begin([torch.ones(500)], round=RoundKey("x", 0), weight=1.0).result()
    with pytest.raises(ValueError, match="residual is of tensors"):
        used.load_state_dict(state)
    with pytest.raises(ValueError, match="residual is of other tensors"):
        used.begin([torch.ones(900)], round=RoundKey("x", 1), weight=1.0)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("key", "wrong", "words"),
    [
        ("residual", None, "is a NoneType, not a list of tensors"),
        ("residual", ["x"], "is a str, not a tensor"),
        ("residual", [torch.zeros(24, 20, dtype=torch.int64)], "torch.int64"),
        ("residual", [torch.full((24, 20), float("nan"))], "not finite"),
        ("state", [torch.zeros(20, 4, dtype=torch.float64)], "torch.float64"),
        ("state", [torch.full((20, 4), float("nan"))] * 2, "not finite"),
        ("state", [torch.zeros(20), torch.zeros(45)], "not matrices"),
        ("state", 7, "is a int, not a list"),
        ("residual", [torch.zeros(24, 20)], r"of \[1, 2\] tensors"),
        ("parameters", [1.0, 2.0, 3.0], "parameters"),
        ("parameters", "abc", "not a list of finite numbers"),
        ("parameters", [float("nan")] * 2, "not a list of finite numbers"),
        ("parameters", [True, 1], "not a list of finite numbers"),
        ("members", "many", "members"),
        ("members", -5, "members"),
        ("members", 10**30, "members"),
        ("seed", "zz", "seed 'zz'"),
        ("state_id", None, "id 'None'"),
    ],
)
def test_a_damaged_state_is_refused_when_it_is_loaded(key: str, wrong: Any, words: str, known: bool) -> None:
    source = averaging_of("powersgd", LocalSwarm(1).collectives[0], error_feedback=True)
    source.begin(contribution(0), round=RoundKey("x", 0), weight=1.0).result()
    target = source if known else averaging_of("powersgd", LocalSwarm(1).collectives[0], error_feedback=True)
    before = target.state_dict()
    with pytest.raises(ValueError, match=words):
        target.load_state_dict({**source.state_dict(), key: wrong})
    assert equal_states(target.state_dict(), before)


@pytest.mark.parametrize(
    ("key", "wrong", "words"),
    [
        ("residual", [torch.zeros(3)] * 2, "residual is of tensors"),
        ("state", [torch.zeros(3, 4)] * 2, "bases that PowerSGD starts from are of other tensors"),
        ("parameters", [1.0], "1 of the codec's parameters, for 2 tensors"),
    ],
)
def test_a_state_of_other_tensors_than_those_expected_is_refused(key: str, wrong: Any, words: str) -> None:
    source = averaging_of("powersgd", LocalSwarm(1).collectives[0], error_feedback=True)
    source.begin(contribution(0), round=RoundKey("x", 0), weight=1.0).result()
    target = averaging_of("powersgd", LocalSwarm(1).collectives[0], error_feedback=True)
    target.expect(contribution(0))
    with pytest.raises(ValueError, match=words):
        target.load_state_dict({**source.state_dict(), key: wrong})
    target.load_state_dict(source.state_dict())
    assert equal_states(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("given", [7, torch.Generator().manual_seed(7)])
def test_draws_depend_on_the_seed_the_peer_and_the_round_alone(given: Any) -> None:
    def draws(seed: Any, index: int, rank: int = 0) -> Tensor:
        recorder = Recorder(LocalSwarm(2).collectives[rank], hold=True)
        averaging = averaging_of("qsgd", recorder, generator=seed)
        averaging.begin(contribution(0), round=RoundKey("x", index), weight=1.0)
        return torch.cat([part.view(torch.uint8).reshape(-1) for part in recorder.sent[0]])

    def copy() -> Any:
        return given if isinstance(given, int) else given.clone_state()

    base = draws(copy(), 1)
    assert torch.equal(base, draws(copy(), 1))
    for other in (draws(copy(), 2), draws(copy(), 1, rank=1), draws(8, 1)):
        assert not torch.equal(base, other)


# -- linear chains -----------------------------------------------------------------------------------------------------


def test_the_second_round_of_powersgd_is_for_members_of_the_first_and_goes_on_by_itself() -> None:
    recorders: list[Recorder] = []

    def task(collective: LocalCollective, rank: int) -> Pending:
        recorders.append(Recorder(collective))
        averaging = averaging_of("powersgd", recorders[-1])
        return averaging.begin(contribution(rank), exact_ones(rank), round=RoundKey("x", 4, "abc"), weight=1.0)

    pendings = LocalSwarm(2).run(task)
    results = [pending.result() for pending in pendings]
    for recorder in recorders:
        first, second = recorder.keys
        assert (str(first), str(second)) == ("x/p/4", "x/q/4")
        assert first.lineage not in ("", "abc")  # also of the bases
        assert second.lineage == "x/p/4"  # LocalSwarm's id of the first
        # What is exact rides in the second, whose members are those of the result.
        assert [t.shape for t in recorder.sent[1]][-2:] == [t.shape for t in exact_ones(0)]
    assert results[0].id == "x/q/4"
    assert (
        results[0].bytes_sent == 2 * sum(t.numel() * t.element_size() for sent in recorders[0].sent for t in sent) // 2
    )


def test_powersgd_fails_whole_when_its_second_round_does() -> None:
    recorder = Recorder(LocalSwarm(1).collectives[0])
    averaging = averaging_of("powersgd", recorder, error_feedback=True)
    averaging.begin(contribution(0), round=RoundKey("x", 0), weight=1.0).result()
    before = averaging.state_dict()

    class Second(Recorder):
        def _call(self, operation: str, tensors: Any, round: RoundKey, weight: float) -> Future[Any]:
            if round.name.endswith("/q"):
                self.fail = [RoundFailed("lost")]
            return super()._call(operation, tensors, round, weight)

    averaging._collective = Second(recorder)
    pending = averaging.begin(contribution(0, 1), round=RoundKey("x", 1), weight=1.0)
    with pytest.raises(RoundFailed, match="lost"):
        pending.result()
    assert equal_states(averaging.state_dict(), before)


def test_cancelling_between_two_rounds_of_a_chain_ends_it() -> None:
    recorder = Recorder(LocalSwarm(1).collectives[0])
    averaging = averaging_of("powersgd", recorder)

    class First(Recorder):
        def _call(self, operation: str, tensors: Any, round: RoundKey, weight: float) -> Future[Any]:
            if round.name.endswith("/q"):
                self.hold = True
                under_way.append(super()._call(operation, tensors, round, weight))
                return under_way[-1]
            return super()._call(operation, tensors, round, weight)

    under_way: list[Future[Any]] = []
    averaging._collective = First(recorder)
    pending = averaging.begin(contribution(0), round=RoundKey("x", 0), weight=1.0)
    pending.cancel()
    with pytest.raises(CancelledError):
        pending.result()
    assert all(future.cancelled() for future in under_way)


def test_a_joiner_that_observes_one_round_has_powersgds_bases() -> None:
    swarm = LocalSwarm(3, round_timeout=5.0)
    swarm.kill("local2")

    def averagings() -> list[CompressedAveraging]:
        return [averaging_of("powersgd", c, error_feedback=True) for c in swarm.collectives]

    members = averagings()

    def together(index: int, weights: list[float]) -> list[Reduced]:
        ranks = range(len(weights))
        pendings = [
            members[r].begin(contribution(r, index), round=RoundKey("x", index, "same"), weight=weights[r])
            for r in ranks
        ]
        return [pending.result() for pending in pendings]

    for index in range(3):
        together(index, [1.0, 1.0])
    members[2] = averaging_of("powersgd", swarm.revive("local2"), error_feedback=True)
    found = together(3, [1.0, 1.0, 0.0])
    assert all(torch.equal(a, b) for a, b in zip(found[0].tensors, found[2].tensors, strict=True))
    found = together(4, [1.0, 1.0, 1.0])
    assert found[0].members == ("local0", "local1", "local2")
    states = [member.state_dict() for member in members]
    assert states[0]["state_id"] == states[2]["state_id"]
    assert all(torch.equal(a, b) for a, b in zip(states[0]["state"], states[2]["state"], strict=True))


def test_a_member_that_missed_a_round_of_powersgd_observes_the_next() -> None:
    recorder = Recorder(LocalSwarm(1).collectives[0])
    averaging = averaging_of("powersgd", recorder)
    averaging.begin(contribution(0), round=RoundKey("x", 0, "a"), weight=1.0).result()
    recorder.fail = [RoundFailed("closed without this peer", missed=True)]
    with pytest.raises(RoundFailed):
        averaging.begin(contribution(0), round=RoundKey("x", 1, "a"), weight=1.0).result()
    # Alone, its weight of 0 fails the round; then nobody is left who knows better.
    with pytest.raises(RoundFailed, match="every weight is 0"):
        averaging.begin(contribution(0), round=RoundKey("x", 2, "a"), weight=1.0).result()
    assert recorder.keys[-1].lineage == ""
    assert averaging.begin(contribution(0), round=RoundKey("x", 3, "a"), weight=1.0).result().weights == (1.0,)


# -- large groups ------------------------------------------------------------------------------------------------------


def test_a_joiner_of_a_large_group_finds_the_operation_of_the_others() -> None:
    swarm = LocalSwarm(6)
    swarm.kill("local5")
    members = [CompressedAveraging(Blockwise(8), c) for c in swarm.collectives]
    tensor = torch.ones(64, 64)

    def together(index: int, ranks: range) -> list[Reduced]:
        pendings = [members[r].begin([tensor], round=RoundKey("x", index), weight=1.0) for r in ranks]
        return [pending.result() for pending in pendings]

    for index in range(2):
        together(index, range(5))
    members[5] = CompressedAveraging(Blockwise(8), swarm.revive("local5"))
    assert len(together(2, range(6))[5].members) == 6


# -- in a strategy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
def test_diloco_trains_through_every_codec_and_replicas_stay_equal(name: str) -> None:
    def make(parameters: list[Tensor], collective: Collective) -> DiLoCo:
        parameters_of: dict[str, Any] = {"unbiased": False, "density": 0.3} if name == "randomk" else {}
        codec = make_codec(name, min_size=16, **parameters_of)
        averaging = CompressedAveraging(codec, collective, error_feedback=codec.contractive)
        return DiLoCo(adamw(parameters), collective=collective, sync=Every(4), averaging=averaging)

    replicas = trained(make, replicas=3, steps=16)
    digests = {optimizer.digest() for _, optimizer in replicas}
    assert len(digests) == 1
    assert all(optimizer.last_report is not None and optimizer.last_report.failed is None for _, optimizer in replicas)


def test_topk_without_error_feedback_keeps_no_residual() -> None:
    averaging = CompressedAveraging(TopK(min_size=0), LocalSwarm(1).collectives[0])
    averaging.begin(contribution(0), round=RoundKey("x", 0), weight=1.0).result()
    assert averaging.state_dict()["residual"] == []
