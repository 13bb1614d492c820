"""Events are whole lines whatever happens, and the sinks say the same as the file."""

import json
import math
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from swarmkit.compose import load_config
from swarmkit.errors import ConfigError
from swarmkit.metrics import EventLog, PrometheusSink, TensorBoardSink, read_events
from swarmkit.run_folder import make_run_folder


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def test_every_event_is_one_line_with_time_peer_and_kind(tmp_path: Path) -> None:
    with EventLog(tmp_path / "new" / "events.jsonl", peer="p1", clock=lambda: 12.5) as log:
        log.emit("train", step=1, loss=2.0, text="a\nb", members=("x", "y"))
        log.emit("done")
    lines = (tmp_path / "new" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"time": 12.5, "peer": "p1", "kind": "train", "step": 1, "loss": 2.0, "text": "a\nb", "members": ["x", "y"]},
        {"time": 12.5, "peer": "p1", "kind": "done"},
    ]


def test_what_json_has_no_word_for_becomes_null_or_text(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("train", loss=math.nan, worst=math.inf, nested={"a": [-math.inf, 1.0]}, where=Path("x"), flag=True)
    assert "NaN" not in path.read_text()
    (event,) = read_events(path)
    assert (event["loss"], event["worst"], event["nested"]) == (None, None, {"a": [None, 1.0]})
    assert (event["where"], event["flag"]) == ("x", True)


def test_an_event_is_on_the_disk_as_soon_as_it_is_emitted(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit("train", step=1)
        assert len(list(read_events(tmp_path / "events.jsonl"))) == 1


def test_a_half_written_last_line_and_garbage_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n[1]\n{"no": "kind"}\n\xff\xfe\n\n{"kind": "train", "st')
    assert [event["step"] for event in read_events(path)] == [1]


def test_a_restarted_peer_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for step in (1, 2):
        with EventLog(tmp_path / "events.jsonl") as log:
            log.emit("train", step=step)
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == [1, 2]


def test_a_new_line_begins_after_one_that_a_killed_peer_left_half_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tr')
    with EventLog(path) as log:
        log.emit("train", step=2)
    assert [event["step"] for event in read_events(path)] == [1, 2]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        threads = [
            threading.Thread(target=lambda i=i: [log.emit("train", step=i, pad="x" * 500) for _ in range(50)])
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(list(read_events(path))) == 200


def test_events_after_the_close_are_dropped(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    log.emit("train")
    log.close()
    assert not (tmp_path / "events.jsonl").read_text()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with EventLog(tmp_path / "events.jsonl", sinks=[TensorBoardSink(tmp_path / "tb")]) as log:
        log.emit("train", step=3, loss=1.5, text="no number", flag=True)
        log.emit("done", loss=9.0)
    read = EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    assert read.Tags()["scalars"] == ["train/loss"]
    assert [(point.step, point.value) for point in read.Scalars("train/loss")] == [(3, 1.5)]


def test_prometheus_serves_on_loopback_until_closed(tmp_path: Path) -> None:
    sink = PrometheusSink(0)
    with EventLog(tmp_path / "events.jsonl", peer="p1", sinks=[sink]) as log:
        log.emit("train", step=1, loss=1.5)
        log.emit("round", step=1, bytes_sent=10, bytes_received=20, members=["a"])
        log.emit("round", step=2, failed="timeout")
        text = scrape(sink.port)
    assert 'swarmkit_train_loss{peer="p1"} 1.5' in text
    assert 'swarmkit_rounds_total{peer="p1"} 1.0' in text
    assert 'swarmkit_rounds_failed_total{peer="p1"} 1.0' in text
    assert 'swarmkit_round_bytes_total{direction="received",peer="p1"} 20.0' in text
    with pytest.raises(urllib.error.URLError):
        scrape(sink.port)


def test_prometheus_names_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"log.prometheus_port={port}: cannot listen"):
            PrometheusSink(port)


def test_a_full_disk_costs_events_but_not_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(Path("/dev/full"))
    for step in range(3):
        log.emit("train", step=step)
    assert log.dropped == 3
    assert capsys.readouterr().err.count("events cannot be written") == 1
    log.close()


def test_two_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    config = load_config([f"out={tmp_path}"])
    assert len({make_run_folder(config) for _ in range(5)}) == 5
