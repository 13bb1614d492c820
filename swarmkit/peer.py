"""The commands that are one peer: start a run, join one, keep its DHT up."""

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

from swarmkit import __version__
from swarmkit.compose import load_config
from swarmkit.config import Config, config_from_json, config_to_publish
from swarmkit.consent import split_paths, with_paths
from swarmkit.console import ConsoleSink
from swarmkit.control_plane import ControlPlane
from swarmkit.errors import ConfigError, OtherVersion
from swarmkit.neighbours import Say
from swarmkit.network_config import listen_for
from swarmkit.peers.node import Node
from swarmkit.replica import Place, check_services, open_data, socket_folder, told_errors, train, watched_preemption
from swarmkit.resume import check_fit, find_whole
from swarmkit.run_folder import make_run_folder
from swarmkit.signals import Leaving

# What a joiner sets itself.
OWN_SETTINGS = ("device", "threads", "out", "log", "network", "control", "preemption")

# What a report may take on a busy machine; a peer that has to be gone by then leaves without one.
REPORT_S = 10.0


def start(config: Config, *, say: Say = print) -> int:
    """Begin a run on this machine and train; prints the line with which others join."""
    leaving = Leaving(config.network.drain_timeout_s)
    leaving.install()
    with told_errors(say) as result, socket_folder(leaving) as sockets:
        resume = find_whole(Path(config.resume))[-1].path if config.resume is not None else None
        if resume is not None:
            check_fit(resume, config)
        corpus, folder = open_data(config), make_run_folder(config)
        settings = config.network.settings(sockets, owner_of=config.name)
        node = Node.start(config.name, initial_peers=config.network.initial_peers, settings=settings)
        try:
            _tell_entry(node, say)
            _refuse_second_start(node)
            node.publish_config(config_to_publish(config))
            say(f"run {config.name!r} is up; results in {folder}; join it with:\n    {_join_line(node)}")
            if node.is_closed:
                say(f"it is closed: invite others with `swarmkit invite GUEST name={config.name}`")
                say(f"whoever has the run key owns the run; keep a copy of {settings.run_key}")
            place = Place(folder=folder / "peer-0", resume=resume, expected=config.network.min_peers)
            place.sinks = [ConsoleSink(say, config.steps)]
            result.code = train(node, config, corpus, place, leaving, say)
        finally:
            node.close()
        _report(folder, config, leaving, say)
    return leaving.end(result.code)


def join(
    addresses: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    invitation: str | None = None,
    say: Say = print,
) -> int:
    """Enter a run: its configuration and state come from the swarm; `overrides` are for what is this machine's own.

    `name` chooses the run where the address knows several; a closed one wants an `invitation`, or a file that has it.
    """
    with told_errors(say) as result:
        files, others = split_paths(overrides)
        own = _own_settings(addresses, others)
        leaving = Leaving(own.network.drain_timeout_s)
        leaving.install()
        with socket_folder(leaving) as sockets:
            settings = own.network.settings(sockets, owner_of=name, invitation=invitation)
            node = Node.start(name, initial_peers=addresses, settings=settings, existing=True)
            try:
                _tell_entry(node, say)
                config = with_paths(_adapt(_read_config(node), own), files)
                corpus, folder = open_data(config), make_run_folder(config)
                say(f"joined run {node.run!r} as {node.peer_id}; results in {folder}; others can join it here too:")
                say(f"    {_join_line(node)}")
                place = Place(folder=folder / "peer-0", joining=True, expected=config.network.min_peers)
                place.sinks = [ConsoleSink(say, config.steps)]
                result.code = train(node, config, corpus, place, leaving, say)
            finally:
                node.close()
            _report(folder, config, leaving, say)
        leaving.end(result.code)
    return result.code


def bootstrap(config: Config, *, invitation: str | None = None, say: Say = print) -> int:
    """Keep a run's DHT up without training, until a signal comes.

    For a closed run it holds the run key, or an `invitation` and the address of a peer that is up.
    """
    if invitation is not None and not config.network.initial_peers:
        raise ConfigError("network.initial_peers: an invitation is to a run that is up, name one of its peers")
    leaving = Leaving(config.network.drain_timeout_s)
    leaving.install()
    with told_errors(say) as result, socket_folder(leaving) as sockets:
        check_services(config)
        settings = config.network.settings(sockets, owner_of=config.name, invitation=invitation)
        known = config.network.initial_peers
        node = Node.start(config.name, initial_peers=known, settings=settings, role="bootstrap")
        try:
            _tell_entry(node, say)
            stop = threading.Event()
            leaving.ready(stop.set, stop.set)
            control = ControlPlane(node, config, leaving)
            say(f"control plane at {control.serve()}")
            say(f"bootstrap of {config.name!r} is up; begin the run with network.initial_peers=[{node.addresses[0]}]")
            with watched_preemption(config.preemption, leaving, say):
                stop.wait()
            control.leave()
            control.left()
            result.code = leaving.exit_code
        finally:
            node.close()
    return leaving.end(result.code)


def _tell_entry(node: Node, say: Say) -> None:
    """Say which addresses led nowhere: others will try them too."""
    for note in node.entry.notes:
        say(note)


def _read_config(node: Node) -> Config:
    """The run's configuration; raises OtherVersion when it does not fit this version and the peers have another one."""
    text = node.fetch_config()
    try:
        return config_from_json(text)
    except ConfigError as error:
        others = sorted({record.version for record in node.table() if record.version} - {__version__})
        if not others:
            raise
        raise OtherVersion(
            f"run {node.run!r}: {error}; its peers have swarmkit {', '.join(others)[:200]}, this one {__version__}: "
            "install theirs"
        ) from error


def _refuse_second_start(node: Node) -> None:
    """Raise ConfigError when the run is up: this peer would train in it with settings of its own."""
    there = [r for r in node.refresh() if r.peer_id != node.peer_id and r.may_coordinate]
    if there:
        address = there[0].address or "ADDRESS"
        raise ConfigError(
            f"name={node.run}: a run of this name is up with {len(there)} replicas; enter it with "
            f"`swarmkit join {address}`, or choose another name"
        )


def _join_line(node: Node) -> str:
    return f"swarmkit join {node.addresses[0]}" + (" --invite INVITATION" if node.is_closed else "")


def _own_settings(addresses: Sequence[str], overrides: Sequence[str]) -> Config:
    """What a joiner decides for itself; the rest is the run's."""
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        if key.partition(".")[0] not in OWN_SETTINGS:
            raise ConfigError(f"{override}: the run decides this; a joiner can set {', '.join(OWN_SETTINGS)}")
    own = load_config(overrides)
    own.network.listen = listen_for(addresses, own.network.listen)
    return own


def _adapt(published: Config, own: Config) -> Config:
    """The run's configuration with what belongs to this machine."""
    ours = {name: getattr(own, name) for name in OWN_SETTINGS}
    run = published.network
    network = dataclasses.replace(
        own.network,
        pace=run.pace,
        closed=run.closed,
        rejoin=run.rejoin,
        backup_workers=run.backup_workers,
        trim=run.trim,
        max_norm_ratio=run.max_norm_ratio,
        min_peers=run.min_peers,
        max_wait_s=run.max_wait_s,
        round_timeout_s=run.round_timeout_s,
        heartbeat_s=run.heartbeat_s,
        silence_s=run.silence_s,
    )
    return dataclasses.replace(published, **{**ours, "network": network, "resume": None})


def _report(folder: Path, config: Config, leaving: Leaving, say: Say) -> None:
    if leaving.left_s < REPORT_S:
        return
    from swarmkit.report import write_report

    try:
        say(f"report {write_report(folder, plots=config.log.plots)}")
    except (OSError, ValueError) as error:
        say(f"the report could not be written: {error}")
