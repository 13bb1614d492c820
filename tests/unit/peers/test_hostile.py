"""What a stranger on the network can send, and that it ends no honest peer's round."""

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from swarmkit.optim.collective import RoundKey
from swarmkit.peers.collective import SwarmCollective
from swarmkit.peers.coordinator import MAX_OPEN_ROUNDS
from swarmkit.peers.engine import get_dht_time
from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.node import Node
from swarmkit.peers.records import seal
from swarmkit.peers.roster import PURPOSE
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.wire import Message, encode

pytestmark = pytest.mark.timeout(90)
SETTINGS = NetworkSettings(heartbeat_s=0.5, silence_s=1.0, round_timeout_s=4.0)


class Scene:
    """Two honest replicas and a stranger that knows the protocol."""

    def __init__(self) -> None:
        self.honest = [Node.start("scene", settings=SETTINGS)]
        known = [self.honest[0].addresses[0]]
        self.honest.append(Node.start("scene", initial_peers=known, settings=SETTINGS))
        self.stranger = Node.start("scene", initial_peers=known, settings=SETTINGS, role="observer")
        self.collectives: list[SwarmCollective] = [node.collective() for node in self.honest]
        for node in self.honest:
            assert node.wait_for_peers(2, timeout=20)

    def meeting(self, index: int, **changes: Any) -> Message:
        schema = {"schema": [["float32", [3]]]}
        base: Message = {"round": "x", "index": index, "operation": "reduce", "weight": 1.0, "joined_at": 0.0}
        return {
            **base,
            **schema,
            "lineage": "",
            "config": "",
            "rules": "",
            "norm": 0.0,
            "gave_up": False,
            "timeout": 4.0,
            **changes,
        }

    def call(self, method: str, message: Message) -> Message:
        call = self.stranger._rpc.call(self.honest[0].peer_id, method, message, timeout=10.0)
        return self.stranger._thread.run(call, timeout=15)

    def honest_round(self, index: int) -> list[int]:
        key = RoundKey("x", index)
        futures = [c.all_reduce([torch.ones(3)], round=key, weight=1.0) for c in self.collectives]
        return [len(future.result(15).members) for future in futures]

    def close(self) -> None:
        for node in [self.stranger, *self.honest]:
            node.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    try:
        yield made
    finally:
        made.close()


def test_a_round_of_the_far_future_does_not_make_the_present_ones_old(scene: Scene) -> None:
    answer = scene.call("meet", scene.meeting(10**9))
    assert answer["outcome"] == "begin", "the stranger is alone in that round"
    scene.call(
        "report",
        {
            "round": "x",
            "index": 10**9,
            "attempt": answer["attempt"],
            "ok": True,
            "blame": "",
            "reason": "",
            "is_link": False,
            "is_echo": False,
        },
    )
    assert scene.honest_round(0) == [2, 2]


@pytest.mark.parametrize("weight", [1e300, -1.0, float("nan"), float("inf")])
def test_a_weight_that_would_spoil_the_mean_is_refused(scene: Scene, weight: float) -> None:
    with pytest.raises(ProtocolError, match="weight"):
        scene.call("meet", scene.meeting(0, weight=weight))
    assert scene.honest_round(0) == [2, 2]


def test_a_peer_cannot_open_rounds_without_end(scene: Scene) -> None:
    async def flood() -> list[object]:
        target = scene.honest[0].peer_id
        calls = [scene.stranger._rpc.call(target, "meet", scene.meeting(i), timeout=10.0) for i in range(100, 200)]
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = scene.stranger._thread.run(flood(), timeout=30)
    refused = [answer for answer in answers if isinstance(answer, ProtocolError)]
    assert len(refused) == 100 - MAX_OPEN_ROUNDS
    assert scene.honest_round(0) == [2, 2]


def test_a_heartbeat_from_the_future_does_not_hide_later_ones(scene: Scene) -> None:
    first, second = scene.honest
    record = next(record for record in first.table() if record.peer_id == second.peer_id)
    for ahead in (1e300, get_dht_time() + 1e6):
        body = encode(asdict(replace(record, state="gone", updated_at=ahead)))
        forged = seal(second._access.identity, PURPOSE, "scene", body)
        first._roster._accept(second.peer_id, forged)
    assert next(r for r in first.table() if r.peer_id == second.peer_id).state == "training"
