"""Which peers a command means: folders, host:port, addresses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarmkit.errors import ConfigError
from swarmkit.targets import CONTROL_FILE, Target, choose, find_targets, is_address


def put(folder: Path, name: str, *, pid: int | None = None, port: int = 7000) -> None:
    (folder / name).mkdir()
    values = {"target": f"127.0.0.1:{port}", "pid": pid or os.getpid(), "peer_id": f"12D3Koo{name}", "run": "demo"}
    (folder / name / CONTROL_FILE).write_text(json.dumps(values))


def test_a_runs_folder_means_its_living_peers_in_order(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as dead:
        pass
    for number in (0, 2, 10):
        put(tmp_path, f"peer-{number}", port=7000 + number)
    put(tmp_path, "peer-1", pid=dead.pid)
    assert [target.name for target in find_targets(str(tmp_path))] == ["peer-0", "peer-2", "peer-10"]
    assert find_targets(str(tmp_path / "peer-2")) == [Target("127.0.0.1:7002", "peer-2", "12D3Koopeer-2")]


def test_a_folder_without_a_living_peer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no peer of this folder runs"):
        find_targets(str(tmp_path))
    put(tmp_path, "peer-0")
    (tmp_path / "peer-0" / CONTROL_FILE).write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_targets(str(tmp_path))


def test_host_and_port_are_taken_as_they_are() -> None:
    assert find_targets("gpu7.example.org:31400") == [Target("gpu7.example.org:31400", "gpu7.example.org:31400")]
    assert find_targets("[::1]:31400")[0].where == "[::1]:31400"


@pytest.mark.parametrize("text", ["", "nothing", "no/such/folder", "http://a.b", "host:99999", "host:"])
def test_what_names_no_peer_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        find_targets(text)


def test_addresses_are_told_from_paths() -> None:
    assert is_address("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWB89EF4eK5Cp2C1HTsx7LPxVCCiMB3zU4WghNzpGsEouY")
    assert not is_address("/home/me/runs/demo")
    with pytest.raises(ConfigError, match="not an address of a peer"):
        find_targets("/ip4/127.0.0.1/tcp/1")


def test_one_peer_is_chosen_by_number_name_or_id() -> None:
    targets = [Target("a:1", "peer-0", "12D3KooWabc"), Target("b:2", "peer-1", "12D3KooWxyz")]
    for peer in ("1", "peer-1", "Wxyz"):
        assert choose(targets, peer).where == "b:2"
    assert choose(targets[:1], None).where == "a:1"
    with pytest.raises(ConfigError, match=r"say it with --peer; there are: peer-0 \(ooWabc|say it with --peer"):
        choose(targets, None)
    for peer in ("7", "12D3", ""):
        with pytest.raises(ConfigError, match="names 0 peers"):
            choose(targets, peer)


def test_a_number_means_the_peer_of_that_number_though_an_id_ends_with_it() -> None:
    targets = [Target("a:1", "peer-0", "12D3Koo9x9zZZQ2"), Target("b:2", "peer-2", "12D3KoojGkWevkm")]
    assert choose(targets, "2").where == "b:2"
    assert choose(targets, "Q2").where == "a:1"
    assert choose(targets[:1], "2").where == "a:1"  # there is no peer-2
