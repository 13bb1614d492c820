"""The control plane and the ways to leave with real processes: drain, checkpoint, watch, preemption, deadlines."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swarmkit.peers.control_client import ControlClient
from swarmkit.peers.errors import PeerUnreachable
from swarmkit.peers.grpc_library import grpc
from tests.multiprocess.harness_commands import OWN, SMALL, Command, command

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]
LONG = "steps=100000"


def swarmkit(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", "from swarmkit.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def target(run: Command, peer: int) -> str:
    pattern = f"runs/*/*/peer-{peer}/control.json"
    (path,) = run.wait_for(f"the control plane of peer {peer}", lambda: list(run.folder.glob(pattern)))
    return str(json.loads(path.read_text())["target"])


def test_one_of_three_is_drained_and_the_others_go_on_unharmed(tmp_path: Path) -> None:
    with command("local", "peers=3", LONG, *SMALL, folder=tmp_path) as run:
        run.wait_for_round(0, 3)
        folder = str(run.run_folder)

        with grpc.insecure_channel(target(run, 2)) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert check.status == health_pb2.HealthCheckResponse.SERVING

        code, text = swarmkit("status", folder, "--peer", "2", "--json")
        assert code == 0, text
        told = json.loads(text)
        assert told["asked"]["state"] == "training"
        assert told["asked"]["pid"] == run.pid(2)
        assert len(told["peers"]) == 3

        code, text = swarmkit("checkpoint", folder, "--peer", "2")
        assert code == 0, text
        assert (Path(text.split(": ")[-1].strip()) / "manifest.json").exists()

        pid, asked_at = run.pid(2), time.time()
        code, text = swarmkit("drain", folder, "--peer", "2", "--reason", "upgrade")
        assert code == 0, text
        assert "peer-2 has left" in text
        assert not psutil.pid_exists(pid)
        (done,) = run.events(2, "done")
        assert not done["finished"]
        assert [event["reason"] for event in run.events(2, "leaving")] == ["upgrade"]
        assert [event["state"] for event in run.events(2, "state")][-1] == "draining"
        assert run.events(2, "checkpoint")[-1]["step"] == done["step"]
        assert not (run.run_folder / "peer-2" / "control.json").exists()
        # What it had is in the round that it closed with the others.
        (last,) = [event for event in run.events(2, "round") if event["round"] == done["round"] - 1]
        assert last["failed"] is None
        assert len(last["members"]) == 3

        run.wait_for_round(0, len(run.events(0, "round")) + 5)
        for peer in (0, 1):
            after = [event for event in run.events(peer, "round") if event["time"] > asked_at]
            assert [event["failed"] for event in after] == [None] * len(after)
            assert max(event["seconds"] for event in after) < 4
            assert len(after[-1]["members"]) == 2
            states = {event["state"] for event in run.events(peer, "peer_lost")}
            assert states <= {"draining", "gone"}

        assert swarmkit("drain", folder)[0] == 2  # which one?
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait(20) == 0, run.text
        assert swarmkit("status", folder)[0] == 2  # nobody is left
        run.assert_all_gone(5)


def test_a_watcher_sees_each_round_in_a_line_and_the_end(tmp_path: Path) -> None:
    with command("local", "peers=2", "steps=400", *SMALL, folder=tmp_path) as run:
        where = target(run, 1)
        code, text = swarmkit("watch", where)
        assert code == 0, text
        assert run.wait(60) == 0, run.text
        rounds = [line for line in text.splitlines() if "  round " in line]
        first, last = (int(line.split("round ")[1].split()[0]) for line in (rounds[0], rounds[-1]))
        assert len(rounds) == last - first + 1
        assert last == 49
        assert "2 members" in rounds[-1]
        assert "finished at step 400, round 50" in text
        assert "\x1b" not in text


def test_a_machine_that_is_about_to_be_taken_is_left_in_order(tmp_path: Path) -> None:
    settings = [f"preemption.command='test ! -e {tmp_path}/flag'", "preemption.every_s=0.1", LONG, *SMALL]
    with command("start", *settings, folder=tmp_path) as run:
        run.wait_for_round(0, 2)
        (tmp_path / "flag").touch()
        assert run.wait(20) == 0, run.text
        assert "leaving: preemption: " in run.text
        assert list((run.run_folder / "peer-0" / "checkpoints").glob("step-*"))
        assert run.events(0, "leaving")[0]["reason"].startswith("preemption: ")
        run.assert_all_gone(3)


def test_a_peer_in_a_stalled_round_leaves_in_time(tmp_path: Path) -> None:
    """The other one is frozen, and would be waited for longer than this one may take to leave."""
    settings = ["peers=2", LONG, *[s for s in SMALL if "silence" not in s and "round_timeout" not in s]]
    slow = ["network.silence_s=60", "network.round_timeout_s=120", "network.drain_timeout_s=6"]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with (
        command("start", *settings, *slow, folder=tmp_path / "one") as one,
        command("join", one.address(), *OWN, folder=tmp_path / "two") as two,
    ):
        two.wait_for_round(0, 2)
        frozen = list(two.alive())
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            os.kill(one.process.pid, signal.SIGTERM)
            assert one.wait(10) == 0, one.text
            assert time.monotonic() - started < 7
            assert list((one.run_folder / "peer-0" / "checkpoints").glob("step-*"))
            one.assert_all_gone(3)
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGKILL)


def test_a_peer_in_the_middle_of_a_download_leaves_at_once(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    slow = "network.state_mbit=0.05"  # a third of a megabyte takes a minute
    with command("start", slow, LONG, *SMALL, folder=tmp_path / "one") as one:
        one.wait_for_round(0, 1)
        with command("join", one.address(), *OWN, folder=tmp_path / "two") as two:
            two.wait_for("the download", lambda: [e for e in two.events(0, "state") if e["state"] == "joining"])
            os.kill(two.process.pid, signal.SIGTERM)
            assert two.wait(15) == 0, two.text
            assert "left before training began" in two.text
            two.assert_all_gone(3)
        one.wait_for_round(0, len(one.events(0, "round")) + 1)  # nobody waits for it any more
        assert {event["failed"] for event in one.events(0, "round")} == {None}


def test_after_a_drain_a_signal_is_the_first_and_the_next_ends_it(tmp_path: Path) -> None:
    with command("start", "network.min_peers=2", LONG, *SMALL, folder=tmp_path) as run:
        where = target(run, 0)
        run.wait_for("training", lambda: run.events(0, "state"))
        with ControlClient(where) as client:
            os.kill(run.process.pid, signal.SIGSTOP)
            try:
                with pytest.raises(PeerUnreachable):
                    client.drain("while it is frozen", timeout=0.5)
            finally:
                os.kill(run.process.pid, signal.SIGTERM)
                os.kill(run.process.pid, signal.SIGCONT)
        assert run.wait(20) == 0, run.text
        run.assert_all_gone(3)
