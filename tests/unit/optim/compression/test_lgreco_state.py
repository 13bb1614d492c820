"""L-GreCo: which candidates there are, and what is refused of states from elsewhere."""

import math

import pytest

from swarmkit.optim.compression.compressed import CompressedAveraging
from swarmkit.optim.compression.lgreco import LGreCo
from swarmkit.optim.compression.qsgd import QSGD
from swarmkit.optim.compression.sparse import TopK
from swarmkit.peers.local import LocalSwarm
from tests.unit.optim.compression.test_lgreco import adaptive


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
