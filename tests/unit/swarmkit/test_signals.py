"""How a process leaves: first signal, second signal, deadline."""

import os
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import sys, threading, time
from swarmkit.signals import Leaving
leaving = Leaving(float(sys.argv[1]))
leaving.install()
stop, late = threading.Event(), threading.Event()
if sys.argv[2] != "starting":
    leaving.ready(stop.set, late.set)
if sys.argv[2] == "asked":
    answers = []
    thread = threading.Thread(target=lambda: answers.extend([leaving.ask("why"), leaving.ask("again")]))
    thread.start()
    thread.join()
    assert answers == [True, False]
print("up", flush=True)
if sys.argv[2] == "stuck":
    while True:
        time.sleep(60)
if sys.argv[2] == "asked":
    stop.wait()
    late.wait()
    print(leaving.reason, leaving.left_s <= leaving.timeout_s, flush=True)
    leaving.end(leaving.exit_code)
if sys.argv[2] == "slow":
    late.wait()
    print("deadline", flush=True)
    sys.exit(leaving.exit_code)
stop.wait()
print("left", flush=True)
sys.exit(leaving.exit_code)
"""


def run(kind: str, *numbers: signal.Signals, timeout_s: float = 5.0) -> tuple[int, str, float]:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(timeout_s), kind], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        started = time.monotonic()
        if len(numbers) > 1:
            os.kill(process.pid, signal.SIGSTOP)  # so that both are there at once
        for number in numbers:
            os.kill(process.pid, number)
        os.kill(process.pid, signal.SIGCONT)
        output = process.stdout.read()
        return process.wait(20), output, time.monotonic() - started


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_the_first_signal_lets_it_leave_in_order(number: signal.Signals, code: int) -> None:
    assert run("orderly", number)[:2] == (code, "left\n")


def test_a_signal_before_there_is_anything_to_keep_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("starting", signal.SIGINT)[:2] == (130, "")


def test_a_second_signal_ends_it_at_once() -> None:
    code, output, seconds = run("stuck", signal.SIGINT, signal.SIGTERM, timeout_s=60)
    assert code in (130, 143)
    assert output == ""
    assert seconds < 10


def test_when_time_gets_short_it_is_told() -> None:
    code, output, seconds = run("slow", signal.SIGTERM, timeout_s=3.0)
    assert (code, output) == (0, "deadline\n")
    assert seconds > 1.0


def test_the_kernel_ends_what_is_stuck() -> None:
    code, _, seconds = run("stuck", signal.SIGTERM, timeout_s=1.0)
    assert code == -signal.SIGALRM
    assert seconds < 5


def test_it_can_be_asked_from_any_thread_and_leaves_by_the_deadline() -> None:
    code, output, seconds = run("asked", timeout_s=3.0)
    assert (code, output) == (0, "why True\n")
    assert seconds < 6


def test_a_signal_after_it_was_asked_is_the_first_and_the_next_ends_it() -> None:
    assert run("asked", signal.SIGTERM, timeout_s=3.0)[:2] == (0, "why True\n")
    code, output, seconds = run("asked", signal.SIGTERM, signal.SIGINT, timeout_s=60)
    assert code in (130, 143)
    assert output == ""
    assert seconds < 30
