"""Children of a nursery: how they start, what they say, how they end, and that none outlives its supervisor."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarmkit.processes import Child, Children, Link

HARNESS = "tests.unit.swarmkit.harness_children"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    monkeypatch.chdir(ROOT)
    nursery = Children([])
    yield nursery
    nursery.close()


def until(ready: Callable[[], Any], timeout: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := ready()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


def first_message(child: Child) -> dict[str, Any]:
    messages: list[dict[str, Any]] = until(child.link.receive)
    return messages[0]


def wait_end(children: Children, child: Child, timeout: float = 20.0) -> int:
    deadline = time.monotonic() + timeout
    while child.is_running:
        assert time.monotonic() < deadline, "the child did not end"
        select.select([children], [], [], 0.5)
        children.poll()
    assert child.code is not None
    return child.code


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_child_gets_its_arguments_and_tells_its_exit_code(children: Children, tmp_path: Path) -> None:
    child = children.spawn("one", f"{HARNESS}:echo", {"code": 3, "text": "\u00e4"}, log=tmp_path / "deep" / "log.txt")
    message = first_message(child)
    assert message["given"] == {"code": 3, "text": "\u00e4"}
    assert wait_end(children, child) == 3
    assert child.pid == message["pid"]
    assert "printed by the child" in (tmp_path / "deep" / "log.txt").read_text()


def test_each_child_leads_a_session_of_its_own(children: Children, tmp_path: Path) -> None:
    both = [children.spawn(name, f"{HARNESS}:echo", {"code": 0}, log=tmp_path / name) for name in ("a", "b")]
    messages = [first_message(child) for child in both]
    assert all(message["session"] == message["pid"] != os.getsid(0) for message in messages)


def test_an_error_goes_to_the_childs_log(children: Children, tmp_path: Path) -> None:
    child = children.spawn("one", f"{HARNESS}:fail", {}, log=tmp_path / "log.txt")
    assert wait_end(children, child) == 1
    assert "RuntimeError: told to fail" in (tmp_path / "log.txt").read_text()


def test_a_childs_helpers_end_with_it(children: Children, tmp_path: Path) -> None:
    for number, code in ((signal.SIGTERM, 7), (signal.SIGKILL, -signal.SIGKILL)):
        child = children.spawn("one", f"{HARNESS}:with_helper", {}, log=tmp_path / "log.txt")
        message = first_message(child)
        children.signal(child, number)
        assert wait_end(children, child) == code
        until(lambda pid=message["helper"]: is_gone(pid))


def test_a_child_that_is_killed_from_outside_is_noticed(children: Children, tmp_path: Path) -> None:
    child = children.spawn("one", f"{HARNESS}:with_helper", {}, log=tmp_path / "log.txt")
    message = first_message(child)
    os.kill(message["pid"], signal.SIGKILL)
    assert wait_end(children, child) == -signal.SIGKILL
    until(lambda: is_gone(message["helper"]))


def test_a_signal_right_after_the_start_is_not_lost(children: Children, tmp_path: Path) -> None:
    for _ in range(5):
        child = children.spawn("one", f"{HARNESS}:with_helper", {}, log=tmp_path / "log.txt")
        children.signal(child, signal.SIGTERM)
        assert wait_end(children, child) in (7, -signal.SIGTERM)


def test_closing_ends_even_the_deaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    children = Children([], grace_s=0.5)
    child = children.spawn("one", f"{HARNESS}:deaf", {}, log=tmp_path / "log.txt")
    pid = first_message(child)["pid"]
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    children.close()
    children.close()
    assert is_gone(pid)
    assert time.monotonic() - started < 5


def test_the_death_of_the_nursery_is_the_death_of_its_children(children: Children, tmp_path: Path) -> None:
    child = children.spawn("one", f"{HARNESS}:with_helper", {}, log=tmp_path / "log.txt")
    message = first_message(child)
    nursery = psutil.Process(message["pid"]).ppid()
    os.kill(nursery, signal.SIGKILL)
    assert wait_end(children, child) == -signal.SIGKILL
    until(lambda: is_gone(message["pid"]))


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = f"from {HARNESS} import supervisor; supervisor({str(tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        message = json.loads(process.stdout.readline())
        nursery = psutil.Process(message["pid"]).ppid()
        process.kill()
    for pid in (message["pid"], message["helper"], nursery):
        until(lambda pid=pid: is_gone(pid))
    assert not (tmp_path / "sockets").exists()


@pytest.fixture
def line() -> Iterator[tuple[Link, Link]]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    links = Link(ends[0]), Link(ends[1])
    yield links
    for link in links:
        with contextlib.suppress(OSError):
            link.close()


def test_messages_arrive_whole_and_in_order(line: tuple[Link, Link]) -> None:
    for number in range(20):
        assert line[0].send({"number": number, "text": "x" * number * 100})
    assert [message["number"] for message in line[1].receive()] == list(range(20))
    assert not line[1].closed


def test_a_reader_that_sleeps_never_blocks_the_writer(line: tuple[Link, Link]) -> None:
    started = time.monotonic()
    results = [line[0].send({"text": "x" * 1000}) for _ in range(2000)]
    assert results[0]
    assert not results[-1]
    assert time.monotonic() - started < 5


def test_a_dead_end_is_noticed_and_harmless(line: tuple[Link, Link]) -> None:
    line[0].send({"last": 1})
    line[0].close()
    assert line[1].receive() == [{"last": 1}]
    assert line[1].closed
    assert not line[1].send({"to": "nobody"}, patience=5)
