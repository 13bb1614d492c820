"""What a peer says in a terminal of its own."""

from typing import Any

from swarmkit.console import ConsoleSink


def said(*events: dict[str, Any], seconds: float = 10.0) -> list[str]:
    lines: list[str] = []
    now = 0.0

    def clock() -> float:
        return now

    sink = ConsoleSink(lines.append, 100, clock=clock)
    for event in events:
        sink.write(event)
        now += seconds
    return lines


def train(step: int) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 2.5, "tokens_per_s": 1234.0}


def closed(number: int, failed: str | None = None) -> dict[str, Any]:
    members = [] if failed else ["a", "b"]
    return {"kind": "round", "round": number, "members": members, "bytes_sent": 1_000_000, "failed": failed}


def test_progress_is_a_line_now_and_then() -> None:
    lines = said(closed(0), train(10), closed(1), train(20))
    assert lines == [
        "step 10/100  loss 2.5000  1,234 tokens/s  2 peers in the last round  sent 1.0 MB",
        "step 20/100  loss 2.5000  1,234 tokens/s  2 peers in the last round  sent 2.0 MB",
    ]
    assert len(said(*(train(step) for step in range(50)), seconds=0.5)) == 5


def test_who_comes_who_goes_and_what_failed_is_said_at_once() -> None:
    lost = {"kind": "peer_lost", "id": "x", "reason": "no ping for 5 s"}
    joined = {"kind": "peer_joined", "id": "12D3KooWabcdefgh", "round": 3}
    lines = said(lost, joined, closed(4, failed="timeout"), seconds=0.0)
    assert lines == [
        "lost a peer: no ping for 5 s",
        "abcdefgh is in round 3",
        "round 4 failed, training goes on: timeout",
    ]
