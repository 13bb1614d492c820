"""`swarmkit start`, `join` and `bootstrap` as separate commands: the join line, waiting, leaving, exit codes."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.multiprocess.harness_commands import OWN, SMALL, Command, Event, command

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]
LONG = "steps=100000"


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("first", "second", "third", "fourth")]
    for folder in made:
        folder.mkdir()
    return made


def test_the_printed_line_is_enough_to_join(folders: list[Path]) -> None:
    with command("start", "name=two", "peers=2", "network.min_peers=2", "steps=160", *SMALL, folder=folders[0]) as one:
        line = one.wait_for("the join line", lambda: re.search(r"swarmkit (join /ip4/127\S+)", one.text))
        with command(*line[1].split(), *OWN, folder=folders[1]) as two:
            assert two.wait(90) == 0, two.text
            assert one.wait(30) == 0, one.text
            digests = {run.events(0, "done")[0]["digest"] for run in (one, two)}
            assert len(digests) == 1
            # Both began at the first step: nobody trained before the two were there.
            assert [len(event["members"]) for event in one.events(0, "round")] == [2] * 20
            assert [run.events(0, "run_start")[0]["slot"] for run in (one, two)] == [0, 1]
            assert all(run.events(0, "eval") for run in (one, two))
            for run in (one, two):
                run.assert_all_gone(5)


def test_who_waits_says_so_within_ten_seconds_and_gives_up_in_time(folders: list[Path]) -> None:
    settings = ["peers=2", "network.min_peers=2", "network.max_wait_s=7", LONG, *SMALL]
    with command("start", *settings, folder=folders[0]) as run:
        run.wait_for("waiting", lambda: [e for e in run.events(0, "state") if e["state"] == "waiting"])
        started = time.monotonic()
        run.wait_for("a reason", lambda: "waiting: 1 of 2 replicas are here (no other peer is known)" in run.text)
        assert time.monotonic() - started < 10
        assert run.wait(30) == 4, run.text
        assert "gave up: 1 of 2 replicas" in run.text
        run.assert_all_gone(5)


def test_a_peer_that_is_told_to_leaves_in_order(folders: list[Path]) -> None:
    with (
        command("start", "network.drain_timeout_s=10", LONG, *SMALL, folder=folders[0]) as one,
        command("join", one.address(), "network.drain_timeout_s=10", folder=folders[1]) as two,
    ):
        two.wait_for_round(0, 3)
        started = time.monotonic()
        os.kill(two.process.pid, signal.SIGTERM)
        assert two.wait(12) == 0, two.text
        left_at = two.events(0, "done")[0]["time"]
        assert time.monotonic() - started < 10
        assert list((two.run_folder / "peer-0" / "checkpoints").glob("step-*"))
        assert [event["state"] for event in two.events(0, "state")][-1] == "draining"
        two.assert_all_gone(2)

        # The other goes on alone at once: it does not wait for one that said good-bye.
        def later() -> list[Event]:
            return [event for event in one.events(0, "round") if event["time"] > left_at + 1]

        after = one.wait_for("further rounds", lambda: later()[3:] and later())
        assert max(event["seconds"] for event in after) < 2
        os.kill(one.process.pid, signal.SIGTERM)
        assert one.wait(12) == 0, one.text


def test_a_second_signal_ends_a_peer_at_once(folders: list[Path]) -> None:
    with command("start", "network.min_peers=2", LONG, *SMALL, folder=folders[0]) as run:
        run.address()
        run.wait_for("training", lambda: run.events(0, "state"))
        # Frozen for a moment, so that both signals are there before it can leave.
        os.kill(run.process.pid, signal.SIGSTOP)
        os.kill(run.process.pid, signal.SIGINT)
        os.kill(run.process.pid, signal.SIGTERM)
        os.kill(run.process.pid, signal.SIGCONT)
        assert run.wait(5) in (130, 143), run.text
        run.assert_all_gone(5)


def test_joining_where_there_is_no_run_fails_at_once_and_says_why(folders: list[Path]) -> None:
    address = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWB89EF4eK5Cp2C1HTsx7LPxVCCiMB3zU4WghNzpGsEouY"
    with command("join", address, folder=folders[0]) as run:
        assert run.wait(30) == 11, run.text
        assert "nothing listens on port 9" in run.text
        assert "Traceback" not in run.text
        run.assert_all_gone(2)


def test_a_joiner_cannot_change_what_the_run_decides(folders: list[Path]) -> None:
    address = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWB89EF4eK5Cp2C1HTsx7LPxVCCiMB3zU4WghNzpGsEouY"
    with command("join", address, "optimizer.lr=1", folder=folders[0]) as run:
        assert run.wait(30) == 2, run.text
        assert "optimizer.lr=1: the run decides this" in run.text


def test_a_run_begins_once_at_a_bootstrap_peer_that_does_not_train(folders: list[Path]) -> None:
    with command("bootstrap", "name=kept", "network.listen=127.0.0.1:0", folder=folders[0]) as keeper:
        found = keeper.wait_for("its address", lambda: re.search(r"initial_peers=\[(\S+)\]", keeper.text))
        entry = f"network.initial_peers=[{found[1]}]"
        with command("start", "name=kept", entry, LONG, *SMALL, folder=folders[1]) as one:
            one.wait_for_round(0, 1)
            with (
                command("start", "name=kept", entry, LONG, *SMALL, folder=folders[3]) as again,
                command("join", found[1], *OWN, folder=folders[2]) as two,
            ):
                assert again.wait(40) == 2, again.text
                assert "a run of this name is up" in again.text
                again.assert_all_gone(5)
                two.wait_for_round(0, 1)
                assert "joined run 'kept'" in two.text
                assert {len(event["members"]) for event in one.events(0, "round")} <= {1, 2}
                for run in (two, one, keeper):
                    leave(run)


def leave(run: Command) -> None:
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(25) == 0, run.text
    run.assert_all_gone(3)
