"""Why p2pd cannot start is told before it is tried, with the path or port that is to blame."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from swarmkit.peers import daemon_checks, node
from swarmkit.peers.daemon_checks import check_binary, check_identity, check_port, check_socket_folder
from swarmkit.peers.engine import P2PD_PATH
from swarmkit.peers.errors import DaemonFailed
from swarmkit.peers.identity import Identity
from swarmkit.peers.node import Node
from swarmkit.peers.settings import NetworkSettings


def test_a_port_in_use_is_named_though_p2pd_would_share_it() -> None:
    first = Node.start("ports")
    try:
        port = int(first.addresses[0].split("/tcp/")[1].split("/")[0])
        started = time.monotonic()
        with pytest.raises(DaemonFailed, match=f"network.listen: cannot listen on 127.0.0.1:{port}"):
            Node.start("ports", settings=NetworkSettings(port=port))
        with pytest.raises(DaemonFailed, match=f"network.bulk_port: cannot listen on 127.0.0.1:{port}"):
            Node.start("ports", settings=NetworkSettings(bulk_port=port))
        assert time.monotonic() - started < 5
    finally:
        first.close()
    # The connections of the one before may still time out.
    Node.start("ports", settings=NetworkSettings(port=port)).close()


def test_an_address_that_this_machine_does_not_have_is_named() -> None:
    with pytest.raises(DaemonFailed, match=r"network.listen: cannot listen on 203\.0\.113\.77:31337"):
        check_port("203.0.113.77", 31337, "network.listen")
    check_port("127.0.0.1", 0, "network.listen")
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(DaemonFailed, match="in use"):
        check_port("127.0.0.1", server.getsockname()[1], "network.listen")


def test_a_binary_that_cannot_be_executed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_binary(P2PD_PATH)
    with pytest.raises(DaemonFailed, match="missing"):
        check_binary(tmp_path / "none")
    plain = tmp_path / "p2pd"
    plain.write_bytes(b"\x7fELF")
    with pytest.raises(DaemonFailed, match=r"chmod \+x"):
        check_binary(plain)
    monkeypatch.setattr(daemon_checks, "P2PD_PATH", plain)
    with pytest.raises(DaemonFailed, match=str(plain)):
        Node.start("binary")


def test_a_socket_folder_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DaemonFailed, match=f"{file}: p2pd's sockets cannot be made there"):
        Node.start("sockets", settings=NetworkSettings(socket_folder=str(file)))
    long = tmp_path / ("x" * 80)
    long.mkdir()
    with pytest.raises(DaemonFailed, match="too long"):
        check_socket_folder(long)

    def fail() -> Path:
        raise PermissionError(13, "Permission denied", "/tmp/x")

    monkeypatch.setattr(node, "make_socket_folder", fail)
    with pytest.raises(DaemonFailed, match="set TMPDIR"):
        Node.start("sockets")


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("identity") / "key"
    Identity.load_or_make(path)
    return path


def test_an_identity_is_taken_and_one_that_is_not_there_may_be_made(identity: Path, tmp_path: Path) -> None:
    check_identity(identity)
    check_identity(tmp_path / "not yet")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: data[:50], "is damaged"),
        (lambda data: data[:-1] + b"x", "two halves do not belong together"),
        (lambda data: b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + data, "holds no libp2p key"),
        (lambda data: b"\x08\x00" + data, "holds an RSA key"),
        (lambda data: bytes(70_000), "too large for a key"),
    ],
)
def test_a_damaged_identity_is_one_line_with_the_path_and_stays_as_it_is(
    identity: Path, tmp_path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    path = tmp_path / "key"
    path.write_bytes(damage(identity.read_bytes()))
    path.chmod(0o600)
    before = path.read_bytes()
    with pytest.raises(DaemonFailed, match=reason) as told:
        Node.start("identity", settings=NetworkSettings(identity=str(path)))
    assert str(told.value).startswith(f"network.identity={path}: ")
    assert "\n" not in str(told.value)
    assert path.read_bytes() == before


def test_an_identity_that_others_can_read_or_nobody_can_is_refused(identity: Path, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(identity.read_bytes())
    path.chmod(0o644)
    with pytest.raises(DaemonFailed, match="chmod 600"):
        check_identity(path)
    with pytest.raises(DaemonFailed, match="is not a file"):
        check_identity(tmp_path)
    with pytest.raises(DaemonFailed, match="no folder in which it can be made"):
        check_identity(tmp_path / "none" / "key")
