"""`swarmkit invite`: invitations to a closed run, and their revocation, by the owner of its key."""

import time
from collections.abc import Sequence
from pathlib import Path

from swarmkit.compose import load_config
from swarmkit.config import Config
from swarmkit.errors import ConfigError, KeyFileError
from swarmkit.peers.access import add_revocation, revocations_file
from swarmkit.peers.identity import write_new
from swarmkit.peers.invitation import RunKey, is_name

DAY_S = 86400.0


def invite(
    guest: str, overrides: Sequence[str], *, role: str, days: float, peer_id: str | None, file: str | None
) -> None:
    """Print an invitation, or write it to a file of mode 0600."""
    config, path = _run(overrides)
    key = RunKey.load(path)
    try:
        token = key.invite(config.name, guest, now=time.time(), seconds=days * DAY_S, role=role, peer_id=peer_id or "")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if file is None:
        print(token.to_text())
        return
    target = Path(file)
    if target.exists():
        raise ConfigError(f"--to {target}: there is a file of that name, and nothing is overwritten")
    write_new(target, (token.to_text() + "\n").encode())
    print(f"{target}: an invitation for {guest}, {role} of {config.name!r}, for {days:g} days")


def revoke_guest(guest: str, overrides: Sequence[str], *, addresses: Sequence[str]) -> None:
    """Revoke a guest's invitations; with addresses of the run, tell every peer now."""
    config, path = _run(overrides)
    if not is_name(guest):
        raise ConfigError(f"{guest!r} is no name of a guest")
    add_revocation(path, guest, now=time.time())
    print(f"invitations of {guest} up to now are revoked; the list is {revocations_file(path)}")
    if not addresses:
        print("peers that run with this run key read it within seconds; with --at ADDRESS everybody is told now")
        return
    # The network costs seconds of imports.
    from swarmkit.peers.node import Node
    from swarmkit.status import observer_settings

    settings = observer_settings(addresses, run_key=str(path))
    node = Node.start(config.name, initial_peers=addresses, settings=settings, role="observer", existing=True)
    try:
        print(f"{len(node.tell_revocations())} of {len(node.table())} peers took it")
    finally:
        node.close()


def _run(overrides: Sequence[str]) -> tuple[Config, Path]:
    """The run's settings and the file of its key, which has to be there: invitations by a new key open nothing."""
    config = load_config(["network.closed=true", *overrides])
    path = Path(config.network.key_file(config.name))
    if not path.exists():
        raise KeyFileError(
            f"no run key {path}; `swarmkit start network.closed=true name={config.name}` makes it, "
            "network.run_key=FILE names another"
        )
    return config, path
