"""What the collective counts is what the wire saw: interface counters of two namespaces."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from .namespaces import Namespaces, namespaces, why_not

pytestmark = [
    pytest.mark.network,
    pytest.mark.timeout(120),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@dataclass
class Sent:
    """Bytes that the first of two peers sent: as its rounds counted them, and as its interface did."""

    counted: int
    wire: int


def train(*strategies: str) -> list[Sent]:
    options = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "cwd": Path(__file__).parents[2],
        "env": {**os.environ, "OMP_NUM_THREADS": "1"},
    }
    with namespaces(2, 200) as made:
        command = [sys.executable, "-m", "tests.network.byte_peer"]
        peers = [made.popen(rank, [*command, made.addresses[rank], *strategies], **options) for rank in range(2)]
        sent = [measure(made, *peers) for _ in strategies]
        for peer in peers:
            assert peer.wait(30) == 0
    return sent


def measure(made: Namespaces, first: "subprocess.Popen[str]", second: "subprocess.Popen[str]") -> Sent:
    """Have two peers train with their next strategy."""
    say(first.stdin)
    say(second.stdin, line(first.stdout))
    line(second.stdout)
    before = made.counters(0)
    for peer in (first, second):
        say(peer.stdin)
    counted = [json.loads(line(peer.stdout)) for peer in (first, second)]
    after = made.counters(0)
    for peer in (first, second):
        say(peer.stdin)
    return Sent(counted[0]["sent"], after.sent - before.sent)


def line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def say(stream: IO[str] | None, text: str = "") -> None:
    assert stream is not None
    stream.write(f"{text}\n")
    stream.flush()


def test_local_sgd_sends_a_thirty_second_of_what_every_step_averaging_sends() -> None:
    every_step, local_sgd = train("allreduce", "local_sgd")
    assert local_sgd.counted == pytest.approx(every_step.counted / 32, rel=0.05)
    # TLS, HTTP/2, TCP and IP headers, acknowledgements, rounds' control calls and heartbeats come on top.
    assert every_step.counted < every_step.wire < 1.15 * every_step.counted
    assert local_sgd.counted < local_sgd.wire < every_step.wire / 16
