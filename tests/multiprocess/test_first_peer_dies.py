"""A run outlives its first peer: newcomers get in through another address, or through peers seen before."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.multiprocess.harness_commands import OWN, SMALL, Command, command

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]
LONG = "steps=100000"


def test_newcomers_get_in_after_the_first_peer_was_killed(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    with (
        command("start", "name=orphaned", LONG, *SMALL, folder=folders[0]) as one,
        command("join", one.address(), *OWN, folder=folders[1]) as two,
    ):
        two.wait_for_round(0, 1)
        given = one.address()
        # What a machine remembers, two of whose peers the cache below belongs to.
        cache = folders[1] / "cache" / "swarmkit" / "peers"
        two.wait_for("the cache", lambda: all(at(run) in read(cache) for run in (one, two)))
        for pid in one.alive():
            os.kill(pid, signal.SIGKILL)
        one.process.wait(10)
        two.wait_for("a round alone", lambda: members(two)[-1:] == [1])

        # The configuration was the first peer's to publish; it is still there.
        started = time.monotonic()
        with (
            command("join", f"{given},{at(two)}", *OWN, folder=folders[2]) as three,
            command("join", given, *OWN, folder=folders[1]) as four,
        ):
            three.wait_for("the join", lambda: "joined run 'orphaned'" in three.text, 60)
            assert time.monotonic() - started < 20
            assert f"no way in: {given}: 127.0.0.1 is up but nothing listens" in three.text
            four.wait_for("the join", lambda: "joined run 'orphaned'" in four.text, 60)
            assert "through peers that were seen in it before" in four.text
            for newcomer in (three, four):
                newcomer.wait_for_round(0, 1)
                leave(newcomer)
        leave(two)


def at(run: Command) -> str:
    return run.address()


def members(run: Command) -> list[int]:
    return [len(event["members"]) for event in run.events(0, "round")]


def read(cache: Path) -> str:
    return "".join(path.read_text() for path in cache.glob("*.json"))


def leave(run: Command) -> None:
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(25) == 0, run.text
    run.assert_all_gone(3)
