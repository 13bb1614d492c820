"""The namespaces that network tests and benchmarks run in."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .namespaces import namespaces, why_not

pytestmark = [pytest.mark.network, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = server.accept()
total = 0
while data := connection.recv(1 << 20):
    total += len(data)
print(total, flush=True)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
HOLD = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit "ignore"
from tests.network.namespaces import namespaces
with namespaces(1, 100) as made:
    made.popen(0, ["sleep", "60"])
    print("ready", flush=True)
    time.sleep(60)
"""


def ours(pid: int) -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"swkit{pid}-*")]


def test_a_link_has_the_rate_that_was_asked_for_and_counts_its_bytes() -> None:
    size = 4 << 20
    with namespaces(2, 100) as made:
        receiver = made.popen(1, [sys.executable, "-c", RECEIVE, made.addresses[1]], stdout=subprocess.PIPE)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        started = time.monotonic()
        made.popen(0, [sys.executable, "-c", SEND, made.addresses[1], str(size)]).wait(20)
        assert receiver.stdout.readline() == f"{size}\n"
        seconds = time.monotonic() - started
        # Headers take 4.5 % of the rate; the interpreter's start is in it.
        assert size * 8 / 100e6 * 0.9 < seconds < size * 8 / 100e6 * 2 + 0.5
        assert size < made.counters(0).sent < 1.1 * size
        assert size < made.counters(1).received < 1.1 * size
        assert made.counters(1).sent < 0.1 * size
    assert ours(os.getpid()) == []


def test_nothing_is_left_when_the_body_fails() -> None:
    processes = []

    def body() -> None:
        with namespaces(1, 100) as made:
            processes.append(made.popen(0, ["sleep", "60"]))
            assert len(ours(os.getpid())) == 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert processes[0].returncode == -signal.SIGKILL
    assert ours(os.getpid()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    """Of kill -9 the next one removes it."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    assert len(ours(holder.pid)) == 2
    holder.send_signal(number)
    holder.wait(20)
    holder.stdout.close()
    if number is signal.SIGKILL:
        with namespaces(1, 100):
            pass
    assert ours(holder.pid) == []
