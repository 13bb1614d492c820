"""What p2pd needs of this machine, looked at before it starts: it says little of why it cannot, or nothing."""

import os
import socket
import tempfile
from pathlib import Path

from swarmkit.peers.engine import P2PD_PATH
from swarmkit.peers.errors import DaemonFailed, KeyFileError
from swarmkit.peers.identity import Identity
from swarmkit.peers.settings import NetworkSettings


def check_daemon(settings: NetworkSettings, socket_folder: Path) -> None:
    """Raise DaemonFailed for a binary, port, socket folder or identity file that p2pd could not use."""
    check_binary(P2PD_PATH)
    check_port(settings.host, settings.port, "network.listen")
    check_port(settings.host, settings.bulk_port, "network.bulk_port")
    check_socket_folder(socket_folder)
    if settings.identity is not None:
        check_identity(Path(settings.identity))


def check_binary(path: Path) -> None:
    """p2pd comes with hivemind's wheel and must be executable."""
    if not path.is_file():
        raise DaemonFailed(f"{path} is missing: install hivemind anew (pip install --force-reinstall hivemind)")
    if not os.access(path, os.X_OK):
        raise DaemonFailed(
            f"{path} cannot be executed: run chmod +x on it; if that does not help, its disk is mounted noexec"
        )


def check_port(host: str, port: int, key: str) -> None:
    """A second p2pd would share the port of a first one without a word, and take half of its connections."""
    if not port:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier one that still time out are in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise DaemonFailed(
                f"{key}: cannot listen on {host}:{port} ({error.strerror or error}); end the process that has this "
                "port, or choose another one"
            ) from error


def check_socket_folder(folder: Path) -> None:
    """p2pd is spoken to through unix sockets in this folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DaemonFailed(
            f"{folder}: p2pd's sockets cannot be made there ({error.strerror or error}); set TMPDIR to a folder that "
            "can be written"
        ) from error
    if len(str(folder)) > 70:
        raise DaemonFailed(f"{folder}: too long for a unix socket's path; set TMPDIR to a shorter one")


def check_identity(path: Path) -> None:
    """A private key that its owner alone can read, or nothing yet; it is never written over."""
    if not path.exists():
        if not os.access(path.parent, os.W_OK):
            raise DaemonFailed(f"network.identity={path}: {path.parent} is no folder in which it can be made")
        return
    try:
        Identity.load(path)
    except KeyFileError as error:
        raise DaemonFailed(f"network.identity={path}: {error}") from error
