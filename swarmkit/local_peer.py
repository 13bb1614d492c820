"""A peer of `swarmkit local`: a replica with a supervisor at the other end of a socket."""

import dataclasses
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarmkit.config import config_from_json
from swarmkit.errors import JoinFailed
from swarmkit.link_sink import LinkSink
from swarmkit.neighbours import Say
from swarmkit.peers.node import Node
from swarmkit.processes import Link
from swarmkit.replica import Place, open_data, told_errors, train
from swarmkit.signals import Leaving


def local_peer(end: socket.socket, arguments: Mapping[str, Any]) -> int:
    """The process of one peer of `swarmkit local`; called by the nursery."""
    config = config_from_json(arguments["config"])
    leaving = Leaving(float(arguments["leave_s"]))
    leaving.install()
    link = Link(end)
    say: Say = lambda text: print(text, flush=True)  # noqa: E731 - its log
    with told_errors(say, lambda text: link.send({"kind": "error", "text": text}, patience=2.0)) as result:
        corpus = open_data(config)
        addresses = _receive_addresses(link) if arguments["wants_addresses"] else []
        # Peers that live and die with this command are of no use to a later one.
        settings = config.network.settings(arguments["sockets"], owner_of=config.name)
        settings = dataclasses.replace(settings, peer_cache=None)
        node = Node.start(config.name, initial_peers=addresses, settings=settings)
        try:
            node.publish_config(arguments["published"])
            link.send({"kind": "up", "addresses": node.addresses, "peer_id": node.peer_id}, patience=5.0)
            resume = arguments["resume"]
            place = Place(
                folder=Path(arguments["folder"]),
                slot=arguments["slot"],
                joining=arguments["joining"],
                resume=None if resume is None else Path(resume),
                exactly=arguments["exactly"],
                beside=arguments["beside"],
                expected=arguments["expected"],
                still_expected=lambda count: _told(link, count),
                evaluates_alone=False,
                sinks=[LinkSink(link)],
            )
            result.code = train(node, config, corpus, place, leaving, say)
        finally:
            node.close()
    return result.code


def _receive_addresses(link: Link, timeout_s: float = 60.0) -> list[str]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not link.closed:
        for message in link.receive():
            if "addresses" in message:
                return list(message["addresses"])
        time.sleep(0.02)
    raise JoinFailed(f"no address of a first peer came within {timeout_s:.0f} s")


def _told(link: Link, count: int) -> int:
    """How many replicas the supervisor still expects."""
    for message in link.receive():
        count = int(message.get("expect", count))
    return count
