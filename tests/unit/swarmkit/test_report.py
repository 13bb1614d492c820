"""The report says what the events say, and its plots are pictures."""

import sys
from pathlib import Path

import pytest

from swarmkit.events import bytes_per_token, bytes_per_token_so_far, final_digests, read_run
from swarmkit.metrics import EventLog
from swarmkit.plots import swarm_curve
from swarmkit.report import write_report

PNG = b"\x89PNG\r\n\x1a\n"


def write_peer(
    folder: Path,
    *,
    digest: str = "abc123",
    dead: bool = False,
    sent: int = 150,
    finished: bool = True,
    first_tokens: int = 0,
) -> None:
    """Twenty steps of 100 tokens, a round every ten, of two members."""
    time = iter(range(1000, 2000))
    with EventLog(folder / "events.jsonl", peer=folder.name, clock=lambda: float(next(time))) as log:
        log.emit("run_start", parameters=5, tokens=first_tokens, tokens_per_step=100)
        for step in range(1, 21):
            shares = {"compute_s": 0.6, "communication_s": 0.3, "waiting_s": 0.1}
            log.emit(
                "train", step=step, tokens=first_tokens + 100 * step, loss=5.0 / step, tokens_per_s=100.0, **shares
            )
            if step == 10:
                log.emit("round", round=0, step=10, members=["a", "b"], bytes_sent=sent, bytes_received=sent)
            if step == 10 and dead:
                log.emit("peer_lost", reason="no ping for 5 s")
                return
        log.emit("round", round=1, step=20, failed="timeout", members=[], bytes_sent=0, bytes_received=0)
        log.emit("eval", step=20, loss=1.5, bpb=2.25)
        log.emit("sample", text="def f():\n```` x\n")
        log.emit("done", digest=digest, finished=finished)


def lines_of(folder: Path) -> list[str]:
    return write_report(folder).read_text().splitlines()


def test_the_report_holds_the_outcome_the_peers_and_the_failures(tmp_path: Path) -> None:
    for index in range(2):
        write_peer(tmp_path / f"peer-{index}")
    write_peer(tmp_path / "baseline")
    lines = lines_of(tmp_path)
    assert lines[0] == f"# Run {tmp_path.name}"
    assert "| validation, bits per byte | 2.25 |" in lines
    assert "| one process, the same tokens, bits per byte | 2.25 |" in lines
    assert "| tokens learnt from, all peers | 4,000 |" in lines
    assert "| peers that finished | 2 of 2 |" in lines
    assert "| anchor digests | equal on 2 peers: `abc123` |" in lines
    assert any(line.startswith("| peer-1 | 20 | 100 | 1 | 1 | 0.00 |") and "60% | 30% | 10%" in line for line in lines)
    assert "- peer-0, round 1, step 20: timeout" in lines


def test_bytes_per_token_are_compared_with_averaging_in_every_step(tmp_path: Path) -> None:
    for index in range(2):
        write_peer(tmp_path / f"peer-{index}")
    # 2 peers sent 150 bytes each for 2,000 tokens each; every-step averaging sends 20 bytes of gradients in 20 steps.
    assert bytes_per_token(read_run(tmp_path)) == (300 / 4000, 2 * 20 * 20 / 4000)


def test_what_was_learnt_before_a_run_was_resumed_does_not_count(tmp_path: Path) -> None:
    for index in range(2):
        write_peer(tmp_path / f"peer-{index}", first_tokens=50_000)
    assert bytes_per_token(read_run(tmp_path)) == (300 / 4000, 2 * 20 * 20 / 4000)


def test_a_peer_that_left_early_has_not_finished(tmp_path: Path) -> None:
    write_peer(tmp_path / "peer-0")
    write_peer(tmp_path / "peer-1", digest="early", finished=False)
    lines = lines_of(tmp_path)
    assert "| peers that finished | 1 of 2 |" in lines
    assert not any("DIFFERENT" in line for line in lines)


def test_different_digests_are_shouted(tmp_path: Path) -> None:
    write_peer(tmp_path / "peer-0")
    write_peer(tmp_path / "peer-1", digest="other")
    assert "| anchor digests | DIFFERENT: peer-0 `abc123`, peer-1 `other` |" in lines_of(tmp_path)


def test_a_dead_peer_is_in_the_report(tmp_path: Path) -> None:
    write_peer(tmp_path / "peer-0")
    write_peer(tmp_path / "peer-1", dead=True)
    lines = lines_of(tmp_path)
    assert "| peers that finished | 1 of 2 |" in lines
    assert "- peer-1: lost a peer, no ping for 5 s" in lines
    assert final_digests(read_run(tmp_path)) == {"peer-0": "abc123"}


def test_peers_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for index in (10, 2, 1):
        write_peer(tmp_path / f"peer-{index}")
    assert [peer.name for peer in read_run(tmp_path)] == ["peer-1", "peer-2", "peer-10"]


def test_a_sample_cannot_end_its_own_block(tmp_path: Path) -> None:
    write_peer(tmp_path / "peer-0")
    lines = lines_of(tmp_path)
    start = lines.index("## A sample") + 2
    assert lines[start] == "`````"
    assert lines[start + 1 : start + 3] == ["def f():", "```` x"]
    assert lines.index("`````", start + 1) == start + 4


def test_a_report_without_plots_draws_none_and_does_not_speak_of_them(tmp_path: Path) -> None:
    write_peer(tmp_path / "peer-0")
    assert "Plots" not in write_report(tmp_path, plots=False).read_text()
    assert not list(tmp_path.glob("*.png"))


def test_plots_are_png_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_peer(tmp_path / "peer-0")
    text = write_report(tmp_path).read_text()
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["bytes.png", "loss_time.png", "loss_tokens.png", "rounds.png"]
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(PNG)
        assert f"({name})" in text


def test_without_matplotlib_the_report_says_how_to_get_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_peer(tmp_path / "peer-0")
    assert "pip install 'swarmkit-torch[plots]'" in write_report(tmp_path).read_text()
    assert not list(tmp_path.glob("*.png"))


def test_a_run_that_died_at_once_has_a_report_too(tmp_path: Path) -> None:
    (tmp_path / "peer-0").mkdir()
    (tmp_path / "peer-0" / "events.jsonl").write_text('{"kind": "tra')
    lines = lines_of(tmp_path)
    assert "| anchor digests | none reported |" in lines
    assert "| peers that finished | 0 of 1 |" in lines


def test_a_loss_that_is_no_number_leaves_a_gap(tmp_path: Path) -> None:
    with EventLog(tmp_path / "peer-0" / "events.jsonl") as log:
        log.emit("train", step=1, tokens=10, loss=float("nan"), tokens_per_s=float("nan"))
        log.emit("eval", step=1, loss=float("nan"), bpb=float("nan"))
    assert "| validation, bits per byte | - |" in lines_of(tmp_path)


def test_the_swarms_curve_counts_the_tokens_of_all_peers(tmp_path: Path) -> None:
    for index in range(2):
        write_peer(tmp_path / f"peer-{index}")
    curve = swarm_curve(read_run(tmp_path))
    assert [point.tokens for point in curve] == [200.0 * step for step in range(1, 21)]
    assert curve[9].loss == pytest.approx(0.5)
    (score,) = swarm_curve(read_run(tmp_path), "eval")
    assert (score.tokens, score.loss) == (4000.0, 1.5)


def test_a_dead_peer_s_tokens_stay_counted(tmp_path: Path) -> None:
    write_peer(tmp_path / "peer-0")
    write_peer(tmp_path / "peer-1", dead=True)
    assert swarm_curve(read_run(tmp_path))[-1].tokens == 2000.0 + 1000.0


def test_bytes_per_token_are_followed_round_by_round(tmp_path: Path) -> None:
    for index in range(2):
        write_peer(tmp_path / f"peer-{index}")
    # 300 bytes after the first round's 2,000 tokens; the second failed and sent nothing.
    assert list(bytes_per_token_so_far(read_run(tmp_path))) == [(2000.0, 0.15), (4000.0, 0.075)]
