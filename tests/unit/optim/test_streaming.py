"""Streaming DiLoCo: fragments with rounds of their own, their timing, and the identities that notice each slip."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmkit.optim import Collective, DiLoCo, Every, PlainAveraging, RoundReport, SyncedOptimizer, parameter_names
from swarmkit.optim.overlapped import OverlappedOptimizer
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim import by_hand
from tests.unit.optim.replicas import Net, Quadratics, adamw, same, sgd, train, trajectories
from tests.unit.optim.rounding import Rounding

START = torch.linspace(-1, 1, 6, dtype=torch.float64)
LR, MU, OUTER = 0.1, 0.9, 0.4


def paths(
    *,
    h: int = 6,
    steps: int = 30,
    parts: int = 3,
    replicas: int = 3,
    finish: bool = False,
    inner: Any = sgd,
    **options: Any,
) -> list[list[Tensor]]:
    """The product on a vector of 6 cut into parameters, one for each fragment-to-be; the path of the whole vector."""
    problem = Quadratics.of(replicas, dimension=6)
    options = {"outer_lr": OUTER, "outer_momentum": MU, **options}

    def task(collective: LocalCollective, rank: int) -> list[Tensor]:
        xs = [torch.nn.Parameter(part.clone()) for part in START.chunk(parts)]
        optimizer = DiLoCo(sgd(xs), collective=collective, sync=Every(h), **options)
        path = [torch.cat([x.detach() for x in xs])]
        for step in range(steps):
            for x, g in zip(xs, problem(rank, step, path[-1]).chunk(parts), strict=True):
                x.grad = g.clone()
            optimizer.step()
            path.append(torch.cat([x.detach() for x in xs]))
        return path

    return LocalSwarm(replicas).run(task)


def reference(
    *, h: int = 6, steps: int = 30, parts: int = 3, overlap: int = 0, mixing: float = 0.0
) -> list[list[Tensor]]:
    found, _ = by_hand.streaming(
        Quadratics.of(3, dimension=6),
        START,
        replicas=3,
        fragments=[part.tolist() for part in torch.arange(6).chunk(parts)],
        h=h,
        steps=steps,
        lr=LR,
        mu=MU,
        outer_lr=OUTER,
        overlap=overlap,
        mixing=mixing,
    )
    return found


def distance(left: list[list[Tensor]], right: list[list[Tensor]]) -> float:
    pairs = [(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_i21_one_fragment_without_overlap_is_diloco_by_hand() -> None:
    """(I21)"""
    assert distance(paths(fragments=1), reference(parts=1)) < 1e-12
    assert distance(paths(fragments=1, parts=1), paths(fragments=1, parts=3)) < 1e-12


def test_i22_fragments_that_all_meet_at_once_are_diloco() -> None:
    """(I22)"""
    assert distance(paths(fragments=3, staggered=False), paths()) < 1e-12
    assert distance(paths(fragments=3), paths()) > 1e-3


def test_i23_keeping_all_of_the_local_parameters_is_training_alone() -> None:
    """(I23)"""
    alone = paths(h=1000)
    assert distance(paths(fragments=3, overlap_steps=1, mixing=1.0), alone) == 0
    assert distance(paths(mixing=1.0), alone) == 0


def mixing_ratio(mixing: float) -> float:
    """(I24) The spread of the replicas after a merge over that before, which is the mixing factor."""
    found = paths(h=6, steps=6, mixing=mixing)
    alone = paths(h=1000, steps=6)

    def spread(all_paths: list[list[Tensor]]) -> float:
        last = torch.stack([path[-1] for path in all_paths])
        return float((last - last.mean(0)).norm())

    return spread(found) / spread(alone)


@pytest.mark.parametrize("mixing", [0.0, 0.25, 0.5, 0.9])
def test_i24_a_merge_scales_the_spread_of_the_replicas_by_the_mixing_factor(mixing: float) -> None:
    """(I24)"""
    assert mixing_ratio(mixing) == pytest.approx(mixing, abs=1e-12)


@pytest.mark.parametrize(
    ("parts", "overlap", "mixing"), [(3, 1, 0.5), (3, 2, 0.25), (2, 5, 0.75), (1, 3, 0.0), (6, 1, 0.3)]
)
def test_equals_algorithm_2_by_hand(parts: int, overlap: int, mixing: float) -> None:
    found = paths(parts=parts, fragments=parts, overlap_steps=overlap, mixing=mixing)
    assert distance(found, reference(parts=parts, overlap=overlap, mixing=mixing)) < 1e-12


@settings(max_examples=20, deadline=None)
@given(
    parts=st.sampled_from([1, 2, 3, 6]),
    h=st.integers(6, 9),
    overlap=st.integers(0, 5),
    mixing=st.floats(0, 1),
)
def test_any_timing_follows_algorithm_2(parts: int, h: int, overlap: int, mixing: float) -> None:
    found = paths(h=h, parts=parts, fragments=parts, overlap_steps=overlap, mixing=mixing)
    assert distance(found, reference(h=h, parts=parts, overlap=overlap, mixing=mixing)) < 1e-9


def test_i7_fragments_of_quadratics_with_one_diagonal_hessian_keep_to_the_mean_trajectory() -> None:
    """(I7) on a part of the entries at a time: entries that do not interact meet where synchronous training is."""
    scales = torch.linspace(0.2, 1.0, 6, dtype=torch.float64)
    minima = Quadratics.of(3, dimension=6).minima

    def task(collective: LocalCollective, rank: int) -> Tensor:
        xs = [torch.nn.Parameter(part.clone()) for part in START.chunk(3)]
        optimizer = DiLoCo(
            sgd(xs), collective=collective, sync=Every(6), fragments=3, outer_lr=1.0 - 2**-53, outer_momentum=0.0
        )
        for _ in range(30):
            whole = torch.cat([x.detach() for x in xs])
            for x, g in zip(xs, (scales * (whole - minima[rank])).chunk(3), strict=True):
                x.grad = g.clone()
            optimizer.step()
        optimizer.finish()
        return torch.cat([x.detach() for x in xs])

    x = START
    for _ in range(30):
        x = x - LR * scales * (x - minima.mean(0))
    for found in LocalSwarm(3).run(task):
        torch.testing.assert_close(found, x, rtol=0, atol=1e-12)


# -- timing ------------------------------------------------------------------------------------------------------------


def reports_of(steps: int = 30, finish: bool = True, **options: Any) -> list[RoundReport]:
    def task(collective: LocalCollective, rank: int) -> list[RoundReport]:
        net = Net()
        optimizer = DiLoCo(adamw(list(net.parameters())), collective=collective, **options)
        reports: list[RoundReport] = []
        optimizer.on_round.append(reports.append)
        train(net, optimizer, rank, range(steps))
        if finish:
            optimizer.finish()
        return reports

    return LocalSwarm(2).run(task)[0]


def test_a_fragment_s_first_window_is_longer_by_its_offset_and_no_other_is() -> None:
    reports = reports_of(sync=Every(8), fragments=4, steps=27, finish=False)
    assert [report.step for report in reports] == [8, 10, 12, 14, 16, 18, 20, 22, 24, 26]
    assert [report.window for report in reports] == [8, 10, 12, 14, 8, 8, 8, 8, 8, 8]
    assert [report.round for report in reports] == list(range(10))


def test_rounds_end_overlap_steps_after_they_began_and_the_last_one_at_the_end() -> None:
    reports = reports_of(sync=Every(8, 20), fragments=2, overlap_steps=3, mixing=0.5, steps=20)
    # Fragment 0 meets after 8, 16 and, the window cut, 20 steps; fragment 1 after 12, 18 and at the end.
    assert [report.step for report in reports] == [11, 15, 19, 20, 20, 20]
    assert [report.window for report in reports] == [8, 12, 8, 6, 4, 2]


def test_fragments_send_as_much_in_all_and_a_part_at_a_time() -> None:
    whole = reports_of(sync=Every(8), steps=32, finish=False)
    parts = reports_of(sync=Every(8), steps=39, fragments=4, finish=False)
    assert sum(report.bytes_sent for report in parts) == sum(report.bytes_sent for report in whole)
    assert max(report.bytes_sent for report in parts) < 0.6 * whole[0].bytes_sent


@pytest.mark.parametrize("eager", [False, True, "delayed"])
@pytest.mark.parametrize("codec", [False, True], ids=["plain", "codec"])
def test_fragments_compose_with_eager_and_a_codec_and_end_alike(eager: Any, codec: bool) -> None:
    def make(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        return DiLoCo(
            adamw(parameters),
            collective=collective,
            sync=Every(4),
            fragments=2,
            eager=eager,
            overlap_steps=0 if eager else 1,
            averaging_for=(lambda number: Rounding(collective, 2**-12)) if codec else None,
        )

    def task(collective: LocalCollective, rank: int) -> tuple[Net, SyncedOptimizer]:
        net = Net()
        optimizer = make(list(net.parameters()), collective)
        train(net, optimizer, rank, range(18))
        optimizer.finish()
        return net, optimizer

    (left, one), (right, other) = LocalSwarm(2).run(task)
    assert same(left, right)
    assert one.digest() == other.digest()
    assert all(torch.equal(p, a) for p, a in zip(left.parameters(), one.anchor().values(), strict=True))


def test_eager_fragments_of_one_window_are_eager_diloco() -> None:
    assert distance(paths(eager=True, fragments=3, staggered=False), paths(eager=True)) < 1e-12


def test_a_digest_told_with_a_round_is_of_its_fragment_and_equal_everywhere() -> None:
    def task(collective: LocalCollective, rank: int) -> list[str]:
        net = Net()
        optimizer = DiLoCo(adamw(list(net.parameters())), collective=collective, sync=Every(4), fragments=2, eager=True)
        digests: list[str] = []
        optimizer.on_round.append(lambda report: digests.append(optimizer.digest()))
        train(net, optimizer, rank, range(20))
        assert optimizer.digest() not in digests  # the whole anchor's
        return digests

    left, right = LocalSwarm(2).run(task)
    assert left == right
    assert len(set(left)) == len(left) > 4


# -- planted slips -----------------------------------------------------------------------------------------------------


def test_i21_to_i24_notice_a_swapped_mixing_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(self: OverlappedOptimizer, fragment: Any) -> None:
        self._mixing = 1 - self._mixing
        MIX(self, fragment)
        self._mixing = 1 - self._mixing

    monkeypatch.setattr(OverlappedOptimizer, "_mix", swapped)
    assert distance(paths(), reference(parts=1)) > 1e-3  # I21
    assert distance(paths(fragments=3, mixing=1.0), paths(h=1000)) > 1e-3  # I23
    assert mixing_ratio(0.25) == pytest.approx(0.75)  # I24, and I22 compares two that are equally wrong


MIX = OverlappedOptimizer._mix


class Summing(PlainAveraging):
    """A sum where a mean should be."""

    def begin(self, tensors: Any, exact: Any = (), *, round: Any, weight: float) -> Any:
        return super().begin([t * 3 for t in tensors], exact, round=round, weight=weight)


def test_i21_notices_a_sum_for_the_mean() -> None:
    def make(parameters: list[Tensor], collective: Collective) -> SyncedOptimizer:
        return DiLoCo(
            sgd(parameters),
            collective=collective,
            sync=Every(6),
            outer_lr=OUTER,
            outer_momentum=MU,
            averaging=Summing(collective),
        )

    found = trajectories(make, Quadratics.of(3, dimension=6), replicas=3, steps=30, start=START)
    assert distance(found, reference(parts=1)) > 1e-3


def test_i21_and_i23_notice_a_first_window_of_one_step_more(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference(parts=1)
    monkeypatch.setattr(Every, "next_window", lambda self, step, lr: self.h + (step == 0))
    assert distance(paths(), expected) > 1e-3
    assert [report.window for report in reports_of(sync=Every(8), steps=16, finish=False)] == [9]


def test_refuses_what_cannot_be_cut_or_shared() -> None:
    parameters = list(Net().parameters())
    collective = LocalSwarm(1).collectives[0]
    make = partial(DiLoCo, sgd(parameters), collective=collective)
    for options, message in [
        ({"fragments": 5}, "fragments=5"),
        ({"fragments": 0}, "fragments=0"),
        ({"fragments": 2, "fragment_by": "size"}, "fragment_by='size'"),
        ({"fragments": 2, "averaging": Rounding(collective)}, "averaging_for"),
        ({"averaging": Rounding(collective), "averaging_for": lambda n: Rounding(collective)}, "only one can be given"),
        ({"overlap_steps": -1}, "overlap_steps=-1"),
        ({"mixing": 1.5}, "mixing=1.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(**options)  # type: ignore[arg-type]


def test_names_of_the_model_cut_it_and_frozen_parameters_do_not_matter() -> None:
    net = Net()
    net.first.bias.requires_grad_(False)
    optimizer = DiLoCo(
        adamw(list(net.parameters())), collective=LocalSwarm(1).collectives[0], names=parameter_names(net), fragments=2
    )
    parts = [fragment.part.names for fragment in optimizer._fragments]
    assert sorted(parts) == [["first.weight"], ["second.weight", "second.bias"]]
    train(net, optimizer, 0, range(4))
    optimizer.finish()
    assert torch.equal(net.first.bias, Net().first.bias)
    assert not same(net.second, Net().second)
