"""What TorchCollective does beyond the contract of all collectives: its messages, its end, its start under torchrun."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swarmkit.optim.collective import RoundKey
from swarmkit.peers.distributed import TorchCollective

from . import scenarios
from .harness_members import Group, Member, run
from .harness_swarms import HARNESSES, TORCH_TIMEOUT, Harness
from .scenarios import Outcome

_INDICES = itertools.count()


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    harness = HARNESSES["torch"]()
    yield harness
    harness.close()


@pytest.fixture
def three(harness: Harness) -> Group:
    return harness.group(3)


def other_names(member: Member, index: int) -> Outcome:
    name = "gradients" if member.rank else "parameters"
    future = member.collective.all_reduce([torch.ones(2)], round=RoundKey(name, index), weight=1.0)
    return scenarios.wait(future, time.monotonic())


def other_operations(member: Member, index: int) -> Outcome:
    call = member.collective.all_reduce if member.rank else member.collective.all_gather
    return scenarios.wait(call([torch.ones(2)], round=RoundKey("x", index), weight=1.0), time.monotonic())


def one_skips(member: Member, index: int) -> list[Outcome]:
    """Rank 1 goes on to the second of two rounds at once."""
    started = time.monotonic()
    futures = [
        member.collective.all_reduce([torch.ones(2)], round=RoundKey("x", which), weight=1.0)
        for which in ([index + 1] if member.rank == 1 else [index, index + 1])
    ]
    return [scenarios.wait(future, started) for future in futures]


def other_dtypes(rank: int) -> list[torch.Tensor]:
    return [torch.ones(3), torch.ones(2, dtype=torch.float16 if rank == 2 else torch.float32)]


def other_counts(rank: int) -> list[torch.Tensor]:
    return [torch.ones(3)] * (1 + (rank == 1))


def test_rounds_of_other_names_fail_and_both_are_named(three: Group) -> None:
    for outcome in run(three, other_names, next(_INDICES)):
        assert outcome.kind == "failed"
        assert "rank0 the all_reduce of parameters/" in outcome.reason
        assert "rank1 the all_reduce of gradients/" in outcome.reason


def test_other_operations_fail_and_both_are_named(three: Group) -> None:
    for outcome in run(three, other_operations, next(_INDICES)):
        assert outcome.kind == "failed"
        assert "rank0 the all_gather" in outcome.reason
        assert "rank1 the all_reduce" in outcome.reason


def test_other_dtypes_fail_and_name_position_and_ranks(three: Group) -> None:
    for outcome in run(three, scenarios.reduce, next(_INDICES), other_dtypes):
        assert outcome.kind == "failed"
        assert "tensor 1 is float32[2] on rank0, but float16[2] on rank2" in outcome.reason


def test_other_numbers_of_tensors_fail(three: Group) -> None:
    for outcome in run(three, scenarios.reduce, next(_INDICES), other_counts):
        assert outcome.kind == "failed"
        assert "rank0 offers 1 tensors" in outcome.reason
        assert "rank1 2 tensors" in outcome.reason


def test_a_member_that_skipped_a_round_fails_it_for_the_others_and_is_in_the_next(three: Group) -> None:
    """Without this the group would be out of step for ever."""
    index = next(_INDICES)
    next(_INDICES)
    outcomes = run(three, one_skips, index)
    for first, second in (outcomes[0], outcomes[2]):
        assert first.kind == "failed"
        assert "rank1 skipped it" in first.reason
        assert second.kind == "result"
    assert outcomes[1][0].kind == "result"
    assert outcomes[1][0].digest == outcomes[0][1].digest


def test_who_is_cancelled_is_named(three: Group) -> None:
    index = next(_INDICES)
    cancelled = three.start(scenarios.call_and_cancel, index, scenarios.small, ranks=[1])
    outcomes = run(three, scenarios.reduce, index, scenarios.small, ranks=[0, 2])
    assert cancelled[0].result(10).kind == "cancelled"
    assert all("rank1 cancelled it" in outcome.reason for outcome in outcomes)
    assert all(outcome.seconds < TORCH_TIMEOUT for outcome in outcomes)


def test_a_dead_rank_is_named_at_once_and_ever_after(three: Group) -> None:
    three.kill(1)
    for _ in range(2):
        outcomes = run(three, scenarios.reduce, next(_INDICES), scenarios.small, ranks=[0, 2])
        assert all(outcome.kind == "failed" and not outcome.missed for outcome in outcomes)
        assert all("rank1 is gone" in outcome.reason for outcome in outcomes)
        assert all(outcome.seconds < 2.0 for outcome in outcomes)


def test_a_silent_rank_is_named_when_the_time_is_up(three: Group) -> None:
    three.freeze(1)
    outcomes = run(three, scenarios.reduce, next(_INDICES), scenarios.small, ranks=[0, 2])
    assert any("rank1 did not answer in time" in outcome.reason for outcome in outcomes)
    assert all(TORCH_TIMEOUT - 0.5 < outcome.seconds < TORCH_TIMEOUT + 2 for outcome in outcomes)


def test_who_closes_ends_it_for_the_others_at_once(three: Group) -> None:
    three.broken = True
    waiting = three.start(scenarios.reduce, next(_INDICES), scenarios.small, ranks=[0, 2])
    run(three, scenarios.close, ranks=[1])
    outcomes = [future.result(20) for future in waiting]
    assert all(outcome.kind == "failed" for outcome in outcomes)
    assert all(outcome.seconds < 2.0 for outcome in outcomes)


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout=0"):
        TorchCollective(timeout=0)


def test_without_a_group_and_without_torchrun_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"torchrun.*init_process_group.*RANK"):
        TorchCollective()


SCRIPT = """
import sys
import torch
from swarmkit.optim.collective import RoundKey
from swarmkit.peers.distributed import TorchCollective

collective = TorchCollective(timeout=20)
rank = int(collective.peer_id.removeprefix("rank"))
future = collective.all_reduce([torch.tensor([float(rank)])], round=RoundKey("x", 0), weight=1.0)
result = future.result(30)
# One write: two ranks share this pipe, and print would write word by word.
sys.stdout.write(f"{collective.peer_id} {result.tensors[0].item()} {len(result.members)}" + chr(10))
sys.stdout.flush()
collective.close()
assert not torch.distributed.is_initialized()
"""


def test_a_torchrun_script_needs_no_arguments(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank0 0.5 2", "rank1 0.5 2"]
