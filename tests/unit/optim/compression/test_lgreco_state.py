"""L-GreCo: which candidates there are, and what is refused of states from elsewhere."""

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from swarmkit.optim import AllReduce
from swarmkit.optim.compression.compressed import CompressedAveraging
from swarmkit.optim.compression.lgreco import LGreCo, _Asked, size_table
from swarmkit.optim.compression.qsgd import QSGD
from swarmkit.optim.compression.sparse import TopK
from swarmkit.peers.local import LocalSwarm
from tests.unit.optim.compression.test_lgreco import adaptive, average


@pytest.mark.parametrize("candidates", [None, [2, 3, 4, 6]])
def test_with_error_feedback_no_candidate_is_one_whose_noise_grows(candidates: list[float] | None) -> None:
    collective = LocalSwarm(1).collectives[0]
    fed = LGreCo(CompressedAveraging(QSGD(4), collective, error_feedback=True), candidates=candidates)
    assert fed.candidates == ([4, 5, 6, 7, 8] if candidates is None else [4, 6])
    with pytest.raises(ValueError, match="not all among"):
        fed.load_shared_state({"parameters": [2]})
    with pytest.raises(ValueError, match="grows without end"):
        fed.averaging.parameters = [2]
    for codec in (QSGD(3), QSGD(4, norm="l2")):
        with pytest.raises(ValueError, match="grows without end"):
            CompressedAveraging(codec, collective, error_feedback=True)
    unfed = LGreCo(CompressedAveraging(QSGD(4), collective), candidates=candidates)
    assert unfed.candidates[:2] == [2, 3]


def test_the_shared_state_of_a_stranger_is_checked() -> None:
    lgreco = adaptive(TopK(0.05), LocalSwarm(1).collectives[0])
    for wrong in ([2.0], [0.05, math.nan], "0.05", [True], [[0.05]], {"0": 0.05}, 0.05):
        with pytest.raises(ValueError, match="parameters"):
            lgreco.load_shared_state({"parameters": wrong})
    with pytest.raises(ValueError, match="members"):
        lgreco.load_shared_state({"parameters": [0.05], "members": -1})
    assert lgreco.shared_state() == {"members": None, "parameters": None}
    for right in ([0.05, 0.1, 0.05, 0.05], None):
        lgreco.load_shared_state({"parameters": right})
        assert lgreco.shared_state() == {"members": None, "parameters": right}


def test_parameters_for_another_number_of_tensors_are_refused_with_the_snapshot() -> None:
    collective = LocalSwarm(1).collectives[0]
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    lgreco = adaptive(TopK(0.05), collective)
    optimizer = AllReduce(torch.optim.SGD(model.parameters(), lr=0.1), collective=collective, averaging=lgreco)
    tensors, meta = optimizer.snapshot()
    for wrong in ([0.05], [0.05] * 3, [0.05] * 100_000):
        meta["averaging"] = [{"members": 1, "parameters": wrong}]
        with pytest.raises(ValueError, match="this run sends 2 tensors"):
            optimizer.load_snapshot(tensors, meta)
        assert lgreco.parameters is None
    meta["averaging"] = [{"members": 1, "parameters": [0.05, 0.1]}]
    optimizer.load_snapshot(tensors, meta)
    assert lgreco.parameters == (0.05, 0.1)


def test_parameters_that_turn_out_to_be_of_other_tensors_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    lgreco = adaptive(TopK(0.05), LocalSwarm(1).collectives[0])
    lgreco.load_shared_state({"members": 1, "parameters": [0.1] * 7})
    with caplog.at_level(logging.WARNING):
        assert average(lgreco, 0, 1).members == ("local0",)
    assert "7 parameters came for 4 tensors" in caplog.text
    assert lgreco.parameters is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("x", "is a str, not a tensor"),
        (torch.zeros(3), r"shape \[3\]"),
        (torch.zeros(1, 9000), "shape"),
        (torch.full((9000,), math.nan), "not finite"),
        (torch.zeros(9000, dtype=torch.float64), "torch.float64"),
    ],
)
def test_a_saved_window_that_is_none_is_refused_and_changes_nothing(wrong: Any, words: str) -> None:
    lgreco = adaptive(TopK(0.05), LocalSwarm(1).collectives[0])
    for step in range(4):
        average(lgreco, 0, step)
    before = lgreco.state_dict()
    with pytest.raises(ValueError, match=words):
        lgreco.load_state_dict({**before, "sum": wrong})
    with pytest.raises(ValueError, match="is a NoneType"):
        lgreco.load_state_dict({**before, "averaging": None})
    after = lgreco.state_dict()
    assert isinstance(before["sum"], Tensor)
    assert torch.equal(after["sum"], before["sum"])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_who_has_chosen_before_chooses_from_a_table_as_who_has_not(seed: int, tensors: int) -> None:
    """On tables full of ties too, where all edges of the trade-off are of one slope, which rounding breaks."""
    rng = np.random.default_rng(seed)
    collective = LocalSwarm(1).collectives[0]
    old, new = (LGreCo(CompressedAveraging(TopK(0.01), collective)) for _ in range(2))
    asked = _Asked([str(i) for i in range(tensors)], ((40, 50),) * tensors)
    slopes = rng.choice([1 / 3, 0.7], size=(2, 1, 1))
    sizes = size_table(old.codec, asked.shapes, old.candidates)
    before, table = (sizes[:, -1:] - sizes) * slopes * rng.choice([1, 2, 3], size=(2, tensors, 1))
    old._choose(before, asked)
    old._choose(table, asked)
    new._choose(table, asked)
    assert old.parameters is not None
    assert old.parameters == new.parameters
    assert old.allocation == new.allocation
