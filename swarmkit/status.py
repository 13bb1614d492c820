"""`swarmkit status`: the peer table from the heartbeats."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console

from swarmkit.peer_table import table
from swarmkit.peers.node import Node
from swarmkit.peers.peer_cache import default_folder
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.shares import Coverage, cover

__all__ = ["show_status", "table"]


def show_status(addresses: Sequence[str], *, name: str | None, as_json: bool, invitation: str | None = None) -> None:
    """Print the peers of a run; raises JoinFailed when the address leads nowhere or the run does not let this in."""
    settings = observer_settings(addresses, invitation=invitation)
    node = Node.start(name, initial_peers=addresses, settings=settings, role="observer")
    for note in node.entry.notes:
        print(note, file=sys.stderr)
    try:
        records = node.refresh()
        run = node.run
        slots = cover(node.shares().of_peer.values())
    finally:
        node.close()
    if as_json:
        data = {str(slot): asdict(found) for slot, found in slots.items()}
        print(json.dumps({"run": run, "peers": [asdict(record) for record in records], "data": data}))
    else:
        console = Console()
        console.print(table(run, records, now=time.time()))
        if slots:
            console.print(tell_data(slots), markup=False)
        for late in sorted({record.late for record in records if record.late}):
            console.print(f"late, as members of the last rounds see it: {late}", markup=False, soft_wrap=True)
        for record in [record for record in records if record.address and record.is_active][:3]:
            console.print(f"{record.peer_id[-6:]}: swarmkit join {record.address}", markup=False, soft_wrap=True)


def tell_data(slots: Mapping[int, Coverage]) -> str:
    """What became of the samples, as far as heartbeats say."""
    counts = [sum(getattr(found, name) for found in slots.values()) for name in ("learnt", "lost", "doubled")]
    return "data: {:,} samples learnt, {:,} lost, {:,} doubled".format(*counts) + f", in {len(slots)} slots"


def observer_settings(
    addresses: Sequence[str], *, invitation: str | None = None, run_key: str | None = None
) -> NetworkSettings:
    """An observer listens where it can be answered: on loopback only for a run on loopback."""
    local = all("/127.0.0.1/" in address for address in addresses)
    return NetworkSettings(
        host="127.0.0.1" if local else "0.0.0.0",
        peer_cache=str(default_folder()),
        invitation=invitation,
        run_key=run_key,
    )
