"""The command says what it does, fails in one line, and is quick where it does not train."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmkit import __version__, cli
from swarmkit.errors import CheckpointError, ConfigError, JoinFailed, TrainingDiverged

COMMANDS = [
    *("local", "start", "join", "invite", "bootstrap", "status", "doctor", "drain", "checkpoint", "watch"),
    *("eval", "generate", "config"),
]
PEER_ID = "QmTTSmGoWvbDzYNU4GSLsPUw8sk6xRZBN71BrEkQ2HxvVc"


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(cli.app, arguments)
    return result.exit_code, result.output


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Call the console script's entry; gives its exit code."""
    monkeypatch.setattr(sys, "argv", ["swarmkit", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code


def test_every_command_is_tested() -> None:
    names = [
        command.name or str(command.callback and command.callback.__name__) for command in cli.app.registered_commands
    ]
    assert sorted(names) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    code, text = invoke(command, "--help")
    assert code == 0
    assert "Example" in text
    assert f"swarmkit {command}" in text.partition("Example")[2]


def test_help_lists_the_commands_and_the_exit_codes() -> None:
    code, text = invoke("--help")
    assert code == 0
    assert all(f" {command} " in text for command in COMMANDS)
    assert "Exit codes" in text


def test_version() -> None:
    assert invoke("--version") == (0, f"swarmkit {__version__}\n")


def test_without_a_command_the_help_is_shown() -> None:
    assert "Commands" in invoke()[1]


@pytest.mark.parametrize("arguments", [["nope"], ["config", "--nope"], ["join"], ["generate", "x", "--tokens", "0"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert invoke(*arguments)[0] == 2


def test_config_prints_yaml_or_json() -> None:
    code, text = invoke("config", "steps=7", "strategy=allreduce", "seed=5")
    assert code == 0
    assert "steps: 7\n" in text
    code, text = invoke("config", "--json", "steps=7", "strategy=allreduce")
    assert json.loads(text)["steps"] == 7


@pytest.mark.parametrize("command", ["local", "start", "bootstrap", "config"])
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run_main(monkeypatch, command, "stepz=3") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "swarmkit: stepz: unknown key; did you mean steps? (valid: see `swarmkit config`)\n"


def test_every_problem_has_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "config", "peers=0", "strategy.sync.h=0") == 2
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "swarmkit: peers=0: must be at least 1",
        "swarmkit: strategy.sync.h=0: H must be at least 1 inner step",
    ]


@pytest.mark.parametrize("command", ["join", "status", "drain"])
@pytest.mark.parametrize(
    "address",
    ["", "x", "127.0.0.1:99999", "http://a.b", "/ip4/127.0.0.1/tcp/1", f"/ip4/300.0.0.1/tcp/1/p2p/{PEER_ID}",
     f"/ip4/127.0.0.1/tcp/99999/p2p/{PEER_ID}", "/ip4/127.0.0.1/tcp/1/p2p/", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID},x"],
)  # fmt: skip
def test_a_malformed_address_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, address: str
) -> None:
    assert run_main(monkeypatch, command, address) == 10
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swarmkit: ")


@pytest.mark.parametrize("command", ["status", "drain", "checkpoint", "watch"])
def test_a_peer_that_is_not_there_is_one_line_and_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run_main(monkeypatch, command, "127.0.0.1:9") == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swarmkit: no control plane answers at 127.0.0.1:9")


def test_a_key_that_eval_does_not_know_is_named_with_the_nearest() -> None:
    from swarmkit.compose import check_overrides

    with pytest.raises(ConfigError, match=r"eval.batch: unknown key; did you mean eval.batches\?"):
        check_overrides(["eval.batch=3"])


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_a_missing_checkpoint_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run_main(monkeypatch, command, "no/such/folder") == 2
    assert capsys.readouterr().err == "swarmkit: no/such/folder does not exist\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("why"), 2),
        (CheckpointError("why"), 2),
        (JoinFailed("why"), 3),
        (TrainingDiverged("why"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert run_main(monkeypatch) == code


def test_a_run_can_be_named_when_an_address_knows_several(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def join(addresses: list[str], overrides: list[str], *, name: str | None, invitation: str | None) -> int:
        asked.append(name)
        return 0

    monkeypatch.setattr("swarmkit.peer.join", join)
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID}"
    assert [invoke("join", address, *more)[0] for more in ([], ["--name", "kjv"], ["threads=1", "--name=kjv"])] == [
        0
    ] * 3
    assert asked == [None, "kjv", "kjv"]


@pytest.mark.parametrize("command", ["local", "start"])
def test_a_folder_that_cannot_be_made_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert run_main(monkeypatch, command, f"out={tmp_path}/file/runs", "steps=16") == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    assert f"out={tmp_path}/file/runs: no folder for results can be made" in said.out + said.err


def test_the_peers_of_a_local_run_are_no_joiners(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "local", f"network.initial_peers=[/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID}]") == 2
    assert "use `swarmkit join`" in capsys.readouterr().err


def test_an_unexpected_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_config_needs_no_torch_and_is_quick() -> None:
    script = (
        "import sys; from swarmkit import cli; sys.argv = ['swarmkit', 'config']\n"
        "try: cli.main()\n"
        "finally: print([m for m in ('torch', 'hivemind', 'grpc') if m in sys.modules], file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    # Processor time: on a busy machine the clock on the wall says little.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
