"""What a local run says at its end, and whether it counts as a success."""

import socket
from typing import Any

from swarmkit.processes import Child, Link
from swarmkit.progress import Progress, Row
from swarmkit.summary import Member, summarise
from tests.unit.swarmkit.harness_replicas import small_config


def member(
    number: int, digest: str = "d1", *, finished: bool = True, code: int = 0, first_tokens: int = 0, **done: Any
) -> Member:
    ends = socket.socketpair()
    ends[1].close()
    link = Link(ends[0])
    link.close()
    one = Member(child=Child(number, f"peer-{number}", link, code=code), row=Row(f"peer-{number}"))
    counts = {"step": 100, "tokens": 1000, "bytes_sent": 4000, "bytes_received": 4000, "rounds_closed": 3}
    end = {"kind": "done", "finished": finished, "digest": digest, **counts, **done}
    start = {"kind": "run_start", "parameters": 500, "tokens": first_tokens, "tokens_per_step": 10}
    for event in (start, end):
        one.note(event)
        one.row.update(event)
    return one


def test_peers_that_agree_are_a_success() -> None:
    lines, success = summarise(small_config(), [member(0), member(1)], None)
    assert success
    assert any("2 of 2 peers finished and hold the same parameters, d1" in line for line in lines)


def test_peers_that_differ_are_a_failure_and_named() -> None:
    lines, success = summarise(small_config(), [member(0), member(1, "d2")], None)
    assert not success
    assert "    peer-1: d2" in lines


def test_peers_of_which_none_ever_met_another_are_a_failure() -> None:
    lines, success = summarise(small_config(), [member(0, rounds_closed=0), member(1, rounds_closed=0)], None)
    assert not success
    assert any("NO ROUND GAVE A RESULT" in line for line in lines)


def test_the_dead_and_those_who_left_do_not_count() -> None:
    members = [member(0), member(1, "old", code=-9), member(2, "early", finished=False)]
    assert summarise(small_config(peers=3), members, None)[1]
    lines, success = summarise(small_config(), members[1:], None)
    assert not success
    assert "no peer finished" in lines


def test_losses_stand_beside_the_baselines() -> None:
    one, alone = member(0), member(9, tokens=2000)
    one.note({"kind": "eval", "step": 100, "loss": 2.2, "bpb": 3.17})
    alone.note({"kind": "eval", "step": 100, "loss": 2.0, "bpb": 2.89})
    text = "\n".join(summarise(small_config(), [one], alone)[0])
    assert "validation  3.1700 bits per byte (2.2000 nats) at step 100" in text
    assert "the same 2,000 tokens; the swarm's loss is +10.0 % of that" in text


def test_traffic_is_compared_with_averaging_in_every_step() -> None:
    # Two peers, 100 steps each, 500 float32 parameters: 2 * 100 * 2 * 1/2 * 2000 bytes = 400 kB for 2000 tokens.
    text = "\n".join(summarise(small_config(), [member(0), member(1)], None)[0])
    assert "4.00 bytes sent per token" in text
    assert "averaging in every step would send 200.00, 50.0 times as much" in text


def test_without_a_terminal_progress_is_plain_lines(capsys: Any) -> None:
    progress = Progress(10)
    rows = [progress.add("peer-0"), progress.add("peer-1")]
    for row, loss in zip(rows, (2.0, 4.0), strict=True):
        row.update({"kind": "train", "step": 5, "tokens": 50, "loss": loss, "tokens_per_s": 100.0})
        row.update({"kind": "round", "step": 5, "round": 0, "bytes_sent": 1_500_000, "digest": ""})
    progress.refresh(force=True)
    rows[1].state = "died"
    progress.refresh(force=True)
    progress.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 5/10  round 1  loss 3.0000  200 tokens/s  sent 3.0 MB")
    assert "loss 2.0000" in second
    assert "peer-1" not in second


def test_the_traffic_of_a_resumed_run_is_that_of_its_own_tokens() -> None:
    members = [member(number, first_tokens=49_000, tokens=50_000) for number in range(2)]
    text = "\n".join(summarise(small_config(), members, None)[0])
    assert "4.00 bytes sent per token" in text
    assert "averaging in every step would send 200.00, 50.0 times as much" in text
