"""Strategies reach their peers only through an Averaging: what they give to it, what is exact, what is resumed."""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmkit.optim import (
    CO2,
    AllReduce,
    Collective,
    DiLoCo,
    Every,
    LocalSGD,
    PlainAveraging,
    RoundKey,
    RoundReport,
    SyncedOptimizer,
)
from swarmkit.optim.averaging import Pending
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import Make, Net, adamw, batch, same, sgd, train, trained
from tests.unit.optim.rounding import Rounding


def rounded(kind: Any, parameters: list[Tensor], collective: Collective, **options: Any) -> SyncedOptimizer:
    if kind is not AllReduce:
        options["sync"] = Every(4)
    found: SyncedOptimizer = kind(
        adamw(parameters), collective=collective, averaging=Rounding(collective, 2**-10), **options
    )
    return found


every_kind = pytest.mark.parametrize("kind", [AllReduce, LocalSGD, DiLoCo])


@every_kind
def test_replicas_stay_equal_through_a_lossy_codec(kind: Any) -> None:
    left, right = trained(partial(rounded, kind), replicas=2, steps=12)
    assert same(left[0], right[0])
    assert not same(left[0], Net())


@every_kind
def test_the_codec_s_state_is_resumed_bit_for_bit(kind: Any) -> None:
    make: Make = partial(rounded, kind)
    half = [deepcopy((n.state_dict(), o.state_dict())) for n, o in trained(make, replicas=2, steps=10)]

    def task(collective: LocalCollective, rank: int) -> Net:
        net = Net(seed=4)
        optimizer = make(list(net.parameters()), collective)
        net.load_state_dict(half[rank][0])
        optimizer.load_state_dict(half[rank][1])
        train(net, optimizer, rank, range(10, 20))
        return net

    for net, (reference, _) in zip(LocalSwarm(2).run(task), trained(make, replicas=2, steps=20), strict=True):
        assert same(net, reference)


def test_a_state_of_another_codec_is_refused_and_changes_nothing() -> None:
    ((net, optimizer),) = trained(partial(rounded, DiLoCo), replicas=1, steps=8)
    plain = DiLoCo(adamw(list(Net().parameters())), collective=LocalSwarm(1).collectives[0], sync=Every(4))
    train(Net(), plain, 0, range(1))
    before = plain.digest()
    with pytest.raises(ValueError, match="of a codec"):
        plain.load_state_dict(optimizer.state_dict())
    assert (plain.digest(), plain.round) == (before, 0)


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_a_codec_gets_differences_because_parameters_do_not_compress(kind: Any) -> None:
    options = {} if kind is LocalSGD else {"outer_lr": 1.0, "outer_momentum": 0.0}
    net = Net()
    optimizer = rounded(kind, list(net.parameters()), LocalSwarm(1).collectives[0], **options)
    codec = optimizer.averaging
    assert isinstance(codec, Rounding)
    train(net, optimizer, 0, range(4))
    key, tensors, exact = codec.begun[0]
    assert max(float(t.abs().max()) for t in tensors) < 0.3  # four steps of AdamW at 0.05, not weights of about 1
    assert (key.name, exact) == (optimizer.round_name, [])
    plain = kind(adamw(list(Net().parameters())), collective=LocalSwarm(1).collectives[0], **options)
    assert plain.round_name == "parameters" != optimizer.round_name
    # The codec's grid is what separates the result from the local parameters.
    reference = Net()
    train(reference, adamw(list(reference.parameters())), 0, range(4))
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2**-11 + 1e-6)


def test_shares_and_buffers_are_exact() -> None:
    def task(collective: LocalCollective, rank: int) -> Rounding:
        model = torch.nn.BatchNorm1d(6)
        codec = Rounding(collective)
        optimizer = AllReduce(
            sgd(list(model.parameters())), collective=collective, averaging=codec, buffers=list(model.buffers())
        )
        model(batch(rank, 0)[0] + rank).square().sum().backward()
        optimizer.step()
        return codec

    for codec in LocalSwarm(2).run(task):
        ((_, tensors, exact),) = codec.begun
        assert [tuple(t.shape) for t in tensors] == [(6,), (6,)]
        assert [tuple(t.shape) for t in exact] == [(2,), (6,), (6,)]
        assert exact[0].tolist() == [1.0, 1.0]


def test_plain_averaging_is_what_strategies_have_by_default() -> None:
    optimizer = LocalSGD(adamw(list(Net().parameters())), collective=LocalSwarm(1).collectives[0])
    assert isinstance(optimizer.averaging, PlainAveraging)
    assert optimizer.averaging.state_dict() == {}


# -- clipping the mean -------------------------------------------------------------------------------------------------


def test_all_reduce_clips_the_mean_gradient_as_one_process_would() -> None:
    def task(collective: LocalCollective, rank: int) -> Tensor:
        x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = AllReduce(sgd([x], lr=1.0), collective=collective, clip=1.0)
        # Large gradients that nearly cancel: clipped one by one their mean would be much smaller than it is.
        x.grad = torch.tensor([[30.0, 0.4], [-30.0, 0.4]][rank], dtype=torch.float64)
        optimizer.step()
        x.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
        optimizer.step()
        return x.detach()

    for x in LocalSwarm(2).run(task):
        torch.testing.assert_close(x, torch.tensor([-0.6, -1.2], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan")])
def test_all_reduce_refuses_a_norm_to_clip_to_that_is_none(clip: float) -> None:
    with pytest.raises(ValueError, match="clip="):
        AllReduce(adamw(list(Net().parameters())), collective=LocalSwarm(1).collectives[0], clip=clip)


class LeftOut(PlainAveraging):
    """Contributes nothing, as a codec that is behind the others, whatever weight it is given."""

    def begin(
        self, tensors: Sequence[Tensor], exact: Sequence[Tensor] = (), *, round: RoundKey, weight: float
    ) -> Pending:
        return super().begin(tensors, exact, round=round, weight=0.0)


@pytest.mark.parametrize("kind", [AllReduce, LocalSGD, DiLoCo, CO2])
def test_a_report_tells_the_weight_that_was_offered_and_the_weights_that_were_taken(kind: Any) -> None:
    def replica(collective: LocalCollective, rank: int) -> list[RoundReport]:
        parameter = torch.nn.Parameter(torch.ones(3))
        averaging = LeftOut(collective) if rank == 1 else PlainAveraging(collective)
        optimizer = kind(torch.optim.SGD([parameter], lr=0.1), collective=collective, averaging=averaging)
        reports: list[RoundReport] = []
        optimizer.on_round.append(reports.append)
        for _ in range(2):
            parameter.grad = torch.ones(3)
            optimizer.step()
        optimizer.finish()
        return reports

    for rank, reports in enumerate(LocalSwarm(2).run(replica)):
        assert reports, rank
        assert [report.weight for report in reports[:2]] == [1.0, 1.0], rank
        assert [report.weights for report in reports[:2]] == [(1.0, 0.0)] * 2
