"""L-GreCo between members: one table, one choice, and nothing of a round that did not close."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swarmkit.optim import AllReduce, Reduced, RoundFailed, RoundKey
from swarmkit.optim.compression.casting import Casting
from swarmkit.optim.compression.codec import Codec
from swarmkit.optim.compression.compressed import CompressedAveraging
from swarmkit.optim.compression.lgreco import LGreCo, error_table, size_table
from swarmkit.optim.compression.powersgd import PowerSGD
from swarmkit.optim.compression.qsgd import QSGD
from swarmkit.optim.compression.random_k import RandomK
from swarmkit.optim.compression.sparse import TopK
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import adamw

CODECS: dict[str, Callable[[], Codec]] = {
    "topk": lambda: TopK(0.05),
    "powersgd": lambda: PowerSGD(4),
    "qsgd": lambda: QSGD(4, bucket=128),
    "randomk": lambda: RandomK(0.05, unbiased=False),
}
SHAPES = ((48, 32), (7,), (96, 32), (32, 32), (40, 40, 2))
COMPRESSED = [shape for shape in SHAPES if len(shape) > 1]
every_codec = pytest.mark.parametrize("codec", CODECS)


def gradients(rank: int, step: int) -> list[Tensor]:
    """Tensors of very different size and structure, so that uniform is far from best."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    normal = partial(torch.randn, generator=generator)
    scales = [1.0, 1.0, 0.01, 10.0, 0.1]
    scales[rank % 5] *= 30  # each member cares for another tensor most
    found = [scale * normal(shape).pow(3) for scale, shape in zip(scales, SHAPES, strict=True)]
    found[2] += 0.3 * normal(96, 2) @ normal(2, 32)
    return found


def adaptive(codec: Codec, collective: LocalCollective, **options: Any) -> LGreCo:
    averaging = CompressedAveraging(codec, collective, error_feedback=codec.contractive)
    return LGreCo(averaging, **{"period": 4, "window": 2, **options})


def average(lgreco: LGreCo, rank: int, step: int, weight: float = 1.0) -> Reduced:
    return lgreco.begin(gradients(rank, step), round=RoundKey("gradients", step), weight=weight).result()


def run(codec: str, members: int = 3, rounds: int = 6, **options: Any) -> list[tuple[LGreCo, list[Reduced]]]:
    """Members that average their gradients; the first table is in round 4."""

    def task(collective: LocalCollective, rank: int) -> tuple[LGreCo, list[Reduced]]:
        lgreco = adaptive(CODECS[codec](), collective, **options)
        return lgreco, [average(lgreco, rank, step) for step in range(rounds)]

    return LocalSwarm(members).run(task)


def check_agreement(members: Sequence[tuple[LGreCo, list[Reduced]]]) -> None:
    """One choice on all members, and the same means bit for bit."""
    (first, means), *others = members
    assert first.parameters is not None
    for other, found in others:
        assert other.parameters == first.parameters, "members chose differently"
        for a, b in zip(means, found, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a.tensors, b.tensors, strict=True))


@every_codec
@pytest.mark.parametrize("squared", [False, True])
def test_all_members_choose_the_same_and_send_fewer_bytes_at_no_more_error(codec: str, squared: bool) -> None:
    members = run(codec, squared=squared)
    check_agreement(members)
    lgreco, reduced = members[0]
    found = lgreco.allocation
    assert found is not None
    assert found.error <= found.budget
    # Errors of random-k are concave in the bytes: of four tensors, the relaxation splits one.
    assert found.gap < (0.2 if codec == "randomk" and not squared else 0.01)
    baseline = lgreco.candidates.index(lgreco.codec.parameter)  # type: ignore[arg-type]
    uniform = int(size_table(lgreco.codec, COMPRESSED, lgreco.candidates)[:, baseline].sum())
    assert found.bytes < uniform
    # From the round after the table on, and not before.
    assert reduced[5].bytes_sent < reduced[3].bytes_sent
    assert reduced[4].bytes_sent > reduced[3].bytes_sent


@every_codec
def test_the_choice_counts_from_the_round_after_the_table(codec: str) -> None:
    def task(collective: LocalCollective, rank: int) -> list[tuple[float, ...] | None]:
        lgreco = adaptive(CODECS[codec](), collective)
        seen = []
        for step in range(6):
            pending = lgreco.begin(gradients(rank, step), round=RoundKey("gradients", step), weight=1.0)
            seen.append(lgreco.parameters)
            pending.result()
        return seen

    for seen in LocalSwarm(2).run(task):
        assert seen[:5] == [None] * 5
        assert seen[5] is not None


@every_codec
def test_what_comes_back_is_what_was_given_without_the_table(codec: str) -> None:
    def task(collective: LocalCollective, rank: int) -> list[list[Tensor]]:
        lgreco = adaptive(CODECS[codec](), collective)
        exact = [torch.full((3,), float(rank)), torch.tensor(2.0 * rank, dtype=torch.float64)]
        keys = [RoundKey("gradients", step) for step in range(6)]
        return [lgreco.begin(gradients(rank, k.index), exact, round=k, weight=1.0).result().tensors for k in keys]

    for results in LocalSwarm(2).run(task):
        for tensors in results:
            assert [tuple(tensor.shape) for tensor in tensors] == [*SHAPES, (3,), ()]
            assert tensors[-2].tolist() == [0.5] * 3
            assert tensors[-1].item() == 1.0


@every_codec
def test_the_table_is_of_the_sum_of_what_was_given_to_send_over_the_window(codec: str) -> None:
    def task(collective: LocalCollective, rank: int) -> None:
        kind = CODECS[codec]()
        lgreco = adaptive(kind, collective, period=6, window=3)
        total = [torch.zeros(shape) for shape in COMPRESSED]
        for step in range(12):
            offered = [tensor for tensor in gradients(rank, step) if tensor.dim() > 1]
            if step % 6 >= 3:
                total = [t + g for t, g in zip(total, offered, strict=True)]
            average(lgreco, rank, step)
            if step == 6:
                table = error_table(kind, total, lgreco.candidates).float().double().numpy()
                assert lgreco.allocation is not None
                measured = table[range(len(COMPRESSED)), lgreco.allocation.choices].sum()
                assert math.isclose(measured, lgreco.allocation.error, rel_tol=1e-5)
                total = [torch.zeros(shape) for shape in COMPRESSED]

    LocalSwarm(1).run(task)


def test_a_peer_that_only_observes_has_no_say_and_chooses_alike() -> None:
    def task(collective: LocalCollective, rank: int, observer: float) -> LGreCo:
        lgreco = adaptive(TopK(0.05), collective)
        for step in range(5):
            scale = 1.0 if rank < 2 else 1e6
            tensors = [scale * tensor for tensor in gradients(rank, step)]
            weight = 1.0 if rank < 2 else observer
            lgreco.begin(tensors, round=RoundKey("gradients", step), weight=weight).result()
        return lgreco

    silent = LocalSwarm(3).run(partial(task, observer=0.0))
    alone = LocalSwarm(2).run(partial(task, observer=0.0))
    loud = LocalSwarm(3).run(partial(task, observer=1.0))
    assert {lgreco.parameters for lgreco in silent} == {alone[0].parameters}
    assert alone[0].allocation is not None
    assert loud[0].allocation is not None
    assert silent[2].allocation == alone[0].allocation != loud[0].allocation


def test_nobody_s_errors_leave_the_choice_as_it_is() -> None:
    def task(collective: LocalCollective, rank: int) -> LGreCo:
        lgreco = adaptive(TopK(0.05), collective)
        for step in range(5):
            zeros = [torch.zeros(shape) for shape in SHAPES]
            lgreco.begin(zeros, round=RoundKey("gradients", step), weight=1.0).result()
        return lgreco

    for lgreco in LocalSwarm(2).run(task):
        assert lgreco.parameters is None
        assert lgreco.table == []


@every_codec
def test_a_failed_round_commits_nothing_of_its_table_and_its_window(codec: str) -> None:
    class Failing:
        """A collective whose rounds can be made to fail."""

        def __init__(self, collective: LocalCollective) -> None:
            self.peer_id = collective.peer_id
            self.broken = False
            self._collective = collective

        def _do(self, name: str, *args: Any, **keywords: Any) -> Future[Any]:
            if self.broken:
                future: Future[Any] = Future()
                future.set_exception(RoundFailed("the link is down"))
                return future
            found: Future[Any] = getattr(self._collective, name)(*args, **keywords)
            return found

        def all_reduce(self, *args: Any, **keywords: Any) -> Future[Any]:
            return self._do("all_reduce", *args, **keywords)

        def all_gather(self, *args: Any, **keywords: Any) -> Future[Any]:
            return self._do("all_gather", *args, **keywords)

        def close(self) -> None:
            self._collective.close()

    collective = Failing(LocalSwarm(1).collectives[0])
    lgreco = adaptive(CODECS[codec](), collective)  # type: ignore[arg-type]
    for step in range(9):
        collective.broken = step in (3, 4)  # of the window, and the table
        before = deepcopy(lgreco.state_dict())
        if collective.broken:
            with pytest.raises(RoundFailed):
                average(lgreco, 0, step)
            assert equal(before, lgreco.state_dict())
        else:
            average(lgreco, 0, step)
        assert (lgreco.parameters is None) == (step < 8)


def equal(a: Any, b: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@every_codec
@pytest.mark.parametrize("pause", [3, 4, 5, 7])
def test_resuming_in_the_middle_of_a_window_is_bit_exact(codec: str, pause: int) -> None:
    def task(collective: LocalCollective, rank: int, pause: int) -> list[Tensor]:
        lgreco = adaptive(CODECS[codec](), collective)
        tensors: list[Tensor] = []
        for step in range(10):
            if step == pause:
                state = deepcopy(lgreco.state_dict())
                lgreco = adaptive(CODECS[codec](), collective)
                lgreco.load_state_dict(state)
            tensors += average(lgreco, rank, step).tensors
        return tensors

    straight = LocalSwarm(2).run(partial(task, pause=-1))
    resumed = LocalSwarm(2).run(partial(task, pause=pause))
    assert equal(straight, resumed)


@every_codec
def test_residuals_and_bases_outlive_a_change_of_parameters(codec: str) -> None:
    ((lgreco, _),) = run(codec, members=1, rounds=4)
    before = lgreco.state_dict()["averaging"]
    average(lgreco, 0, 4)
    assert lgreco.parameters is not None
    after = lgreco.state_dict()["averaging"]
    if lgreco.codec.contractive:
        # What was left out grows by what was left out now: nothing is dropped.
        mean = average(lgreco, 0, 5)
        later = lgreco.state_dict()["averaging"]["residual"]
        for old, given, got, new in zip(
            after["residual"], gradients(0, 5)[:1], mean.tensors[:1], later[:1], strict=False
        ):
            torch.testing.assert_close(new, old + given - got)
            assert bool(old.any())
    if codec == "powersgd":
        assert [basis.shape[0] for basis in after["state"]] == [basis.shape[0] for basis in before["state"]]
        assert all(bool(basis.any()) for basis in after["state"])


# -- members that come late ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["topk", "qsgd"])
def test_a_joiner_without_the_parameters_is_understood_and_agrees_from_the_next_table_on(codec: str) -> None:
    def task(collective: LocalCollective, rank: int) -> tuple[LGreCo, list[Reduced], bool]:
        lgreco = adaptive(CODECS[codec](), collective)
        reduced = [average(lgreco, rank, step) for step in range(6)]
        if rank == 2:
            lgreco = adaptive(CODECS[codec](), collective)  # its second life
        alone = lgreco.parameters is None
        reduced += [average(lgreco, rank, step) for step in range(6, 10)]
        return lgreco, reduced[6:], alone

    members = LocalSwarm(3).run(task)
    assert [alone for _, _, alone in members] == [False, False, True]
    check_agreement([(lgreco, reduced) for lgreco, reduced, _ in members])
    assert members[2][0].allocation == members[0][0].allocation


@every_codec
def test_a_joiner_with_the_shared_state_sends_as_the_others_do_from_its_first_round(codec: str) -> None:
    shared: dict[str, Any] = {}

    def task(collective: LocalCollective, rank: int) -> tuple[LGreCo, list[Reduced]]:
        lgreco = adaptive(CODECS[codec](), collective)
        reduced = [average(lgreco, rank, step) for step in range(6)]
        if rank == 0:
            shared.update(lgreco.shared_state())
        average(lgreco, rank, 6)  # by its end, the state is there
        if rank == 2:
            lgreco = adaptive(CODECS[codec](), collective)
            lgreco.load_shared_state(shared)
            reduced.append(average(lgreco, rank, 7, weight=0.0))
        else:
            reduced.append(average(lgreco, rank, 7))
        assert lgreco.parameters == tuple(shared["parameters"])
        reduced += [average(lgreco, rank, step) for step in range(8, 12)]
        return lgreco, reduced[6:]

    check_agreement(LocalSwarm(3).run(task))


def test_ranks_that_differ_are_not_averaged() -> None:
    def task(collective: LocalCollective, rank: int) -> str:
        lgreco = adaptive(PowerSGD(4), collective)
        for step in range(6):
            average(lgreco, rank, step)
        if rank == 1:
            lgreco = adaptive(PowerSGD(4), collective)
        try:
            average(lgreco, rank, 6, weight=float(rank == 0))
        except RoundFailed:
            return "failed"
        return "averaged"

    assert "failed" in LocalSwarm(2, round_timeout=5.0).run(task)


@pytest.mark.parametrize("entry", [-1e30, 1e30, 0.0])
def test_a_table_from_nowhere_breaks_nothing(entry: float, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LGreCo._measure

    def measure(self: LGreCo, layout: Any, *, contributes: bool) -> Tensor:
        table = honest(self, layout, contributes=contributes)
        return torch.full_like(table, entry) if self.averaging._collective.peer_id == hostile else table

    hostile = LocalSwarm(3).collectives[2].peer_id
    monkeypatch.setattr(LGreCo, "_measure", measure)
    members = run("topk", members=3)
    assert len({lgreco.parameters for lgreco, _ in members}) == 1


def test_sums_that_overflow_are_left_out_of_the_table() -> None:
    def task(collective: LocalCollective, rank: int) -> LGreCo:
        lgreco = adaptive(QSGD(4, bucket=128), collective)
        for step in range(5):
            tensors = gradients(rank, step)
            if rank == 1:
                tensors = [3e38 * tensor.clamp(-1, 1) for tensor in tensors]
            lgreco.begin(tensors, round=RoundKey("gradients", step), weight=1.0 if rank == 0 else 1e-30).result()
        return lgreco

    first, second = LocalSwarm(2).run(task)
    assert first.parameters == second.parameters is not None


# -- the report, the settings ----------------------------------------------------------------------------------------


@every_codec
@pytest.mark.parametrize("squared", [False, True])
def test_the_report_tells_what_each_tensor_is_sent_with(codec: str, squared: bool) -> None:
    names = ["in", "bias", "up", "down", "conv"]
    ((lgreco, _), _) = run(codec, members=2, names=names, squared=squared)
    assert [row.tensor for row in lgreco.table] == ["in", "up", "down", "conv"]
    assert [row.size for row in lgreco.table] == [math.prod(shape) for shape in COMPRESSED]
    assert tuple(row.parameter for row in lgreco.table) == lgreco.parameters
    assert lgreco.allocation is not None
    assert sum(row.bytes for row in lgreco.table) == lgreco.allocation.bytes
    assert math.isclose(sum(row.error_share for row in lgreco.table), 1.0, rel_tol=1e-9)
    assert all(row.error_share >= 0 for row in lgreco.table)


def test_settings_that_make_no_sense_are_refused() -> None:
    collective = LocalSwarm(1).collectives[0]
    averaging = CompressedAveraging(TopK(0.05), collective)
    for settings, complaint in (
        ({"period": 0}, "period=0"),
        ({"window": 0}, "window=0"),
        ({"alpha": 0.0}, "alpha="),
        ({"alpha": math.inf}, "alpha="),
        ({"candidates": [0.1, 2.0]}, "density="),
    ):
        with pytest.raises(ValueError, match=complaint):
            LGreCo(averaging, **settings)
    with pytest.raises(ValueError, match="no parameter"):
        LGreCo(CompressedAveraging(Casting("fp16"), collective))
    lgreco = LGreCo(averaging, names=["a"], period=1)
    with pytest.raises(ValueError, match="1 names for 5"):
        lgreco.begin(gradients(0, 0), round=RoundKey("gradients", 1), weight=1.0)
    with pytest.raises(ValueError, match="not of L-GreCo"):
        lgreco.load_state_dict(averaging.state_dict())


def test_tensors_that_no_codec_gets_need_no_table() -> None:
    lgreco = adaptive(TopK(0.05), LocalSwarm(1).collectives[0], period=1)
    for step in range(3):
        (mean,) = lgreco.begin([torch.ones(3)], round=RoundKey("gradients", step), weight=1.0).result().tensors
        assert mean.tolist() == [1.0] * 3
    assert lgreco.parameters is None


def test_a_strategy_trains_and_resumes_with_it() -> None:
    def network() -> torch.nn.Sequential:
        generator = torch.Generator().manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
        return net

    def make(net: torch.nn.Module, collective: LocalCollective) -> AllReduce:
        averaging = CompressedAveraging(TopK(0.1), collective, error_feedback=True)
        lgreco = LGreCo(averaging, period=3, window=2)
        return AllReduce(adamw(list(net.parameters())), collective=collective, averaging=lgreco)

    def steps(net: torch.nn.Module, optimizer: AllReduce, rank: int, numbers: range) -> None:
        for step in numbers:
            inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * rank + step))
            optimizer.zero_grad()
            (net(inputs) - inputs.roll(1, 1)).square().mean().backward()
            optimizer.step()

    def task(collective: LocalCollective, rank: int, pause: int) -> tuple[list[Tensor], object]:
        net = network()
        optimizer = make(net, collective)
        steps(net, optimizer, rank, range(pause))
        state = deepcopy(optimizer.state_dict())
        optimizer = make(net, collective)
        optimizer.load_state_dict(state)
        steps(net, optimizer, rank, range(pause, 12))
        assert isinstance(optimizer.averaging, LGreCo)
        return list(net.parameters()), optimizer.averaging.parameters

    (left, chosen), (right, also) = LocalSwarm(2).run(partial(task, pause=0))
    assert equal(left, right)
    assert chosen == also is not None
    assert all(equal(left, net) for net, _ in LocalSwarm(2).run(partial(task, pause=5)))


# -- planted slips ---------------------------------------------------------------------------------------------------


def own_table(patch: pytest.MonkeyPatch) -> None:
    """Each member chooses from its own table, as rank 0 does in the paper's code, but without telling the others."""
    honest = LGreCo._measure
    choose = LGreCo._choose

    def measure(self: LGreCo, layout: Any, *, contributes: bool) -> Tensor:
        self.own = honest(self, layout, contributes=contributes)  # type: ignore[attr-defined]
        return self.own  # type: ignore[attr-defined,no-any-return]

    def wrong(self: LGreCo, errors: Any, asked: Any) -> None:
        choose(self, self.own.double().numpy(), asked)  # type: ignore[attr-defined]

    patch.setattr(LGreCo, "_measure", measure)
    patch.setattr(LGreCo, "_choose", wrong)


def at_once(patch: pytest.MonkeyPatch) -> None:
    """The members choose before the round has closed, each by what it knows: the codec's own for some."""
    choose = LGreCo._choose

    def wrong(self: LGreCo, errors: Any, asked: Any) -> None:
        shift = int(self.averaging._collective.peer_id == LocalSwarm(3).collectives[0].peer_id)
        choose(self, np.roll(errors, shift, axis=0), asked)

    patch.setattr(LGreCo, "_choose", wrong)


@pytest.mark.parametrize("slip", [own_table, at_once])
def test_a_planted_slip_makes_members_differ(
    slip: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slip(monkeypatch)
    with pytest.raises(AssertionError, match="chose differently"):
        check_agreement(run("topk"))
