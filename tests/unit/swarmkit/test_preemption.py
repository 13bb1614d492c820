"""The preemption hook: what says that the machine goes, what says that it stays, what says nothing."""

import contextlib
import http.server
import os
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swarmkit.errors import ConfigError
from swarmkit.preemption import PreemptionConfig, PreemptionWatch, Unanswered, ask

pytestmark = pytest.mark.timeout(30)


def asked(config: PreemptionConfig) -> str:
    return ask(config, threading.Event())


def python(code: str) -> str:
    return shlex.join([sys.executable, "-S", "-c", code])


@contextlib.contextmanager
def metadata(status: int, text: str) -> Iterator[tuple[str, list[str]]]:
    """A metadata service that always answers the same; its URL, and the headers that it got."""
    headers: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers.append(str(self.headers.get("Metadata-Flavor")))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/preempted", headers
        finally:
            server.shutdown()
            thread.join()


def test_a_command_says_it_by_its_exit_code() -> None:
    assert asked(PreemptionConfig(command="true")) == ""
    assert "returned 3" in asked(PreemptionConfig(command=python("raise SystemExit(3)")))


def test_a_command_gets_no_shell(tmp_path: Path) -> None:
    assert asked(PreemptionConfig(command=f"echo x > {tmp_path}/made; false")) == ""
    assert not (tmp_path / "made").exists()


def test_a_command_that_is_killed_says_nothing() -> None:
    with pytest.raises(Unanswered, match="signal 9"):
        asked(PreemptionConfig(command=python("import os; os.kill(os.getpid(), 9)")))


def test_a_command_that_hangs_is_ended_with_the_watch(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hang = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    watch = PreemptionWatch(PreemptionConfig(command=python(hang)), pytest.fail, pytest.fail)
    while not pid_file.exists() or not pid_file.read_text():
        os.sched_yield()
    watch.close()
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_a_file_says_it_by_being_there(tmp_path: Path) -> None:
    config = PreemptionConfig(file=str(tmp_path / "flag"))
    assert asked(config) == ""
    (tmp_path / "flag").touch()
    assert "flag is there" in asked(config)


@pytest.mark.parametrize(
    ("status", "text", "goes"),
    [
        (404, "not found", False),  # AWS, before the notice
        (200, '{"action": "terminate", "time": "2026-01-01T00:00:00Z"}', True),  # and after
        (200, "FALSE", False),  # Google
        (200, "TRUE\n", True),
        (200, "NONE", False),
        (200, "", False),
    ],
)
def test_a_url_says_it_by_its_answer(status: int, text: str, goes: bool) -> None:
    with metadata(status, text) as (url, headers):
        reason = asked(PreemptionConfig(url=url, header="Metadata-Flavor: Google"))
    assert bool(reason) == goes
    assert headers == ["Google"]


def test_a_url_that_gives_no_answer_says_nothing() -> None:
    with metadata(503, "busy") as (url, _), pytest.raises(Unanswered, match="answered 503"):
        asked(PreemptionConfig(url=url))
    with pytest.raises(Unanswered, match="cannot be asked"):
        asked(PreemptionConfig(url="http://127.0.0.1:9/"))


def test_the_watch_leaves_once_and_says_a_trouble_once(tmp_path: Path) -> None:
    left, said, enough = [], [], threading.Event()

    def leave(reason: str) -> None:
        left.append(reason)
        enough.set()

    script = tmp_path / "hook.py"
    count = tmp_path / "count"
    script.write_text(
        f"import os, sys; count = {str(count)!r}\n"
        "n = int(open(count).read()) + 1 if os.path.exists(count) else 1\n"
        "open(count, 'w').write(str(n))\n"
        "os.kill(os.getpid(), 9) if n < 3 else sys.exit(n > 3)\n"
    )
    config = PreemptionConfig(command=shlex.join([sys.executable, "-S", str(script)]), every_s=0.01)
    watch = PreemptionWatch(config, leave, said.append)
    assert enough.wait(20)
    watch.close()
    assert count.read_text() == "4"
    assert len(left) == 1
    assert len(said) == 1
    assert "signal 9" in said[0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"command": "'"}, "No closing quotation"),
        ({"command": " "}, "is empty"),
        ({"url": "ftp://x"}, "must begin with http"),
        ({"url": "file:///etc/passwd"}, "must begin with http"),
        ({"header": "x"}, "must look like"),
        ({"header": "x: y\r\nz: w"}, "one line"),
        ({"every_s": 0.0}, "must be positive"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PreemptionConfig(**settings)


def test_a_command_that_does_not_exist_is_refused_before_it_looks_like_a_preemption() -> None:
    with pytest.raises(ConfigError, match="no such program"):
        PreemptionConfig(command="no-such-program --now").check()
    PreemptionConfig(command="true").check()
    assert not PreemptionConfig().is_set
