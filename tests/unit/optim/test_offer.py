"""What a replica may bring to a round."""

import pytest
import torch

from swarmkit.optim import CO2, AllReduce, DeMo, DiLoCo, LocalSGD, SyncedOptimizer
from swarmkit.optim.offer import can_be_sent
from swarmkit.peers.local import LocalCollective, LocalSwarm


def test_what_float32_cannot_hold_is_kept_from_a_codec_only() -> None:
    huge = torch.tensor([1e39], dtype=torch.float64)
    assert can_be_sent([huge], [], coded=False)
    assert not can_be_sent([huge], [], coded=True)
    assert can_be_sent([], [huge], coded=True)  # travels as it is
    assert not can_be_sent([torch.tensor([torch.nan])], [], coded=False)


@pytest.mark.parametrize("strategy", [AllReduce, LocalSGD, DiLoCo, CO2, DeMo])
def test_a_model_with_nothing_to_train_is_refused(strategy: type[SyncedOptimizer]) -> None:
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def task(collective: LocalCollective, _: int) -> None:
        with pytest.raises(ValueError, match="nothing to train"):
            strategy(torch.optim.SGD([frozen], lr=0.1), collective=collective)

    LocalSwarm(1).run(task)
