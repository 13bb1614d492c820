"""The report's count of lost and doubled samples is that of the samples which the processes really drew."""

import json
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmkit.data.permutation import Permutation
from swarmkit.events import read_run
from swarmkit.peers.shares import Coverage
from swarmkit.shares import read_data
from tests.multiprocess import draw_log
from tests.multiprocess.harness_commands import OWN, SMALL, command

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def test_the_report_counts_what_was_drawn_with_a_kill_and_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws, site, second = tmp_path / "draws", tmp_path / "site", tmp_path / "second"
    for folder in (draws, site, second):
        folder.mkdir()
    shutil.copy(draw_log.__file__, site / "sitecustomize.py")
    monkeypatch.setenv(draw_log.FOLDER, str(draws))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    settings = [
        *SMALL,
        "strategy=local_sgd",
        "strategy.sync.h=8",
        "launch.restart=true",
        "launch.grace_s=60",
        "steps=1000000",
    ]
    settings = [setting for setting in settings if not setting.startswith(("strategy=diloco", "strategy.outer"))]
    with command("local", "peers=2", *settings, folder=tmp_path) as run:
        run.wait_for_round(1, 3)
        os.kill(run.pid(1), signal.SIGKILL)
        # The supervisor starts it again, as another peer that takes the share over.
        run.wait_for("the second life", lambda: len(run.events(1, "run_start")) == 2, 90)
        count = len(run.events(1, "round"))
        run.wait_for("its rounds", lambda: len(run.events(1, "round")) > count + 3, 90)
        with command("join", run.address(), *OWN, "network.drain_timeout_s=80", folder=second) as volunteer:
            volunteer.wait_for_round(0, 3)
            os.kill(volunteer.process.pid, signal.SIGTERM)
            assert volunteer.wait(80) == 0, volunteer.text
            volunteers = read_run(volunteer.run_folder)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait(80) == 130, run.text
        report = (run.run_folder / "report.md").read_text()
        peers = [peer for peer in read_run(run.run_folder) if peer.name.startswith("peer")]

    expected, extra = count_draws([read(path) for path in draws.glob("*.jsonl")])
    told = re.search(r"([\d,]+) samples learnt, ([\d,]+) lost, ([\d,]+) doubled", report)
    assert told is not None, report
    assert Coverage(*(int(number.replace(",", "")) for number in told.groups())) == expected
    assert expected.learnt > 0
    assert expected.lost == 0  # what the dead peer had not brought in was drawn again
    everybody = read_data([*peers, *volunteers])
    assert everybody.total == expected
    assert everybody.extra == extra > 0
    assert [len(holders) for holders in everybody.claims.values()] == [1, 2, 1]


def read(path: Path) -> list[dict[str, Any]]:
    # Of a process that was killed, the last line may be half a line.
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def count_draws(logs: list[list[dict[str, Any]]]) -> tuple[Coverage, int]:
    """What the logs of all processes say, with sets: planned slots, and samples of peers beyond them."""
    learnt: Counter[tuple[int, int]] = Counter()
    extra = 0
    rounds = [line for log in logs for line in log if line["kind"] == "round" and line["ok"]]
    order: dict[int, np.ndarray[Any, Any]] = {}
    for log in logs:
        own = next((line["id"] for line in log if line["kind"] == "round"), None)
        done = {line["round"] for line in log if line["kind"] == "round"}
        # Rounds that closed with this process in them, of which it died before it could say so.
        posthumous = any(own in line["members"] and line["round"] > max(done, default=-1) for line in rounds)
        pending: list[tuple[int, int, int, int]] = []
        for line in [*log, *([{"kind": "round", "ok": True, "observes": False}] if posthumous else [])]:
            if line["kind"] == "draw":
                pending += [(number, line["slot"], line["slots"], line["size"]) for number in line["numbers"]]
            elif line["observes"]:
                pending.clear()  # a state was adopted
            elif line["ok"]:
                for number, slot, slots, size in pending:
                    if slot >= slots:
                        extra += 1
                        continue
                    if size not in order:
                        place = Permutation(size, 0, 0)(np.arange(size))
                        order[size] = np.argsort(place)
                    position, remainder = divmod(int(order[size][number]) - slot, slots)
                    assert remainder == 0, "a sample of another slot's share"
                    learnt[slot, position] += 1
                pending.clear()
    lost = 0
    for slot in {slot for slot, _ in learnt}:
        of_slot = {position for number, position in learnt if number == slot}
        lost += max(of_slot) + 1 - min(of_slot) - len(of_slot)
    return Coverage(len(learnt), lost, sum(learnt.values()) - len(learnt)), extra
