"""Which peers a command of the control plane means: a run's folder, a peer's, host:port, or an address of the run."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from swarmkit.errors import AddressError, ConfigError, JoinFailed
from swarmkit.network_config import host_port
from swarmkit.peers.preflight import check_address

CONTROL_FILE = "control.json"  # in a peer's folder, while it runs


@dataclass(frozen=True, slots=True)
class Target:
    """A peer whose control plane can be called."""

    where: str  # host:port
    name: str  # for people
    peer_id: str = ""  # empty: not known before it is asked


def is_address(text: str) -> bool:
    """True for a multiaddress, which is no path."""
    return text.startswith("/") and ("/tcp/" in text or "/p2p/" in text)


def find_targets(text: str, *, run: str | None = None, invitation: str | None = None) -> list[Target]:
    """The peers that `text` names; raises ConfigError, or JoinFailed for an address that leads nowhere.

    `run` chooses among the runs that an address knows; a closed one wants an invitation.
    """
    if is_address(text):
        return _in_table(text.split(","), run, invitation)
    if text and Path(text).is_dir():
        return _in_folder(Path(text))
    if re.fullmatch(r"[^/]+:\d+", text):
        try:
            host_port("TARGET", text)
        except ValueError as error:
            raise AddressError(str(error)) from error
        return [Target(text, text)]
    raise AddressError(
        f"{text!r}: neither a folder of a run, nor host:port of a control plane, nor an address of a peer; "
        "`swarmkit local` and `start` say where their results are"
    )


def choose(targets: Sequence[Target], peer: str | None) -> Target:
    """The one that `peer` names by its number, its folder's name or the end of its id; raises ConfigError.

    A number or a name goes first: ids end in digits too.
    """
    found = list(targets)
    if peer is not None:
        name = f"peer-{peer}" if peer.isdigit() else peer
        found = [target for target in targets if target.name == name]
        found = found or [target for target in targets if peer and target.peer_id.endswith(peer)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{target.name} ({target.peer_id[-8:]})" for target in targets)
    problem = f"--peer {peer}: names {len(found)} peers" if peer is not None else "which peer? say it with --peer"
    raise ConfigError(f"{problem}; there are: {names}")


def _in_folder(folder: Path) -> list[Target]:
    paths = [folder / CONTROL_FILE, *folder.glob(f"*/{CONTROL_FILE}")]
    found = [target for path in sorted(paths, key=lambda p: (len(str(p)), str(p))) if (target := _read(path))]
    if not found:
        raise ConfigError(f"{folder}: no peer of this folder runs (none of its {CONTROL_FILE} is of a living process)")
    return found


def _read(path: Path) -> Target | None:
    """The peer of a control file; None when there is none, or when its process was killed without removing it."""
    try:
        values = json.loads(path.read_text())
        target, pid, peer_id = str(values["target"]), int(values["pid"]), str(values["peer_id"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    return Target(target, path.parent.name, peer_id) if psutil.pid_exists(pid) else None


def _in_table(addresses: Sequence[str], run: str | None, invitation: str | None) -> list[Target]:
    from swarmkit.peers.node import Node
    from swarmkit.status import observer_settings

    for address in addresses:
        try:
            check_address(address)
        except ValueError as error:
            raise AddressError(str(error)) from error
    settings = observer_settings(addresses, invitation=invitation)
    node = Node.start(run, initial_peers=addresses, settings=settings, role="observer")
    try:
        records = [record for record in node.refresh() if record.control]
    finally:
        node.close()
    if not records:
        raise JoinFailed(
            "no peer of this run has a control plane that others can reach: they listen on loopback; call it on the "
            "peer's own machine with its folder, or set control.listen there"
        )
    return [Target(record.control, record.peer_id[-8:], record.peer_id) for record in records]
