"""The doctor says what is wrong and what to do, on one line each, and is done in time whatever hangs."""

import importlib.metadata
import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmkit import doctor, machine_checks, network_checks
from swarmkit.config import Config
from swarmkit.doctor import Doctor, examine_machine
from swarmkit.errors import WrongPeerId
from swarmkit.exits import Exit
from swarmkit.findings import Finding, Verdict, fail, ok, warn
from swarmkit.machine_checks import check_device, check_disk, check_p2pd, check_versions, find_conflicts
from swarmkit.network_checks import announced, check_network, clock, kind_of, link, reachability
from swarmkit.network_config import NetworkConfig
from swarmkit.peers.examination import Examination, Rate
from swarmkit.peers.node import Node
from swarmkit.peers.settings import NetworkSettings
from tests.unit.swarmkit.harness_replicas import small_config

PEER = "12D3KooWB89EF4eK5Cp2C1HTsx7LPxVCCiMB3zU4WghNzpGsEouY"


def at(host: str, port: int = 31337) -> str:
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}/p2p/{PEER}"


def config(tmp_path: Path, **values: object) -> Config:
    return replace(small_config(), out=str(tmp_path), **values)


# -- this machine ------------------------------------------------------------------------------------------------------


def test_this_environment_has_no_conflicts() -> None:
    assert list(find_conflicts("swarmkit-torch")) == []


def test_a_requirement_that_is_missing_or_of_another_version_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    required = {
        "swarmkit-torch": ["numpy>=99", "absent>1", "torch", "dev; extra == 'dev'", "other; sys_platform == 'x'"],
        "torch": ["numpy<1"],
    }
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required.get(name))
    assert sorted(find_conflicts("swarmkit-torch")) == [
        "swarmkit-torch needs absent, which is missing",
        f"swarmkit-torch needs numpy>=99, there is {importlib.metadata.version('numpy')}",
        f"torch needs numpy<1, there is {importlib.metadata.version('numpy')}",
    ]
    [finding] = check_versions(config(tmp_path))
    assert finding.verdict is Verdict.warn
    assert "absent, which is missing" in finding.text


def test_a_full_disk_and_one_that_cannot_be_written_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for free, verdict in [(50e9, Verdict.ok), (1e9, Verdict.warn), (1e8, Verdict.fail)]:
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=int(free)))
        [finding] = check_disk(config(tmp_path / "not" / "yet"))
        assert finding.verdict is verdict
        assert str(tmp_path) in finding.text
    assert not list(tmp_path.iterdir())
    [finding] = check_disk(replace(small_config(), out="/proc/nowhere"))
    assert (finding.verdict, finding.name) == (Verdict.fail, "disk")
    assert "/proc cannot be written" in finding.text


def test_a_p2pd_that_does_not_run_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [finding] = check_p2pd(config(tmp_path))
    assert finding.verdict is Verdict.ok
    from swarmkit.peers import engine

    other = tmp_path / "p2pd"
    other.write_text("#!/bin/sh\nexit 3\n")
    other.chmod(0o755)
    monkeypatch.setattr(engine, "P2PD_PATH", other)
    [finding] = check_p2pd(config(tmp_path))
    assert finding.verdict is Verdict.fail
    assert "ended with code 3" in finding.text


def test_a_device_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert check_device(config(tmp_path, device="cpu"))[0].verdict is Verdict.ok
    import torch

    if not torch.cuda.is_available():
        assert check_device(config(tmp_path, device="cuda"))[0].verdict is Verdict.fail


# -- what another peer measured ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skew", "verdict", "word"),
    [(0.2, "ok", "ahead"), (-1.5, "warn", "behind"), (60.0, "fail", "60.00 s ahead"), (-60.0, "fail", "behind")],
)
def test_a_wrong_clock_is_told_with_its_direction(skew: float, verdict: str, word: str) -> None:
    finding = clock(Examination(rtt_s=0.1, skew_s=skew))
    assert finding.verdict.value == verdict
    assert word in finding.text


def test_what_a_long_round_trip_could_explain_is_no_wrong_clock() -> None:
    assert clock(Examination(rtt_s=8.0, skew_s=4.5)).verdict is Verdict.ok


@pytest.mark.parametrize(("up", "rtt", "verdict"), [(1e7, 0.01, "ok"), (1e4, 0.01, "warn"), (1e7, 0.8, "warn")])
def test_a_slow_link_is_told_with_what_helps(up: float, rtt: float, verdict: str) -> None:
    rates = (Rate(bytes_per_s=up, at_least=False), Rate(bytes_per_s=1e8, at_least=True))
    finding = link(Examination(rtt_s=rtt, upload=rates[0], download=rates[1]))
    assert finding.verdict.value == verdict
    assert "over 800.0 Mbit/s down" in finding.text
    assert bool(finding.advice) is (verdict == "warn")
    assert link(Examination(rtt_s=rtt, problems={"rate": "enough bytes"})).text == "enough bytes"


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        (at("127.0.0.1"), "loopback"), (at("::1"), "loopback"), (at("192.168.1.5"), "LAN"), (at("10.1.2.3"), "LAN"),
        (at("100.64.3.4"), "LAN"), (at("8.8.8.8"), "public"), (at("fe80::1"), "LAN"), (at("2600::1"), "public"),
        (f"/dns4/host.example/tcp/1/p2p/{PEER}", "name"), (f"{at('8.8.8.8')}/p2p-circuit/p2p/{PEER}", "relay"),
    ],
)  # fmt: skip
def test_addresses_are_of_a_kind(address: str, kind: str) -> None:
    assert kind_of(address) == kind


def test_behind_a_router_the_setting_to_announce_is_given() -> None:
    finding = announced([at("192.168.1.5")], [], ["8.8.8.8"])
    assert finding.verdict is Verdict.warn
    assert "network.announce=[/ip4/8.8.8.8/tcp/31337]" in finding.advice
    assert "192.168.1.5" in finding.text
    assert announced([at("192.168.1.5")], [], ["192.168.1.5"]).verdict is Verdict.ok
    assert announced([at("192.168.1.5")], [], ["127.0.0.1"]).verdict is Verdict.ok
    assert announced([at("8.8.8.8")], [], ["8.8.8.8"]).verdict is Verdict.ok
    assert "network=wan" in announced([at("127.0.0.1")], [], []).advice


def test_an_announced_address_that_no_peer_sees_is_told() -> None:
    finding = announced([at("8.8.4.4")], [at("8.8.4.4")], ["8.8.8.8"])
    assert finding.verdict is Verdict.warn
    assert "a peer sees this machine at 8.8.8.8" in finding.text
    assert announced([at("8.8.8.8")], [at("8.8.8.8")], ["8.8.8.8"]).verdict is Verdict.ok
    assert announced([f"/dns4/me.example/tcp/1/p2p/{PEER}"], ["x"], ["8.8.8.8"]).verdict is Verdict.ok


@pytest.mark.parametrize(
    ("dials", "verdicts", "word"),
    [
        ({31337: {"8.8.8.8": "open"}}, ["ok", "ok"], "reached"),
        ({31337: {"127.0.0.1": "open"}}, ["ok", "ok"], "says nothing of others"),
        ({31337: {"8.8.8.8": "silent"}}, ["warn", "warn"], "a firewall or router drops it"),
        ({31337: {"8.8.8.8": "closed"}}, ["warn", "warn"], "was refused"),
        ({31337: {"8.8.8.8": "other"}}, ["warn", "warn"], "does not speak libp2p"),
        ({31337: {}}, ["skip", "skip"], "only through a relay"),
        ({1: {"8.8.8.8": "open"}}, ["skip", "skip"], "relay"),
    ],
)
def test_reachability_decides_how_a_machine_takes_part(dials: dict, verdicts: list[str], word: str) -> None:
    findings = reachability(Examination(dials=dials), 31337)
    assert [finding.verdict.value for finding in findings] == verdicts
    assert word in findings[0].text
    if "warn" in verdicts:
        assert "31337" in findings[0].advice
        assert "network.relay=true" in findings[1].advice


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_a_check_that_hangs_or_breaks_keeps_neither_the_others_nor_the_end() -> None:
    release, said = threading.Event(), list[Finding]()
    patient = Doctor(said.append, total_s=1.5)
    started = time.monotonic()

    def broken() -> list[Finding]:
        raise RuntimeError("odd")

    patient.run("stuck", lambda: [ok("stuck", "late")] if release.wait(20) else [])
    patient.run("broken", broken)
    patient.run("quick", lambda: [ok("quick", "fine"), warn("more", "hm", "do")])
    patient.wait()
    assert time.monotonic() - started < 3
    assert patient.is_stuck
    verdicts = {finding.name: finding.verdict.value for finding in said}
    assert verdicts == {"stuck": "fail", "broken": "fail", "quick": "ok", "more": "warn"}
    assert "RuntimeError: odd" in next(one.text for one in said if one.name == "broken")
    assert patient.exit_code == 1
    release.set()


def test_the_code_is_that_of_the_cause_and_warnings_are_no_failure() -> None:
    patient = Doctor(lambda finding: None)
    patient.report(warn("port", "x", "y"))
    assert patient.exit_code == Exit.ok
    patient.report(fail("disk", "x", "y"))
    assert patient.exit_code == Exit.error
    patient.code = Exit.wrong_peer_id
    assert patient.exit_code == 14


def test_what_strangers_said_stays_on_its_line() -> None:
    line = fail("join", "run \x1b[31mred\nnext", "do").line
    assert line == "fail  join       run ?[31mred?next; do"


def test_a_machine_is_examined_with_the_help_of_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    peer = Node.start("doctored", settings=NetworkSettings(heartbeat_s=0.5))
    said: list[str] = []
    try:
        code = examine_machine(config(tmp_path), peer.addresses, as_json=True, say=said.append)
        wrong = peer.addresses[0].replace(peer.peer_id, PEER)
        assert examine_machine(config(tmp_path), [wrong], say=said.append) == Exit.wrong_peer_id
    finally:
        peer.close()
    result = json.loads(said[0])
    verdicts = {check["name"]: check["verdict"] for check in result["checks"]}
    names = {"versions", "disk", "p2pd", "device", "join", "announce", "clock", "link", "port", "mode"}
    # How fast a busy machine answers itself is no matter here.
    assert verdicts.pop("link") in ("ok", "warn"), result
    assert verdicts == dict.fromkeys(names - {"link"}, "ok"), result
    assert (code, result["exit_code"]) == (0, 0)
    assert result["seconds"] < 20
    assert any(line.startswith("fail  join") and f"answers as {peer.peer_id}" in line for line in said[1:])
    assert said[-1].startswith("4 ok, 0 warn, 1 fail, 4 skip")


def test_a_port_in_use_is_told_and_what_listens_there_is_dialled(tmp_path: Path) -> None:
    peer = Node.start("doctored", settings=NetworkSettings(heartbeat_s=0.5))
    found: list[Finding] = []
    try:
        port = int(peer.addresses[0].split("/tcp/")[1].split("/")[0])
        busy = config(tmp_path, network=NetworkConfig(listen=f"127.0.0.1:{port}", peer_cache="none"))
        until = time.monotonic() + 15
        assert check_network(busy, peer.addresses, None, found.append, sockets=str(tmp_path), until=until) is None
    finally:
        peer.close()
    by_name = {finding.name: finding for finding in found}
    assert by_name["listen"].verdict is Verdict.warn
    assert f"a peer reached TCP port {port}" in by_name["port"].text


def test_without_an_address_this_machine_alone_is_looked_at(tmp_path: Path) -> None:
    found: list[Finding] = []
    alone = config(tmp_path, network=NetworkConfig(peer_cache="none"))
    assert check_network(alone, [], None, found.append, sockets=str(tmp_path), until=time.monotonic() + 10) is None
    assert [finding.verdict.value for finding in found] == ["ok", "skip", "skip", "skip", "skip"]
    assert "give the address of one" in found[1].advice


def test_a_run_that_cannot_be_entered_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Node:
        raise WrongPeerId("another one")

    monkeypatch.setattr(network_checks.Node, "start", refuse)
    found: list[Finding] = []
    error = check_network(config(tmp_path), [at("127.0.0.1")], None, found.append, sockets="/tmp", until=0.0)
    assert isinstance(error, WrongPeerId)
    assert [finding.name for finding in found] == ["join", *network_checks.MEASURED]


def test_checks_are_named_as_their_findings(tmp_path: Path) -> None:
    assert {name: [f.name for f in check(config(tmp_path))] for name, check in doctor.MACHINE.items()} == {
        name: [name] for name in doctor.MACHINE
    }
    assert machine_checks.PRODUCT == "swarmkit-torch"
