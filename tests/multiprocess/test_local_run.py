"""`swarmkit local` with four real processes on loopback: agreement, deaths, late joiners, resuming, no ghosts."""

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.multiprocess.harness_commands import OWN, SMALL, Command, Event, command

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]

STEPS = 240
ROUND_TIMEOUT_S = 15
# Bits per byte of the held-out text. Untrained: 8; bytes drawn by their frequency alone: about 4.6.
BOUND = 3.9


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Four peers, left alone."""
    settings = ["peers=4", f"steps={STEPS}", *[s for s in SMALL if s != "log.plots=false"]]
    with command("local", *settings, folder=tmp_path_factory.mktemp("undisturbed")) as run:
        assert run.wait(120) == 0, run.text
        yield run


def digests(run: Command, peers: int = 4) -> list[str]:
    return [event["digest"] for peer in range(peers) for event in run.events(peer, "done")]


def final_score(run: Command, peers: int = 4) -> Event:
    scores = [event for peer in range(peers) for event in run.events(peer, "eval")]
    return max(scores, key=lambda event: event["step"])


def test_four_peers_end_with_equal_parameters_and_have_learnt(undisturbed: Command) -> None:
    assert len(digests(undisturbed)) == 4
    assert len(set(digests(undisturbed))) == 1
    assert final_score(undisturbed)["bpb"] < BOUND
    assert "4 of 4 peers finished and hold the same parameters" in undisturbed.text
    for word in ("validation", "traffic", "sample", "report", "checkpoint"):
        assert re.search(rf"^{word}\b", undisturbed.text, re.MULTILINE), word
    assert (undisturbed.run_folder / "report.md").exists()
    assert (undisturbed.run_folder / "rounds.png").exists()


def test_every_round_had_all_four_members_and_the_same_result(undisturbed: Command) -> None:
    rounds = [undisturbed.events(peer, "round") for peer in range(4)]
    assert [len(events) for events in rounds] == [STEPS // 8] * 4
    for same in zip(*rounds, strict=True):
        assert all(len(event["members"]) == 4 and event["failed"] is None for event in same)
        assert len({event["digest"] for event in same}) == 1


def test_the_first_step_comes_soon_after_the_command(undisturbed: Command) -> None:
    found = re.search(r"first step ([\d.]+) s after the command", undisturbed.text)
    assert found is not None
    assert float(found[1]) < 20


def test_nothing_is_left_of_a_run_that_ended(undisturbed: Command) -> None:
    undisturbed.assert_all_gone(5)


def test_the_others_finish_when_the_first_of_four_is_killed(undisturbed: Command, tmp_path: Path) -> None:
    """The one that the others found the run through, and that coordinates the rounds."""
    with command("local", "peers=4", f"steps={STEPS}", *SMALL, folder=tmp_path) as run:
        run.wait_for_round(0, STEPS // 8 // 2)
        os.kill(run.pid(0), signal.SIGKILL)
        assert run.wait(120) == 0, run.text
        assert "peer-0 ended by SIGKILL" in run.text
        assert "3 of 4 peers finished and hold the same parameters" in run.text
        assert len({event["digest"] for peer in (1, 2, 3) for event in run.events(peer, "done")}) == 1
        undisturbed_loss = final_score(undisturbed)["loss"]
        assert final_score(run)["loss"] == pytest.approx(undisturbed_loss, rel=0.02)
        for peer in (1, 2, 3):
            rounds = run.events(peer, "round")
            assert len(rounds[-1]["members"]) == 3
            assert max(event["seconds"] for event in rounds) < ROUND_TIMEOUT_S + 5
            times = [event["time"] for event in rounds]
            assert max(later - earlier for earlier, later in zip(times, times[1:], strict=False)) < ROUND_TIMEOUT_S + 5
            assert run.events(peer, "peer_lost")
        run.assert_all_gone()


def assert_ends_in_order(run: Command, number: signal.Signals, code: int, *, peers: int) -> None:
    """Send the supervisor a signal: all leave at once with a checkpoint, and nothing remains."""
    assert len(run.alive()) >= 2 + 2 * peers  # supervisor, nursery, peers and their p2pd
    os.kill(run.process.pid, number)
    assert run.wait(15) == code, run.text
    run.assert_all_gone(2)
    for peer in range(peers):
        manifests = list((run.run_folder / f"peer-{peer}" / "checkpoints").glob("step-*/manifest.json"))
        assert manifests
        json.loads(manifests[0].read_text())


def test_ctrl_c_ends_everything_in_order(tmp_path: Path) -> None:
    with command("local", "peers=4", "steps=100000", *SMALL, folder=tmp_path) as run:
        run.wait_for_round(0, 2)
        assert_ends_in_order(run, signal.SIGINT, 130, peers=4)


def test_a_dead_peer_is_started_again_when_asked_and_the_others_go_on_meanwhile(tmp_path: Path) -> None:
    with command("local", "peers=3", "steps=100000", "launch.restart=true", *SMALL, folder=tmp_path) as run:
        run.wait_for_round(2, 3)
        os.kill(run.pid(2), signal.SIGKILL)
        run.wait_for("another start", lambda: len(run.events(2, "run_start")) == 2)
        since = run.events(2, "run_start")[1]["time"]
        mine = run.wait_for("rounds after it", lambda: agreed_rounds(run, 2, since)[4:])
        assert_ends_in_order(run, signal.SIGTERM, 0, peers=3)
        assert "peer-2 is started again (1 of 3)" in run.text
        assert run.events(0, "peer_lost")
        assert max(event["seconds"] for event in run.events(0, "round")) < ROUND_TIMEOUT_S
        theirs = {event["round"]: event["digest"] for event in run.events(0, "round")}
        assert all(event["digest"] == theirs[event["round"]] for event in mine)


def agreed_rounds(run: Command, peer: int, since: float = 0.0) -> list[Event]:
    """Rounds of a peer that gave a result."""
    return [event for event in run.events(peer, "round") if event["failed"] is None and event["time"] > since]


def test_a_late_joiner_agrees_within_two_rounds(tmp_path: Path) -> None:
    (tmp_path / "swarm").mkdir()
    (tmp_path / "joiner").mkdir()
    first = free_ports(6)
    ports = [
        f"network.listen=127.0.0.1:{first}",
        f"network.bulk_port={first + 2}",
        f"log.prometheus_port={first + 4}",
    ]
    with command("local", "peers=2", "steps=100000", *ports, *SMALL, folder=tmp_path / "swarm") as run:
        run.wait_for_round(0, 3)
        assert f"/tcp/{first}/" in run.address()
        assert listening(run) >= set(range(first, first + 6))  # they count upwards from the first peer's
        with command("join", run.address(), *OWN, folder=tmp_path / "joiner") as joiner:
            mine = joiner.wait_for("rounds", lambda: agreed_rounds(joiner, 0)[9:] and agreed_rounds(joiner, 0))
            joined_at = joiner.events(0, "run_start")[0]["time"]
            # The first is the round that it only watched.
            assert [event["weight"] > 0 for event in mine[:2]] == [False, True]
            run.wait_for("the same round", lambda: run.events(0, "round")[-1]["round"] > mine[-1]["round"])
            theirs = {event["round"]: event for event in run.events(0, "round")}
            for event in mine:
                assert event["digest"] == theirs[event["round"]]["digest"]
            assert len(theirs[mine[1]["round"]]["members"]) == 3
            assert joiner.events(0, "run_start")[0]["slot"] == 2
            # Nobody was held up by it.
            during = [event for event in run.events(0, "round") if event["time"] > joined_at]
            assert max(event["seconds"] for event in during) < ROUND_TIMEOUT_S / 2
            os.kill(joiner.process.pid, signal.SIGTERM)
            assert joiner.wait(25) == 0, joiner.text
            joiner.assert_all_gone(5)
        assert_ends_in_order(run, signal.SIGHUP, 0, peers=2)


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that are free."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for port in range(first + 1, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
            return int(first)


def listening(run: Command) -> set[int]:
    """Ports on which processes of a command take connections."""
    found = [socket for pid in run.alive() for socket in psutil.Process(pid).net_connections("inet")]
    return {socket.laddr.port for socket in found if socket.status == psutil.CONN_LISTEN}


def test_a_run_goes_on_after_all_peers_were_killed(undisturbed: Command, tmp_path: Path) -> None:
    settings = [f"steps={STEPS}", "peers=4", "checkpoint.every=40", *SMALL]
    with command("local", *settings, folder=tmp_path) as run:
        run.wait_for("a checkpoint of everybody", lambda: all(run.events(peer, "checkpoint") for peer in range(4)))
        for pid in run.alive():
            os.kill(pid, signal.SIGKILL)
        run.process.wait(10)
        broken = run.run_folder
    with command("local", *settings, f"resume={broken}", folder=tmp_path) as again:
        assert again.wait(120) == 0, again.text
        assert "each peer from its own checkpoint" in again.text
        assert again.events(0, "round")[0]["step"] > 40
        assert len(set(digests(again))) == 1
        # The same samples; only the order in which members are summed, that of joining, may differ.
        assert final_score(again)["loss"] == pytest.approx(final_score(undisturbed)["loss"], rel=1e-3)


def test_a_run_goes_on_with_other_numbers_of_peers(undisturbed: Command, tmp_path: Path) -> None:
    settings = ["peers=5", f"steps={STEPS + 32}", f"resume={undisturbed.run_folder}", *SMALL]
    with command("local", *settings, folder=tmp_path) as run:
        assert run.wait(120) == 0, run.text
        assert len(digests(run, 5)) == 5
        assert len(set(digests(run, 5))) == 1
        assert run.events(4, "round")[0]["step"] == STEPS + 8


def test_left_alone_below_the_minimum_a_peer_saves_and_gives_up(tmp_path: Path) -> None:
    settings = ["peers=2", "network.min_peers=2", "network.max_wait_s=8", "steps=100000", *SMALL]
    with command("local", *settings, folder=tmp_path) as run:
        run.wait_for_round(0, 2)
        os.kill(run.pid(1), signal.SIGKILL)
        assert run.wait(60) == 1, run.text
        assert "peer-0 ended with exit code 4" in run.text
        assert "gave up: 1 of 2 replicas" in run.text
        assert list((run.run_folder / "peer-0" / "checkpoints").glob("step-*"))


def test_a_signal_before_training_ends_everything_too(tmp_path: Path) -> None:
    with command("local", "peers=4", "steps=100000", *SMALL, folder=tmp_path) as run:
        run.wait_for("the supervisor", lambda: "4 peers" in run.text)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait(15) == 130, run.text
        assert "its log ends with" not in run.text  # nobody had begun
        run.assert_all_gone(2)


def test_the_death_of_the_supervisor_ends_everything_even_frozen_peers(tmp_path: Path) -> None:
    with command("local", "peers=4", "steps=100000", "launch.grace_s=8", *SMALL, folder=tmp_path) as run:
        run.wait_for_round(0, 2)
        assert len(run.alive()) >= 10  # supervisor, nursery, four peers, four p2pd
        os.kill(run.pid(1), signal.SIGSTOP)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(5)
        run.assert_all_gone(15)


def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    with command("local", "peers=2", "steps=100000", *SMALL, folder=tmp_path) as run:
        run.wait_for_round(0, 2)
        run.alive()
        os.kill(run.pid(1), signal.SIGSTOP)
        os.kill(run.process.pid, signal.SIGINT)
        run.wait_for("the answer to the first signal", lambda: "SIGINT: asking" in run.text)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait(5) == 130, run.text
        run.assert_all_gone(2)


def test_one_peer_that_is_told_to_leave_does_not_disturb_the_others(tmp_path: Path) -> None:
    with command("local", "peers=3", "steps=240", *SMALL, folder=tmp_path) as run:
        run.wait_for_round(2, 3)
        os.kill(run.pid(2), signal.SIGTERM)
        assert run.wait(120) == 0, run.text
        left = run.events(2, "done")
        assert left
        assert not left[0]["finished"]
        assert "2 of 3 peers finished and hold the same parameters" in run.text
        for event in run.events(0, "round"):
            assert event["seconds"] < 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.parametrize(
    ("setting", "reason"), [("device=cuda", "has no CUDA device"), ("data.max_bytes=10", "the longest has 10")]
)
def test_what_no_peer_can_work_with_is_told_once(setting: str, reason: str, tmp_path: Path) -> None:
    with command("local", *[s for s in SMALL if not s.startswith("device")], setting, folder=tmp_path) as run:
        assert run.wait(60) == 2, run.text
        assert run.text.count(reason) == 1, run.text
        assert "Traceback" not in run.text
        run.assert_all_gone(3)


@pytest.mark.parametrize("setting", ["network.identity=key", "network.announce=[/ip4/127.0.0.1/tcp/4001]"])
def test_what_peers_on_one_machine_cannot_share_is_refused(setting: str, tmp_path: Path) -> None:
    with command("local", setting, *SMALL, folder=tmp_path) as run:
        assert run.wait(30) == 2, run.text
        assert "every peer needs one of its own" in run.text


def test_a_first_peer_that_cannot_start_is_a_failure(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"network.listen=127.0.0.1:{taken.getsockname()[1]}"
        with command("local", "peers=2", listen, *SMALL, folder=tmp_path) as run:
            assert run.wait(60) not in (0, 130), run.text
            run.assert_all_gone(5)
