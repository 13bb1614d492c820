"""The doctor, and joins that fail, between hosts: rates that are shaped, a firewall that drops, hosts that are dead."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .namespaces import Namespaces, namespaces, why_not

pytestmark = [
    pytest.mark.network,
    pytest.mark.timeout(150),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
STRANGER = "12D3KooWB89EF4eK5Cp2C1HTsx7LPxVCCiMB3zU4WghNzpGsEouY"
PORT, MBIT = 31337, 20.0
JOIN = """
import json, sys, time
from swarmkit.exits import exit_code
from swarmkit.peers.errors import JoinFailed
from swarmkit.peers.node import Node
for address in sys.argv[1:]:
    started = time.monotonic()
    try:
        Node.start("far", initial_peers=[address])
    except JoinFailed as error:
        seconds = time.monotonic() - started
        print(json.dumps({"code": exit_code(error), "text": str(error), "seconds": seconds}), flush=True)
"""


@dataclass
class Hosts:
    """A peer on the first host; the second is where somebody wants to join, the third does not answer."""

    made: Namespaces
    address: str
    out: Path

    def run(self, *arguments: str) -> tuple[int, str, float]:
        """A command on the second host: its exit code, what it said, how long it took."""
        environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(self.out / "cache")}
        command = [sys.executable, "-c", "from swarmkit.cli import main; main()", *arguments]
        started = time.monotonic()
        process = self.made.popen(
            1, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=self.out,
            env={**environment, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        said, _ = process.communicate(timeout=80)
        return process.returncode, said, time.monotonic() - started

    def examine(self) -> dict[str, Any]:
        code, said, _ = self.run("doctor", self.address, "--json", "network=wan")
        result: dict[str, Any] = json.loads(said.splitlines()[-1])
        assert code == result["exit_code"] == 0, said
        assert result["seconds"] < 20
        return {check["name"]: check for check in result["checks"]}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with namespaces(3, MBIT) as made:
        command = [sys.executable, "-m", "tests.network.node_process", made.addresses[0], str(PORT), "far"]
        peer = made.popen(
            0, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT
        )  # fmt: skip
        assert peer.stdout is not None
        assert peer.stdin is not None
        address = peer.stdout.readline().strip()
        assert address.startswith(f"/ip4/{made.addresses[0]}/tcp/{PORT}/p2p/")
        made.drop_incoming(2, except_from=0)
        yield Hosts(made, address, tmp_path_factory.mktemp("doctor"))
        peer.stdin.close()
        assert peer.wait(20) == 0


def test_a_host_that_can_be_reached_is_told_its_link_and_that_it_is(hosts: Hosts) -> None:
    checks = hosts.examine()
    assert {name: check["verdict"] for name, check in checks.items()} == dict.fromkeys(checks, "ok")
    up, down, rtt = (float(part.split()[0]) for part in checks["link"]["text"].removeprefix("over ").split(", "))
    # TLS, the multiplexer, TCP and IP take their part; the token bucket's 64 KB come at once.
    assert 0.6 * MBIT < up < 1.15 * MBIT
    assert 0.6 * MBIT < down < 1.15 * MBIT
    assert 0 < rtt < 150
    assert checks["announce"]["text"].startswith(f"/ip4/{hosts.made.addresses[1]}/tcp/{PORT}")
    assert checks["port"]["text"] == f"a peer reached TCP port {PORT} at {hosts.made.addresses[1]}"


def test_behind_a_firewall_that_drops_what_comes_in_the_doctor_says_so_in_time(hosts: Hosts) -> None:
    # What answers the connection to the peer comes from its port, and passes as it does through a router.
    hosts.made.drop_incoming(1, except_from=PORT)
    try:
        checks = hosts.examine()
    finally:
        hosts.made.drop_nothing(1)
    assert checks["port"]["verdict"] == checks["mode"]["verdict"] == "warn"
    assert f"a peer dialled {hosts.made.addresses[1]} port {PORT} and got no answer" in checks["port"]["text"]
    assert "dial-out only" in checks["mode"]["text"]
    assert "network.relay=true" in checks["mode"]["advice"]
    assert {checks[name]["verdict"] for name in ("join", "clock", "link", "announce")} == {"ok"}


def test_dead_hosts_and_closed_ports_are_told_apart_in_time(hosts: Hosts) -> None:
    # A host that drops what comes in, one that does not exist, and one that is up.
    places = {2: "did not answer within 5 s", 76: "cannot be reached from here", 0: "nothing listens on port 9"}
    addresses = [f"/ip4/10.77.0.{number + 1}/tcp/9/p2p/{STRANGER}" for number in places]
    process = hosts.made.popen(
        1, [sys.executable, "-c", JOIN, *addresses], stdout=subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT
    )  # fmt: skip
    said, _ = process.communicate(timeout=100)
    results = [json.loads(line) for line in said.splitlines()]
    assert [result["code"] for result in results] == [12, 12, 11]
    for result, address, told in zip(results, addresses, places.values(), strict=True):
        assert result["seconds"] < 15
        assert told in result["text"]
        assert address in result["text"]
