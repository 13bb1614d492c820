"""SecondMoment against torch's Adam, and DeMo with it: identities, resumption, odd gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swarmkit.optim.collective import Collective
from swarmkit.optim.demo import DeMo
from swarmkit.optim.schedule import Every
from swarmkit.optim.second_moment import SecondMoment
from swarmkit.peers.local import LocalCollective, LocalSwarm

CPU = torch.device("cpu")
SHAPES = [(16, 24), (8, 8), (5,)]
EVERYTHING = 10**6


def noise(rank: int, step: int, i: int) -> Tensor:
    generator = torch.Generator().manual_seed(1009 * rank + 31 * step + i)
    return torch.randn(SHAPES[i], generator=generator) * 10.0 ** (i - 1)


def start() -> list[Tensor]:
    return [torch.nn.Parameter(noise(9, 9, i)) for i in range(len(SHAPES))]


def make_demo(parameters: list[Tensor], collective: Collective, *, lr: float = 0.01, **options: object) -> DeMo:
    settings: dict[str, object] = {"k": 16, "chunk": 8} | options
    return DeMo(torch.optim.SGD(parameters, lr=lr), collective=collective, **settings)  # type: ignore[arg-type]


def alone(**options: object) -> tuple[list[Tensor], DeMo]:
    parameters = start()
    return parameters, make_demo(parameters, LocalSwarm(1).collectives[0], **options)


def walk(parameters: list[Tensor], optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> None:
    for step in steps:
        for i, parameter in enumerate(parameters):
            parameter.grad = noise(rank, step, i)
        optimizer.step()


def assert_close(left: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
def test_sending_everything_of_one_peer_is_adam_without_a_first_moment(decay: float) -> None:
    parameters, demo = alone(k=EVERYTHING, values="float32", precondition=decay)
    wanted = start()
    walk(parameters, demo, range(8))
    walk(wanted, torch.optim.Adam(wanted, lr=0.01, betas=(0.0, decay)), range(8))
    assert_close(parameters, wanted, 2e-5)


def test_each_peer_divides_by_its_own_second_moment_and_all_take_the_mean() -> None:
    def task(collective: LocalCollective, rank: int) -> list[Tensor]:
        parameters = start()
        walk(parameters, make_demo(parameters, collective, k=EVERYTHING, values="float32"), range(5), rank)
        return parameters

    moved = []
    for rank in range(3):
        moment, total = SecondMoment(start(), 0.95, CPU), [torch.zeros(shape) for shape in SHAPES]
        for step in range(5):
            quotients = moment.divide([noise(rank, step, i) for i in range(3)])
            total = [a + b for a, b in zip(total, quotients, strict=True) if b is not None]
        moved.append(total)
    wanted = [p.detach() - 0.01 * sum(parts) / 3 for p, *parts in zip(start(), *moved, strict=True)]
    for found in LocalSwarm(3).run(task):
        assert_close([parameter.detach() for parameter in found], wanted, 2e-5)


@pytest.mark.parametrize("values", ["float32", "sign"])
def test_without_decay_what_is_sent_and_what_is_left_are_all_quotients(values: str) -> None:
    parameters, demo = alone(beta=1.0, values=values)
    exact, everything = alone(beta=1.0, values="float32", k=EVERYTHING)
    walk(parameters, demo, range(8))
    walk(exact, everything, range(8))
    chunks = demo.averaging.momentum.chunks
    left = [torch.empty(shape) for shape in SHAPES]
    outputs = chunks.outputs(left)
    for group, held in zip(chunks.groups, demo.averaging.momentum.tensors, strict=True):
        for block in group.blocks:
            rows = held[block.start : block.start + block.count].clone()
            chunks.store(group, block, chunks.decode_dense(group, block, rows, torch.empty_like(rows)), outputs)
    chunks.collect(outputs, left)
    assert_close([p.detach() - 0.01 * rest for p, rest in zip(parameters, left, strict=True)], exact, 1e-4)


@pytest.mark.parametrize("factor", [0.1, 1e3])
def test_the_scale_of_gradients_changes_next_to_nothing(factor: float) -> None:
    (once, first), (scaled, second) = (alone(k=EVERYTHING, values="float32") for _ in range(2))
    for step in range(4):
        for i, (left, right) in enumerate(zip(once, scaled, strict=True)):
            left.grad, right.grad = noise(0, step, i), factor * noise(0, step, i)
        first.step()
        second.step()
    assert_close(once, scaled, 1e-3)


def test_a_payload_is_as_large_with_it_as_without() -> None:
    assert alone()[1].averaging.form == alone(precondition=None)[1].averaging.form


def test_a_parameter_without_a_gradient_keeps_its_second_moment() -> None:
    moment = SecondMoment(start(), 0.9, CPU)
    moment.divide([noise(0, 0, 0), None, noise(0, 0, 2)])
    assert moment.counts == [1, 0, 1]
    found = moment.divide([None, noise(0, 1, 1), None])
    assert found[0] is None
    assert found[2] is None
    assert found[1] is not None
    torch.testing.assert_close(found[1], noise(0, 1, 1).sign())  # its first: g / |g|
    assert moment.divide([None, None, None]) == [None, None, None]
    assert moment.counts == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_any_precision_are_divided_in_float32(dtype: torch.dtype) -> None:
    moment = SecondMoment([torch.zeros(4, dtype=dtype)], 0.9, CPU)
    gradient = torch.tensor([1e-4, -2.0, 0.0, 3.0], dtype=dtype)
    (found,) = moment.divide([gradient])
    assert found is not None
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, gradient.float().sign(), rtol=1e-3, atol=0)


def test_gradients_whose_squares_overflow_are_left_out_and_said() -> None:
    parameters, demo = alone()
    walk(parameters, demo, range(2))
    parameters[0].grad = torch.full(SHAPES[0], 1e25)
    demo.step()
    assert demo.last_report is not None
    assert "not finite" in str(demo.last_report.failed)
    walk(parameters, demo, range(3, 5))
    assert demo.last_report.failed is None
    assert all(bool(parameter.isfinite().all()) for parameter in parameters)


def test_resuming_in_the_middle_of_a_window_is_bit_exact() -> None:
    parameters, demo = alone(sync=Every(3))
    walk(parameters, demo, range(5))
    again = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = make_demo(again, LocalSwarm(1).collectives[0], sync=Every(3))
    resumed.load_state_dict(demo.state_dict())
    walk(parameters, demo, range(5, 11))
    walk(again, resumed, range(5, 11))
    assert all(torch.equal(a, b) for a, b in zip(parameters, again, strict=True))


def forget_counts(state: dict[str, object]) -> None:
    state["counts"] = [1]


def reshape(state: dict[str, object]) -> None:
    state["tensors"] = [torch.zeros(3)] * 3


@pytest.mark.parametrize("spoil", [forget_counts, reshape])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(spoil: Callable[[dict[str, object]], None]) -> None:
    parameters, demo = alone()
    walk(parameters, demo, range(2))
    state = demo.state_dict()
    walk(parameters, demo, range(2, 4))
    held = demo.state_dict()["synced"]["second_moment"]
    spoil(state["synced"]["second_moment"])
    with pytest.raises(ValueError, match="second moment"):
        demo.load_state_dict(state)
    now = demo.state_dict()["synced"]["second_moment"]
    assert now["counts"] == held["counts"]
    assert all(torch.equal(a, b) for a, b in zip(now["tensors"], held["tensors"], strict=True))


def test_a_state_without_a_second_moment_is_refused_where_one_is_used_and_the_other_way_round() -> None:
    with pytest.raises(ValueError, match="state is without a second moment"):
        alone()[1].load_state_dict(alone(precondition=None)[1].state_dict())
    with pytest.raises(ValueError, match="state is with a second moment"):
        alone(precondition=None)[1].load_state_dict(alone()[1].state_dict())


@pytest.mark.parametrize("option", [{"precondition": None}, {"sign": True}, {"average": "senders"}])
def test_members_with_other_rules_do_not_meet(option: dict[str, object]) -> None:
    """Their payloads have the same form, but each would make another step of them."""
    demos = [alone()[1], alone(**option)[1]]
    assert demos[0].round_name == demos[1].round_name
    for demo in demos:
        walk([p for group in demo.param_groups for p in group["params"]], demo, range(1))
    assert demos[0].lineage != demos[1].lineage
    assert math.isfinite(float(demos[0].last_report.pseudo_gradient_norm))  # type: ignore[union-attr]
