"""The harness itself: tests that are killed leave no command behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from swarmkit.peers.hygiene import DYING_WITH_PARENT

SCRIPT = """
import signal, sys
from pathlib import Path
from tests.multiprocess.harness_commands import Command
print(Command(["bootstrap", "name=orphan"], Path(sys.argv[1])).process.pid, flush=True)
signal.pause()
"""


@pytest.mark.skipif(not DYING_WITH_PARENT, reason="only Linux has a parent-death signal")
def test_a_command_dies_with_the_tests_that_started_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        command = psutil.Process(int(tests.stdout.readline()))
        deadline = time.monotonic() + 30
        while "prctl" in " ".join(command.cmdline()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        tests.send_signal(signal.SIGKILL)
    # A bootstrap peer would stay for ever.
    assert not psutil.wait_procs([command], timeout=10)[1]
