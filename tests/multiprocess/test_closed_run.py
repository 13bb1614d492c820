"""A closed run by the commands: start makes the key, invite signs, join proves it, and who may not come hears why."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.harness_commands import OWN, SMALL, command

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]
OWNER = ["name=shut", "network.closed=true"]


def tool(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command that ends by itself."""
    call = [sys.executable, "-c", "from swarmkit.cli import main; main()", *arguments]
    return subprocess.run(call, cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_closed_run_lets_in_whom_its_owner_invites_and_tells_the_others_why_not(tmp_path: Path) -> None:
    owner, guest = tmp_path / "owner", tmp_path / "guest"
    owner.mkdir()
    guest.mkdir()
    with command("start", *OWNER, "steps=100000", *SMALL, folder=owner) as one:
        one.wait_for_round(0, 1)
        assert "swarmkit invite GUEST name=shut" in one.text
        key = owner / "shut.run-key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        written = tool(owner, "invite", "alice", "--days", "1", "--to", str(guest / "alice.invite"), "name=shut")
        assert written.returncode == 0, written.stderr
        assert stat.S_IMODE((guest / "alice.invite").stat().st_mode) == 0o600
        with (
            command("join", one.address(), folder=guest) as outsider,
            command("join", one.address(), "--invite", "alice.invite", *OWN, folder=guest) as two,
        ):
            assert outsider.wait(60) == 18, outsider.text
            assert "error: not invited: this run is closed" in outsider.text
            assert "Traceback" not in outsider.text
            two.wait_for_round(0, 2)
            # Whoever is revoked is out while it trains.
            told = tool(owner, "invite", "--revoke", "alice", "--at", one.address(), "name=shut")
            assert "1 of 1 peers took it" in told.stdout, told
            assert two.wait(60) == 18, two.text
            assert "error: revoked: the invitation of 'alice' was revoked" in two.text
        # What peers leave on disk has no secret in it.
        secret = (guest / "alice.invite").read_text().strip()
        for path in guest.rglob("*"):
            if path.is_file() and path.name != "alice.invite" and path.stat().st_size < 1 << 20:
                assert secret.encode() not in path.read_bytes(), path
        os.kill(one.process.pid, signal.SIGTERM)
        assert one.wait(30) == 0, one.text
        one.assert_all_gone(5)


def test_a_key_that_is_missing_or_unfit_is_a_line_and_exit_code_2(tmp_path: Path) -> None:
    missing = tool(tmp_path, "invite", "alice", "name=shut")
    assert missing.returncode == 2
    assert "no run key shut.run-key" in missing.stderr
    (tmp_path / "shut.run-key").write_text("-----BEGIN PRIVATE KEY-----\nabc")
    (tmp_path / "shut.run-key").chmod(0o600)
    unfit = tool(tmp_path, "invite", "alice", "name=shut")
    assert unfit.returncode == 2
    assert "damaged or cut off" in unfit.stderr
    assert len(unfit.stderr.splitlines()) == 1
    assert (tmp_path / "shut.run-key").read_text() == "-----BEGIN PRIVATE KEY-----\nabc"
