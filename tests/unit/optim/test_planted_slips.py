"""Slips that public codes have made, planted in the product one at a time: the identities named must fail."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmkit.optim import CO2, DiLoCo, Every, QuadraticSync, SyncedOptimizer
from swarmkit.optim.compression import powersgd, qsgd
from swarmkit.optim.compression.blockwise import to_grid
from swarmkit.optim.compression.minifloat import E3M0
from swarmkit.optim.compression.ternary import TernGrad
from swarmkit.optim.demo_averaging import DeMoAveraging
from swarmkit.optim.demo_momentum import Momentum
from swarmkit.optim.demo_payload import Sparse
from swarmkit.optim.fragments import Fragment
from swarmkit.optim.mean import weighted_mean
from swarmkit.optim.overlapped import OverlappedOptimizer
from swarmkit.peers import local
from tests.unit.optim import (
    test_co2,
    test_demo,
    test_demo_rounds,
    test_diloco,
    test_eager,
    test_flying_state,
    test_identities,
    test_schedule,
    test_streaming,
)
from tests.unit.optim.compression import test_compression_identities

Patch = pytest.MonkeyPatch
Check = Callable[[], None]

one_step = partial(test_identities.make_diloco, h=1, lr=1.0, mu=0.0)
algorithm_1 = partial(test_diloco.test_equals_algorithm_1_written_by_hand, 4)
algorithm_2 = partial(test_streaming.test_equals_algorithm_2_by_hand, 3, 1, 0.3)
algorithm_3 = partial(test_eager.test_i17_the_shared_state_and_the_local_term_are_algorithm_3, [4.0, 12.0, 8.0], True)
co2_equations = partial(test_co2.test_stale_rounds_follow_the_equations, "gap", None)

# -- rounds and outer steps --------------------------------------------------------------------------------------------


def sum_for_mean(patch: Patch) -> None:
    patch.setattr(local, "weighted_mean", lambda parts, weights: weighted_mean(parts, weights) * len(parts))


def members_not_weighted(patch: Patch) -> None:
    patch.setattr(local, "weighted_mean", lambda parts, weights: weighted_mean(parts, [1.0] * len(parts)))


def mean_over_planned_members(patch: Patch) -> None:
    """prime-diloco's divisor: those who were to come, not those who came."""
    patch.setattr(local, "weighted_mean", lambda parts, weights: weighted_mean(parts, weights) * (len(parts) / 3))


def first_window_of_one_step_more(patch: Patch) -> None:
    patch.setattr(Every, "next_window", lambda self, step, lr: self.h + (step == 0))


def outer_group(patch: Patch, **changes: Any) -> None:
    adopt = DiLoCo._adopt_parameters

    def changed(self: DiLoCo) -> None:
        adopt(self)
        self.outer.param_groups[0].update(changes)

    patch.setattr(DiLoCo, "_adopt_parameters", changed)


def heavy_ball_for_nesterov(patch: Patch) -> None:
    outer_group(patch, nesterov=False)


def dampened_momentum(patch: Patch) -> None:
    outer_group(patch, dampening=0.9)


def stale_own_part_replaced_by_the_mean(patch: Patch) -> None:
    take = OverlappedOptimizer._take

    def slipped(self: Any, fragment: Fragment, flight: Any, reduced: Any, report: Any) -> Any:
        flight.offer.tensors = reduced.tensors[: len(flight.offer.tensors)]
        return take(self, fragment, flight, reduced, report)

    patch.setattr(OverlappedOptimizer, "_take", slipped)


def fresh_for_stale(patch: Patch) -> None:
    """The public CO2 with its defaults: what should be late is waited for."""

    def waits(self: OverlappedOptimizer, fragment: Fragment) -> None:
        self._launch(fragment)
        self._settle(fragment)
        self._rebase(fragment)
        self._land(fragment)

    patch.setattr(OverlappedOptimizer, "_meet", waits)


def offsets_of_the_other_sign(patch: Patch) -> None:
    """t + t_p for t - t_p, which only differ from three fragments on."""

    def turned(self: OverlappedOptimizer) -> int:
        position = self.round % self._count
        assert self._window is not None
        return (self._count - position) * self._window // self._count if position else self._window

    patch.setattr(OverlappedOptimizer, "_next_meeting", turned)


def constant_penalty(patch: Patch) -> None:
    patch.setattr(CO2, "_next_penalty", lambda self, exact: 1.0)


def inner_state_not_resumed(patch: Patch) -> None:
    load = SyncedOptimizer.load_state_dict
    patch.setattr(SyncedOptimizer, "load_state_dict", lambda self, state: load(self, {**state, "state": {}}))


def power_of_the_published_default(patch: Patch) -> None:
    window = QuadraticSync.next_window

    def linear(self: QuadraticSync, step: int, lr: float) -> int:
        once = QuadraticSync(
            alpha=self.alpha,
            h_base=self.h_base,
            total_steps=self.total_steps,
            warmup_steps=self.warmup_steps,
            power=1.0,
        )
        return window(once, step, lr)

    patch.setattr(QuadraticSync, "next_window", linear)


# -- DeMo --------------------------------------------------------------------------------------------------------------


def zeros_are_sent(patch: Patch) -> None:
    """DeToNATION's slicing: what is sent is a view of what is zeroed."""
    largest = Momentum.largest

    def zeroed(self: Momentum) -> list[Sparse]:
        return [Sparse(part.index, torch.zeros_like(part.values)) for part in largest(self)]

    patch.setattr(Momentum, "largest", zeroed)


def rounding_not_fed_back(patch: Patch) -> None:
    """Psyche's 1-bit mode: all of an entry leaves the momentum, whatever was sent for it."""

    def whole(self: Momentum, parts: Sequence[Sparse], alpha: float) -> None:
        for held, part in zip(self.tensors, parts, strict=True):
            held.scatter_(1, part.index, 0.0)

    patch.setattr(Momentum, "subtract", whole)


def momentum_in_bfloat16(patch: Patch) -> None:
    accumulate = Momentum.accumulate

    def rounded(self: Momentum, gradients: Sequence[Tensor], decay: float) -> None:
        accumulate(self, gradients, decay)
        for held in self.tensors:
            held.copy_(held.bfloat16())

    patch.setattr(Momentum, "accumulate", rounded)


def momentum_not_in_the_state(patch: Patch) -> None:
    load = DeMoAveraging.load_state_dict

    def forgets(self: DeMoAveraging, state: Mapping[str, Any]) -> None:
        load(self, {**state, "momentum": [torch.zeros_like(tensor) for tensor in state["momentum"]]})

    patch.setattr(DeMoAveraging, "load_state_dict", forgets)


# -- codecs ------------------------------------------------------------------------------------------------------------


def nearest_for_stochastic(patch: Patch) -> None:
    patch.setattr(qsgd, "to_grid", lambda *given, generator=None, **options: to_grid(*given, **options))


def one_scale_for_all_tensors(patch: Patch) -> None:
    scales = TernGrad.scales
    patch.setattr(TernGrad, "scales", lambda *given: (found := scales(*given)).max().expand_as(found).clone())


def scale_not_clipped(patch: Patch) -> None:
    scales = TernGrad.scales

    def free(self: TernGrad, *given: Any) -> Tensor:
        return scales(TernGrad(clip=None), *given)

    patch.setattr(TernGrad, "scales", free)


def cold_start(patch: Patch) -> None:
    start = powersgd._start
    patch.setattr(powersgd, "_start", lambda matrices, ranks, state: start(matrices, ranks, []))


def not_orthogonalised(patch: Patch) -> None:
    patch.setattr(powersgd, "_orthogonal", lambda groups, columns: list(columns))


def scale_of_thrice_the_largest(patch: Patch) -> None:
    scales = E3M0.scales
    patch.setattr(E3M0, "scales", lambda *given: scales(*given) * 3)


identities = test_compression_identities
SLIPS: dict[Callable[[Patch], None], dict[str, Check]] = {
    sum_for_mean: {
        "I1 AllReduce": partial(
            test_identities.test_i1_one_inner_step_without_outer_momentum_is_synchronous_sgd,
            test_identities.make_all_reduce,
        ),
        "I1 DiLoCo": partial(
            test_identities.test_i1_one_inner_step_without_outer_momentum_is_synchronous_sgd, one_step
        ),
        "I2": partial(test_identities.test_i2_outer_sgd_at_rate_one_is_parameter_averaging, 3, test_identities.sgd),
        "I3": test_identities.test_i3_one_inner_step_with_an_outer_nesterov_step_is_nesterov_on_the_mean_gradient,
        "I7": partial(
            test_identities.test_i7_quadratics_of_one_hessian_give_the_synchronous_trajectory_at_every_round, 4
        ),
        "I8": test_identities.test_i8_linear_losses_move_by_all_steps_times_the_mean_gradient,
        "I10": partial(test_identities.test_i10_identical_replicas_are_one_replica, test_identities.make_diloco),
        "I15": test_eager.test_i15_delayed_replicas_start_every_window_alike_and_share_the_outer_state,
        "I17": algorithm_3,
        "Algorithm 1": algorithm_1,
        "Algorithm 2": algorithm_2,
        "15 CO2": test_co2.test_15_fresh_without_penalty_it_is_slow_mo,
        "CO2": co2_equations,
    },
    members_not_weighted: {
        "I7": test_identities.test_i7_holds_for_weighted_replicas_with_the_weighted_mean_gradient,
        "I12": test_identities.test_i12_the_mean_pseudo_gradient_is_the_anchor_minus_the_mean_of_the_parameters,
        "I17": algorithm_3,
    },
    mean_over_planned_members: {
        "I28": test_flying_state.test_i28_a_mean_is_over_those_that_are_there_and_the_local_term_follows,
    },
    first_window_of_one_step_more: {
        "I1": partial(test_identities.test_i1_one_inner_step_without_outer_momentum_is_synchronous_sgd, one_step),
        "I3": test_identities.test_i3_one_inner_step_with_an_outer_nesterov_step_is_nesterov_on_the_mean_gradient,
        "I4": test_identities.test_i4_one_replica_without_momentum_is_lookahead,
        "I6": test_identities.test_i6_a_constant_pseudo_gradient_moves_as_the_closed_form_says,
        "I7": partial(
            test_identities.test_i7_quadratics_of_one_hessian_give_the_synchronous_trajectory_at_every_round, 4
        ),
        "I8": test_identities.test_i8_linear_losses_move_by_all_steps_times_the_mean_gradient,
        "I17": algorithm_3,
        "Algorithm 1": algorithm_1,
        "Algorithm 2": algorithm_2,
    },
    heavy_ball_for_nesterov: {
        "I3": test_identities.test_i3_one_inner_step_with_an_outer_nesterov_step_is_nesterov_on_the_mean_gradient,
        "I6": test_identities.test_i6_a_constant_pseudo_gradient_moves_as_the_closed_form_says,
        "I17": algorithm_3,
        "Algorithm 1": algorithm_1,
        "Algorithm 2": algorithm_2,
    },
    dampened_momentum: {
        "I3": test_identities.test_i3_one_inner_step_with_an_outer_nesterov_step_is_nesterov_on_the_mean_gradient,
        "I6": test_identities.test_i6_a_constant_pseudo_gradient_moves_as_the_closed_form_says,
        "I17": algorithm_3,
        "Algorithm 1": algorithm_1,
        "Algorithm 2": algorithm_2,
    },
    stale_own_part_replaced_by_the_mean: {"I17": algorithm_3},
    fresh_for_stale: {
        "I14": test_eager.test_i14_the_first_delayed_round_changes_nothing,
        "I14 linear": test_eager.test_i14_on_linear_losses_delayed_is_plain_diloco_one_round_late,
        "I17": algorithm_3,
        "16": test_co2.test_16_on_linear_losses_stale_is_fresh_one_round_late,
        "CO2": co2_equations,
    },
    offsets_of_the_other_sign: {"Algorithm 2": algorithm_2},
    constant_penalty: {"CO2": co2_equations},
    inner_state_not_resumed: {
        "I27": partial(
            test_flying_state.test_a_state_in_the_middle_of_a_flight_resumes_bit_for_bit,
            test_flying_state.ALL["eager"],
            9,
        ),
    },
    power_of_the_published_default: {
        "I29": partial(test_schedule.test_qsr_has_the_published_number_of_rounds_on_vit, 4, 9711),
    },
    zeros_are_sent: {
        "3": partial(test_demo.test_sending_everything_unsigned_is_sgd_on_the_mean_gradient, 3, "members"),
        "5": partial(test_demo.test_a_momentum_of_coefficients_is_the_papers_residual_of_tensors, 3, False),
    },
    rounding_not_fed_back: {
        "4, sign": partial(test_demo.test_without_decay_what_is_sent_and_what_is_left_are_all_gradients, "sign", 1.0),
        "4, int8": partial(test_demo.test_without_decay_what_is_sent_and_what_is_left_are_all_gradients, "int8", 1.0),
    },
    momentum_in_bfloat16: {
        "4": partial(test_demo.test_without_decay_what_is_sent_and_what_is_left_are_all_gradients, "float32", 1.0),
        "5": partial(test_demo.test_a_momentum_of_coefficients_is_the_papers_residual_of_tensors, 1, False),
    },
    momentum_not_in_the_state: {
        "resuming": partial(test_demo_rounds.test_resuming_in_the_middle_of_a_window_is_bit_exact, "sign", "sgd"),
    },
    nearest_for_stochastic: {"27": partial(identities.test_qsgd_is_unbiased_within_its_variance_bound, 2, "max")},
    one_scale_for_all_tensors: {
        "28": identities.test_terngrad_clips_each_tensor_at_its_own_two_and_a_half_sigma,
    },
    scale_not_clipped: {"28": identities.test_terngrad_clips_each_tensor_at_its_own_two_and_a_half_sigma},
    cold_start: {
        "23": identities.test_warm_starts_converge_to_the_best_approximation_of_the_rank,
        "rank": identities.test_a_change_of_rank_keeps_what_the_bases_have_learnt,
    },
    not_orthogonalised: {
        "20": partial(identities.test_full_rank_powersgd_is_exact, (6, 9)),
        "21": identities.test_powersgd_recovers_a_matrix_of_its_rank_at_once,
        "22": identities.test_powersgd_projects_so_pythagoras_holds_and_the_svd_is_the_limit,
    },
    scale_of_thrice_the_largest: {"I30": identities.test_e3m0_takes_the_nearest_level},
}
PLANTED = [
    pytest.param(slip, check, id=f"{slip.__name__}-{name}")
    for slip, checks in SLIPS.items()
    for name, check in checks.items()
]


@pytest.mark.parametrize(("slip", "check"), PLANTED)
def test_an_identity_notices_the_slip(slip: Callable[[Patch], None], check: Check, monkeypatch: Patch) -> None:
    slip(monkeypatch)
    with pytest.raises(AssertionError):
        check()
