"""A machine whose clock is wrong takes part, by the swarm's clock; one that is far off is told so."""

import subprocess
import sys
import textwrap

import pytest
import torch

from swarmkit.optim.collective import RoundKey
from swarmkit.peers.node import Node
from swarmkit.peers.settings import NetworkSettings

pytestmark = pytest.mark.timeout(120)
SETTINGS = NetworkSettings(heartbeat_s=0.5, silence_s=2.0, round_timeout_s=10.0)
SKEWED = """
    import sys, time
    right = time.time
    time.time = lambda: right() + {skew}
    import torch
    from swarmkit.optim.collective import RoundKey
    from swarmkit.peers.errors import JoinFailed
    from swarmkit.peers.node import Node
    from swarmkit.peers.settings import NetworkSettings
    settings = NetworkSettings(heartbeat_s=0.5, silence_s=2.0, round_timeout_s=10.0)
    try:
        node = Node.start("skew", initial_peers=["{address}"], settings=settings, existing=True)
    except JoinFailed as error:
        sys.exit(str(error))
    collective = node.collective()
    assert node.wait_for_peers(3, timeout=60)
    for index in range(3):
        done = collective.all_reduce([torch.full((3,), 3.0)], round=RoundKey("x", index), weight=1.0).result(15)
        assert len(done.members) == 3
    print("mean", done.tensors[0][0].item())
    node.close()
"""


def skewed(node: Node, skew: float) -> "subprocess.Popen[str]":
    code = textwrap.dedent(SKEWED).format(skew=skew, address=node.addresses[0])
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_clocks_a_minute_off_do_no_harm_and_one_that_is_an_hour_off_is_named() -> None:
    node = Node.start("skew", settings=SETTINGS)
    try:
        collective = node.collective()
        others = [skewed(node, skew) for skew in (60.0, -60.0, 3600.0)]
        try:
            assert node.wait_for_peers(3, timeout=60)
            for index in range(3):
                key = RoundKey("x", index)
                done = collective.all_reduce([torch.zeros(3)], round=key, weight=1.0).result(15)
                assert len(done.members) == 3
            for other in others[:2]:
                out, err = other.communicate(timeout=30)
                assert other.returncode == 0, err
                assert "mean 2.0" in out
            _, err = others[2].communicate(timeout=30)
            assert "this machine's clock is 3600 s ahead of the run's: set it" in err
        finally:
            for other in others:
                other.kill()
                other.wait(10)
    finally:
        node.close()
