"""CompressedAveraging by slices: two payloads a member, error feedback on both roundings, one route for all."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmkit.optim import DiLoCo, Every
from swarmkit.optim.collective import Collective, Reduced, RoundKey
from swarmkit.optim.compression import (
    CODECS,
    QSGD,
    Blockwise,
    CodecWire,
    CompressedAveraging,
    GatherCodec,
    Layout,
    LGreCo,
    Route,
    TopK,
    make_codec,
)
from swarmkit.optim.compression.route import choose
from swarmkit.optim.errors import RoundFailed
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.compression.offers import Recorder, contribution, exact_ones
from tests.unit.optim.replicas import adamw, trained

GATHERED = [name for name in CODECS if isinstance(make_codec(name), GatherCodec)]
FED_BACK = [name for name in GATHERED if make_codec(name).contractive]


def sharded(name: str, collective: Collective, **options: Any) -> CompressedAveraging:
    codec = make_codec(name, min_size=64)
    return CompressedAveraging(codec, collective, route=Route.sharded, **options)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- which way ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "bytes_per_number", "route"),
    [
        (3, 1.0, Route.gather),
        (4, 1.0, Route.gather),
        (5, 1.0, Route.sharded),
        (8, 0.5, Route.gather),
        (9, 0.5, Route.sharded),
        (1000, 1.9, Route.sharded),
        (3, 2.0, Route.fp16),
        (2, 2.0, Route.gather),
    ],
)
def test_the_route_is_a_gather_until_float16_costs_less_and_then_slices(
    members: int, bytes_per_number: float, route: Route
) -> None:
    assert choose(members, int(bytes_per_number * 1000), 1000) is route


def test_a_large_group_reduces_by_slices_instead_of_gathering_and_says_so() -> None:
    """int8 of M members is gathered while M * 1 byte is at most the 4 of a float16 all-reduce."""

    def task(collective: LocalCollective, rank: int) -> tuple[list[str], list[str]]:
        recorder = Recorder(collective)
        averaging = CompressedAveraging(Blockwise(8), recorder)
        found = [
            averaging.begin([normal(64, 64, seed=rank)], round=RoundKey("x", i), weight=1.0).result() for i in range(3)
        ]
        return recorder.operations, [reduced.route for reduced in found]

    for operations, routes in LocalSwarm(3).run(task):
        assert operations == ["all_gather"] * 3
        assert routes == ["gather"] * 3
    for operations, routes in LocalSwarm(5).run(task):
        assert operations == ["all_gather", "sharded", "sharded"]
        assert routes == ["gather", "sharded", "sharded"]


def test_a_strategy_reports_the_route() -> None:
    def make(parameters: list[Tensor], collective: Collective) -> DiLoCo:
        averaging = CompressedAveraging(Blockwise(8, block=8, min_size=16), collective, error_feedback=True)
        return DiLoCo(adamw(parameters), collective=collective, sync=Every(4), averaging=averaging)

    replicas = trained(make, replicas=6, steps=12)
    assert len({optimizer.digest() for _, optimizer in replicas}) == 1
    for _, optimizer in replicas:
        assert optimizer.last_report is not None
        assert (optimizer.last_report.route, optimizer.last_report.failed) == ("sharded", None)


def test_a_route_is_for_payloads_that_cannot_be_summed() -> None:
    with pytest.raises(ValueError, match="powersgd can be summed"):
        CompressedAveraging(make_codec("powersgd"), LocalSwarm(1).collectives[0], route=Route.sharded)


def test_a_joiner_with_the_shared_state_takes_the_others_route_at_once() -> None:
    swarm = LocalSwarm(6)
    swarm.kill("local5")
    members = [CompressedAveraging(Blockwise(8), c) for c in swarm.collectives]

    def together(index: int, ranks: range) -> list[Reduced]:
        tensor = torch.ones(64, 64)
        pendings = [members[r].begin([tensor], round=RoundKey("x", index), weight=1.0) for r in ranks]
        return [pending.result() for pending in pendings]

    for index in range(2):
        together(index, range(5))
    assert [member.shared_state() for member in members] == [{"members": 5}] * 5 + [{"members": None}]
    recorder = Recorder(swarm.revive("local5"))
    members[5] = CompressedAveraging(Blockwise(8), recorder)
    members[5].load_shared_state(members[0].shared_state())
    assert len(together(2, range(6))[5].members) == 6
    assert recorder.operations == ["sharded"]


@pytest.mark.parametrize("wrong", [{"members": 0}, {"members": -3}, {"members": True}, {"members": "5"}, {"codec": 1}])
def test_the_shared_state_of_a_stranger_is_checked(wrong: dict[str, Any]) -> None:
    averaging = CompressedAveraging(Blockwise(8), LocalSwarm(1).collectives[0])
    averaging.load_shared_state({"members": 7})
    with pytest.raises(ValueError, match="the averaging shares"):
        averaging.load_shared_state(wrong)
    assert averaging.shared_state() == {"members": 7}
    averaging.load_shared_state({})
    assert averaging.shared_state() == {"members": None}


# -- the mean and its bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GATHERED)
def test_eight_members_send_two_payloads_each_instead_of_seven(name: str) -> None:
    def task(collective: LocalCollective, rank: int, route: Route) -> Reduced:
        averaging = CompressedAveraging(make_codec(name), collective, route=route)
        tensors = [normal(300, 200, seed=rank), normal(50_000, seed=rank + 50), normal(64, 64, seed=rank + 99)]
        return averaging.begin(tensors, round=RoundKey("x", 0), weight=1.0 + rank).result()

    gathered = LocalSwarm(8).run(lambda c, rank: task(c, rank, Route.gather))
    found = LocalSwarm(8).run(lambda c, rank: task(c, rank, Route.sharded))
    payload = sum(reduced.bytes_sent for reduced in gathered) / 7 / 8
    for reduced in found:
        assert reduced.bytes_sent <= 2.2 * payload
        assert reduced.bytes_received <= 2.2 * payload
        assert (reduced.members, reduced.weights) == (gathered[0].members, gathered[0].weights)
        assert all(torch.equal(a, b) for a, b in zip(reduced.tensors, found[0].tensors, strict=True))
        assert [t.shape for t in reduced.tensors] == [t.shape for t in gathered[0].tensors]


@pytest.mark.parametrize("bits", [4, 8])
def test_the_mean_of_eight_is_off_by_two_roundings_at_most(bits: int) -> None:
    codec = Blockwise(bits, block=64, min_size=0)
    tensors = [normal(999, seed=rank) * 10.0 ** (rank % 3) for rank in range(8)]
    found = LocalSwarm(8).run(
        lambda c, rank: (
            CompressedAveraging(codec, c, route=Route.sharded)
            .begin([tensors[rank]], exact_ones(rank), round=RoundKey("x", 0), weight=1.0)
            .result()
        )
    )
    mean = torch.stack(tensors).double().mean(0)
    worst = 0.0
    for start in range(0, 999, 64):
        tops = [float(t[start : start + 64].abs().max()) for t in tensors]
        top = float(mean[start : start + 64].abs().max())
        first = sum(tops) / 8 / (2**bits - 2)
        bound = first + (top + first) / (2**bits - 2)
        error = float((found[0].tensors[0].double() - mean)[start : start + 64].abs().max())
        assert error <= bound * (1 + 1e-4)
        worst = max(worst, error / bound)
    assert worst > 0.2  # the bound says something
    for position in (0, 1):
        exact = torch.stack([exact_ones(rank)[position].double() for rank in range(8)]).mean(0)
        torch.testing.assert_close(found[0].tensors[1 + position].double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["qsgd", "ternary"])
def test_draws_are_independent_between_slices_rounds_and_the_two_roundings(name: str) -> None:
    codec = make_codec(name, min_size=0, **({"clip": None} if name == "ternary" else {}))
    tensor = normal(4, 1280)

    def task(collective: LocalCollective, rank: int) -> list[Tensor]:
        averaging = CompressedAveraging(codec, collective, route=Route.sharded)
        return [averaging.begin([tensor], round=RoundKey("x", i), weight=1.0).result().tensors[0] for i in range(40)]

    found = LocalSwarm(4).run(task)[0]
    alone = float((found[0] - tensor).norm())
    together = float((torch.stack(found).mean(0) - tensor).norm())
    assert together < 2 * alone / math.sqrt(40)


# -- error feedback ----------------------------------------------------------------------------------------------------


class Books:
    """Members that come and go, and what the rounds add up to: sum of W * mean = sum of w * (given - residual)."""

    def __init__(self, name: str, weights: list[float], kind: type[CompressedAveraging] = CompressedAveraging) -> None:
        self.swarm = LocalSwarm(len(weights))
        self.weights = weights
        codec = make_codec(name, min_size=0)
        self.members = [
            kind(codec, c, error_feedback=True, route=Route.sharded, generator=3) for c in self.swarm.collectives
        ]
        self.given = [torch.zeros(30, 41) for _ in weights]
        self.sum = torch.zeros(30, 41)

    def round(self, index: int, ranks: list[int]) -> None:
        for rank, collective in enumerate(self.swarm.collectives):
            alive = collective.peer_id in self.swarm._alive
            if rank not in ranks and alive:
                self.swarm.kill(collective.peer_id)
            elif rank in ranks and not alive:
                back = self.swarm.revive(collective.peer_id)
                self.swarm.collectives.sort(key=lambda c: c.peer_id)
                self.members[rank]._collective = back
        pendings = []
        for rank in ranks:
            tensor = normal(30, 41, seed=100 * index + rank)
            self.given[rank] += tensor
            pendings.append(self.members[rank].begin([tensor], round=RoundKey("x", index), weight=self.weights[rank]))
        results = [pending.result() for pending in pendings]
        self.sum += sum(self.weights[rank] for rank in ranks) * results[0].tensors[0]

    def balance(self) -> float:
        """How far the two sides are apart, as a share of what was given."""
        owed = torch.zeros(30, 41)
        for member, weight, given_ones in zip(self.members, self.weights, self.given, strict=True):
            residual = member.state_dict()["residual"]
            owed += weight * (given_ones - (residual[0] if residual else 0.0))
        return float((self.sum - owed).norm() / self.sum.norm())


@pytest.mark.parametrize("name", FED_BACK)
def test_error_feedback_telescopes_over_both_roundings_while_members_come_and_go(name: str) -> None:
    """Slices have other owners in each round, and nothing of what they owe is lost."""
    books = Books(name, [1.0, 2.0, 5.0, 3.0])
    for index, ranks in enumerate([[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [1, 3], [0, 1, 2, 3]]):
        books.round(index, ranks)
    assert books.balance() < 1e-5


def test_the_books_notice_an_owner_that_forgets_what_it_left_out() -> None:
    """Planted."""

    class Forgets(CompressedAveraging):
        def _commit(self, flat: Tensor, weight: float, outcome: Any) -> None:
            outcome.wired.left.zero_()
            super()._commit(flat, weight, outcome)

    books = Books("int8", [1.0, 2.0, 5.0], Forgets)
    for index in range(3):
        books.round(index, [0, 1, 2])
    assert books.balance() > 1e-4


def test_without_the_owners_part_the_error_grows_with_the_rounds_and_with_it_does_not() -> None:
    """Why there is one."""

    class Forgets(CompressedAveraging):
        def _commit(self, flat: Tensor, weight: float, outcome: Any) -> None:
            outcome.wired.left.zero_()
            super()._commit(flat, weight, outcome)

    def debt(kind: type[CompressedAveraging]) -> float:
        """What the rounds' sum lacks after 24 rounds, in means of one round."""

        def task(collective: LocalCollective, rank: int) -> float:
            averaging = kind(Blockwise(4, min_size=0), collective, error_feedback=True, route=Route.sharded)
            for index in range(24):
                pending = averaging.begin([given_ones[index][rank]], round=RoundKey("x", index), weight=1.0)
                lacking[rank] += torch.stack(given_ones[index]).mean(0) - pending.result().tensors[0]
            return float(lacking[rank].norm() / torch.stack(given_ones[0]).mean(0).norm())

        lacking = [torch.zeros(1024) for _ in range(4)]
        return LocalSwarm(4).run(task)[0]

    # Numbers of very different size: the small ones of a block are rounded to zero again and again.
    scale = torch.logspace(-2, 0, 1024)[torch.randperm(1024, generator=torch.Generator().manual_seed(1))]
    given_ones = [[scale * (normal(1024) + normal(1024, seed=10 * i + r)) for r in range(4)] for i in range(24)]
    assert debt(CompressedAveraging) < 0.35
    assert debt(Forgets) > 0.7


@pytest.mark.parametrize("name", GATHERED)
def test_resuming_in_the_middle_of_a_round_repeats_it_and_all_later_ones_bit_for_bit(name: str) -> None:
    def play(states: list[dict[str, Any]] | None) -> tuple[list[Tensor], list[dict[str, Any]], list[dict[str, Any]]]:
        swarm, first = LocalSwarm(3), 0 if states is None else 2
        feedback = make_codec(name).contractive
        members = [sharded(name, c, error_feedback=feedback, generator=7 + bool(states)) for c in swarm.collectives]
        for member, state in zip(members, states or [], strict=False):
            member.load_state_dict(state)
        found: list[Tensor] = []
        middle: list[dict[str, Any]] = []
        for index in range(first, 5):
            key = RoundKey("x", index)
            pendings = [m.begin(contribution(r, index), round=key, weight=1.0 + r) for r, m in enumerate(members)]
            if index == 2:
                middle = [member.state_dict() for member in members]
            results = [pending.result() for pending in pendings]
            found += results[0].tensors if index >= 2 else []
        return found, middle, [member.state_dict() for member in members]

    found, middle, end = play(None)
    again, _, other_end = play(middle)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    for left, right in zip(end, other_end, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left["residual"], right["residual"], strict=True))
        assert left["members"] == right["members"] == 3


def test_a_round_that_fails_leaves_the_residual_as_it_was() -> None:
    recorder = Recorder(LocalSwarm(1).collectives[0])
    averaging = sharded("int4", recorder, error_feedback=True)
    averaging.begin(contribution(0), round=RoundKey("x", 0), weight=1.0).result()
    before = averaging.state_dict()["residual"]
    recorder.fail = [RoundFailed("the network")]
    with pytest.raises(RoundFailed):
        averaging.begin(contribution(0, 1), round=RoundKey("x", 1), weight=1.0).result()
    assert all(torch.equal(a, b) for a, b in zip(before, averaging.state_dict()["residual"], strict=True))


def test_an_observer_owns_a_slice_and_keeps_no_residual() -> None:
    def task(collective: LocalCollective, rank: int) -> tuple[Reduced, list[Tensor]]:
        averaging = sharded("int8", collective, error_feedback=True)
        weight = 0.0 if rank == 1 else 1.0
        reduced = averaging.begin(contribution(rank), exact_ones(rank), round=RoundKey("x", 0), weight=weight).result()
        return reduced, averaging.state_dict()["residual"]

    found = LocalSwarm(3).run(task)
    assert [bool(residual) for _, residual in found] == [True, False, True]
    for reduced, _ in found:
        assert reduced.weights == (1.0, 0.0, 1.0)
        assert all(torch.equal(a, b) for a, b in zip(reduced.tensors, found[0][0].tensors, strict=True))


# -- slices ------------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 3000), min_size=1, max_size=8)


def wire_of(name: str, sizes: list[int], parameters: list[float] | None = None) -> tuple[CodecWire, Tensor, Layout]:
    codec = make_codec(name, min_size=0)
    assert isinstance(codec, GatherCodec)
    tensors = [normal(size, seed=size) for size in sizes]
    layout = Layout.of(tensors, codec.align)
    return CodecWire(codec, layout, parameters, "seed"), layout.flatten(tensors), layout


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(GATHERED), SHAPES, st.integers(1, 12), st.data())
def test_slices_keep_blocks_whole_stay_within_their_limit_and_come_back(
    name: str, sizes: list[int], owners: int, data: st.DataObject
) -> None:
    codec = make_codec(name, min_size=0)
    candidates = st.sampled_from(codec.candidates or (1.0,))
    parameters = [data.draw(candidates) for _ in sizes] if codec.candidates and data.draw(st.booleans()) else None
    wire, flat, layout = wire_of(name, sizes, parameters)
    ends = wire.cut(owners)
    assert ends[0] == 0
    assert ends[-1] == layout.total
    assert len(ends) == owners + 1
    assert ends == sorted(ends)
    assert all(end % codec.align == 0 for end in ends)
    for start, stop in zip(ends, ends[1:], strict=False):
        if start == stop:
            continue
        part, pieces = layout.part(start, stop)
        assert part.total == stop - start
        assert len(pieces) == len(part.shapes)
        encoded = wire.encode(flat[start:stop], start, is_mean=False)
        assert encoded.numel() <= wire.limit(start, stop)
        assert torch.equal(encoded, wire.encode(flat[start:stop].clone(), start, is_mean=False))
        found = wire.decode(encoded, start, stop)
        assert found.shape == flat[start:stop].shape
        if codec.contractive:
            assert float((found - flat[start:stop]).norm()) <= float(flat[start:stop].norm())


def test_slices_take_about_as_many_bytes_each_though_tensors_differ_a_hundredfold() -> None:
    """As L-GreCo leaves them; cut by numbers alone the fullest slice would take five times the mean."""
    wire, flat, _ = wire_of("topk", [40_000] * 5, [0.5, 0.001, 0.001, 0.001, 0.01])
    ends = wire.cut(5)
    sizes = [wire.encode(flat[a:b], a, is_mean=False).numel() for a, b in zip(ends, ends[1:], strict=False)]
    assert max(sizes) < 1.3 * sum(sizes) / 5


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(GATHERED), st.binary(max_size=400), st.integers(0, 200), st.integers(0, 2**16))
def test_bytes_of_a_stranger_are_read_or_refused(name: str, noise: bytes, where: int, seed: int) -> None:
    wire, flat, layout = wire_of(name, [700, 50])
    honest = wire.encode(flat, 0, is_mean=False)
    spoilt = honest.clone()
    changed = torch.tensor(list(noise), dtype=torch.uint8)[: max(0, honest.numel() - where)]
    spoilt[where : where + changed.numel()] = changed
    raw = torch.tensor(list(noise), dtype=torch.uint8)
    for data in (raw, spoilt, honest[: seed % honest.numel()], torch.cat([honest, raw[:1]])):
        try:
            found = wire.decode(data, 0, layout.total)
        except ValueError:
            continue
        assert found.numel() == layout.total
        assert bool(found.isfinite().all())


def test_wires_differ_in_form_when_anything_differs_that_members_must_agree_on() -> None:
    layout, other = Layout.of([torch.zeros(5000)], 8), Layout.of([torch.zeros(5008)], 8)
    forms = [
        CodecWire(TopK(), layout, None, "a").form,
        CodecWire(TopK(), other, None, "a").form,
        CodecWire(TopK(0.02), layout, None, "a").form,
        CodecWire(TopK(values="float32"), layout, None, "a").form,
        CodecWire(TopK(), layout, [0.05], "a").form,
        CodecWire(QSGD(), Layout.of([torch.zeros(5000)], 512), None, "a").form,
    ]
    assert len(set(forms)) == len(forms)
    assert CodecWire(TopK(), layout, None, "b").form == forms[0]  # each member draws for itself


def test_l_greco_chooses_for_slices_too_and_members_stay_equal() -> None:
    def task(collective: LocalCollective, rank: int) -> tuple[list[Reduced], dict[str, Any]]:
        averaging = CompressedAveraging(TopK(0.1, min_size=0), collective, error_feedback=True, route=Route.sharded)
        lgreco = LGreCo(averaging, period=2, window=2)
        found = []
        for index in range(5):
            tensors = [normal(40, 50, seed=10 * index + rank), normal(600, seed=10 * index + rank).exp()]
            found.append(lgreco.begin(tensors, round=RoundKey("x", index), weight=1.0).result())
        return found, lgreco.shared_state()

    results = LocalSwarm(3).run(task)
    first, shared = results[0]
    assert shared["members"] == 3
    assert len(set(shared["parameters"])) > 1
    for found, state in results[1:]:
        assert state == shared
        for left, right in zip(first, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(left.tensors, right.tensors, strict=True))
