"""Eager and delayed DiLoCo: the identities of overlapped rounds, and that each notices the slip it is there for."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmkit.optim import Collective, DiLoCo, Every, SyncedOptimizer
from swarmkit.optim.diloco import Eager
from swarmkit.optim.lead import Lead
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim import by_hand
from tests.unit.optim.replicas import Quadratics, adamw, sgd, trajectories

START = torch.linspace(-1, 1, 5, dtype=torch.float64)
LR, MU, OUTER, H, ROUNDS = 0.1, 0.9, 0.4, 4, 6


def make(
    parameters: list[Tensor],
    collective: Collective,
    *,
    eager: Eager = True,
    h: int = H,
    mu: float = MU,
    outer_lr: float = OUTER,
    nesterov: bool = True,
    inner: Any = sgd,
) -> SyncedOptimizer:
    return DiLoCo(
        inner(parameters),
        collective=collective,
        sync=Every(h),
        outer_lr=outer_lr,
        outer_momentum=mu,
        nesterov=nesterov,
        eager=eager,
    )


def distance(left: list[list[Tensor]], right: list[list[Tensor]]) -> float:
    """The largest difference between two sets of paths."""
    pairs = [(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def run(
    eager: Eager = True, weights: list[float] | None = None, replicas: int = 3, **options: Any
) -> list[list[Tensor]]:
    problem = Quadratics.of(replicas)
    samples = None if weights is None else [weight / H for weight in weights]
    found = partial(make, eager=eager, **options)
    return trajectories(found, problem, replicas=replicas, steps=H * ROUNDS, start=START, samples=samples)


def eager_residual(weights: list[float], **options: Any) -> float:
    """How far the product is from Alg. 3 (I17, I18, I20: both forms of it)."""
    reference = by_hand.eager(
        Quadratics.of(len(weights)),
        START,
        weights=weights,
        h=H,
        rounds=ROUNDS,
        lr=LR,
        mu=options.get("mu", MU),
        outer_lr=OUTER,
        look_ahead=options.get("nesterov", True),
    )
    return distance(run(weights=weights, replicas=len(weights), **options), reference)


def test_i13_one_eager_peer_is_one_peer_of_plain_diloco() -> None:
    """(I13)"""
    assert distance(run(replicas=1), run(eager=False, replicas=1)) < 1e-12
    assert distance(run(replicas=1, inner=adamw), run(eager=False, replicas=1, inner=adamw)) < 1e-12


def test_i14_the_first_delayed_round_changes_nothing() -> None:
    """(I14)"""
    for path in run(eager="delayed"):
        assert torch.equal(path[H], START)
        assert not torch.equal(path[H - 1], START)


def slope_distance(**options: Any) -> float:
    slopes = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def go(eager: Eager, rounds: int) -> list[list[Tensor]]:
        found = partial(make, eager=eager, **options)
        gradient = lambda rank, _, __: slopes[rank].clone()  # noqa: E731
        return trajectories(found, gradient, replicas=3, steps=H * rounds, start=START)

    late = [path[H::H] for path in go("delayed", ROUNDS + 1)]
    return distance(late, [path[::H] for path in go(False, ROUNDS)])


def test_i14_on_linear_losses_delayed_is_plain_diloco_one_round_late() -> None:
    """(I14)"""
    assert slope_distance() < 1e-12


def test_i15_delayed_replicas_start_every_window_alike_and_share_the_outer_state() -> None:
    """(I15)"""
    paths = run(eager="delayed")
    for path in paths[1:]:
        assert all(torch.equal(a, b) for a, b in zip(path[::H], paths[0][::H], strict=True))
    outer = by_hand.Nesterov(START, OUTER, MU)
    reference = by_hand.delayed(Quadratics.of(3), START, replicas=3, h=H, rounds=ROUNDS, lr=LR, outer=outer.step)
    assert distance(paths, reference) < 1e-12


def spread_residual(outer_lr: float = OUTER) -> float:
    """(I16) Without momentum eager replicas differ by their newest pseudo-gradients over M: theta_m - theta_n."""
    found = []

    def task(collective: LocalCollective, rank: int) -> list[tuple[Tensor, Tensor]]:
        x = torch.nn.Parameter(START.clone())
        optimizer = make([x], collective, mu=0.0, outer_lr=outer_lr)
        problem, seen = Quadratics.of(3), []
        start = START.clone()
        for step in range(H * ROUNDS):
            x.grad = problem(rank, step, x.detach())
            before = x.detach() - LR * x.grad
            optimizer.step()
            if (step + 1) % H == 0:
                seen.append((x.detach().clone(), start - before))
                start = x.detach().clone()
        return seen

    for (a, da), (b, db) in zip(*LocalSwarm(3).run(task)[:2], strict=True):
        found.append(float((a - b + outer_lr / 3 * (da - db)).abs().max()))
    return max(found)


def test_i16_without_momentum_replicas_differ_by_their_newest_pseudo_gradients_over_m() -> None:
    """(I16)"""
    assert spread_residual() < 1e-12


@pytest.mark.parametrize("weights", [[4.0] * 3, [4.0, 12.0, 8.0], [1.0, 7.0]], ids=["equal", "unequal", "two"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_i17_the_shared_state_and_the_local_term_are_algorithm_3(weights: list[float], nesterov: bool) -> None:
    """(I17, I18, I20)"""
    assert eager_residual(weights, nesterov=nesterov) < 1e-12


def test_i19_identical_workers_are_one_worker_on_fresh_and_stale_progress() -> None:
    """(I19)"""
    problem, m = Quadratics.of(1), 3
    outer, x, stale = by_hand.Nesterov(START, OUTER, MU), START, torch.zeros_like(START)
    reference = [START]
    for step in range(H * ROUNDS):
        x = x - LR * problem(0, step, x)
        if (step + 1) % H == 0:
            fresh = outer.x - x
            x = outer.step(fresh / m + (1 - 1 / m) * stale)
            stale = fresh
        reference.append(x)
    same = trajectories(make, lambda _, step, x: problem(0, step, x), replicas=m, steps=H * ROUNDS, start=START)
    assert distance(same, [reference] * m) < 1e-12


def test_the_shared_state_is_plain_nesterov_on_the_true_means_one_round_late() -> None:
    """(I17) and what is shared is equal everywhere, whatever the replicas are."""

    def task(collective: LocalCollective, rank: int) -> list[tuple[str, Tensor, Tensor]]:
        x = torch.nn.Parameter(START.clone())
        optimizer = make([x], collective)
        problem, seen, start = Quadratics.of(3), [], START.clone()
        for step in range(H * ROUNDS):
            x.grad = problem(rank, step, x.detach())
            before = x.detach() - LR * x.grad
            optimizer.step()
            if (step + 1) % H == 0:
                held = optimizer.anchor()["parameter0"].clone()
                seen.append((optimizer.digest(), held, start - before))
                start = x.detach().clone()
        optimizer.finish()
        seen.append((optimizer.digest(), x.detach().clone(), torch.zeros_like(x)))
        return seen

    found = LocalSwarm(3).run(task)
    outer = by_hand.Nesterov(START, OUTER, MU)
    # The first round is waited for, to learn how many take part: its mean is in the shared state at once.
    for index in range(len(found[0])):
        assert len({seen[index][0] for seen in found}) == 1
        if index == len(found[0]) - 1 or index == 0:
            mean = torch.stack([seen[max(0, index - 1)][2] for seen in found]).mean(0)
            outer.step(mean)
        elif index > 1:
            outer.step(torch.stack([seen[index - 1][2] for seen in found]).mean(0))
        torch.testing.assert_close(found[0][index][1], outer.x, rtol=0, atol=1e-12)
    final = [seen[-1][1] for seen in found]
    assert torch.equal(final[0], final[1])  # at the end everybody holds the shared state


@settings(max_examples=15, deadline=None)
@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    mu=st.floats(0, 0.95),
    nesterov=st.booleans(),
)
def test_any_weights_and_momentum_follow_algorithm_3(weights: list[int], mu: float, nesterov: bool) -> None:
    assert eager_residual([float(weight) for weight in weights], mu=mu, nesterov=nesterov) < 1e-9


# -- planted slips -----------------------------------------------------------------------------------------------------


def whole_share(self: Lead, weight: float, others: float | None) -> float:
    return float(weight > 0)


def stale_part_left_in(
    self: Lead, start: list[Tensor], own: list[Tensor], carry: list[Tensor], share: float
) -> list[Tensor]:
    """As if the fresh part were added and the stale one not taken out: carry holds the stale one."""
    fresh = AHEAD(self, start, own, carry, share)
    return list(torch._foreach_sub(fresh, torch._foreach_mul(carry, self.lr))) if carry else fresh


def without_look_ahead(
    self: Lead, start: list[Tensor], own: list[Tensor], carry: list[Tensor], share: float
) -> list[Tensor]:
    heavy = Lead(of=self.of, lr=self.lr, momentum=self.momentum, nesterov=False)
    return AHEAD(heavy, start, own, carry, share)


AHEAD = Lead.ahead
SLIPS: dict[str, tuple[str, Any]] = {
    "without 1/M": ("share", whole_share),
    "stale own part left in": ("ahead", stale_part_left_in),
    "heavy ball for Nesterov": ("ahead", without_look_ahead),
}


@pytest.mark.parametrize("slip", SLIPS.values(), ids=SLIPS)
def test_i17_notices_the_slip(slip: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lead, *slip)
    assert eager_residual([4.0] * 3) > 1e-3


def test_i13_and_i16_notice_a_missing_1_over_m_and_a_stale_part(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Lead, "share", whole_share)
        assert spread_residual() > 1e-3
    monkeypatch.setattr(Lead, "ahead", stale_part_left_in)
    assert distance(run(replicas=1), run(eager=False, replicas=1)) > 1e-3


def test_i14_notices_a_first_window_of_one_step_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Every, "next_window", lambda self, step, lr: self.h + (step == 0))
    for path in run(eager="delayed"):
        assert not torch.equal(path[H], START)


def test_refuses_what_does_not_go_together() -> None:
    x = torch.nn.Parameter(torch.ones(2))
    collective = LocalSwarm(1).collectives[0]
    with pytest.raises(ValueError, match="eager='often'"):
        DiLoCo(sgd([x]), collective=collective, eager="often")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overlap_steps=2"):
        DiLoCo(sgd([x]), collective=collective, eager=True, overlap_steps=2)


def test_without_outer_momentum_no_momentum_of_the_own_contributions_is_kept() -> None:
    lead = Lead(of="share", lr=0.7, momentum=0.0, nesterov=False)
    own = [torch.ones(3)]
    assert lead.carried(own, [], 0.5) == []
    [start] = lead.ahead([torch.zeros(3)], own, [], 0.5)
    assert torch.equal(start, torch.full((3,), -0.35))
