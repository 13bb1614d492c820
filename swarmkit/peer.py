"""One peer as a process: find the run, get its state, train, answer to signals, leave in order."""

import contextlib
import dataclasses
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from swarmkit import __version__, checkpoint
from swarmkit.build import build_trainer, open_corpus, open_stream
from swarmkit.compose import load_config
from swarmkit.config import Config, config_from_json, config_to_json
from swarmkit.consent import split_paths, with_paths
from swarmkit.errors import CheckpointError, ConfigError, DataError, JoinFailed, SwarmError, TrainingDiverged
from swarmkit.metrics import Event, EventLog, PrometheusSink, Sink, TensorBoardSink
from swarmkit.neighbours import Neighbours, Say
from swarmkit.network_config import host_port
from swarmkit.peers.hygiene import make_socket_folder
from swarmkit.peers.node import Node
from swarmkit.processes import Link
from swarmkit.run_folder import make_run_folder
from swarmkit.signals import Leaving
from swarmkit.trainer import Outcome, Trainer


class Exit(IntEnum):
    """Exit codes; 130 after Ctrl-C, 0 also after an orderly leave."""

    ok = 0
    error = 1
    settings = 2  # a setting, checkpoint or data source that cannot work
    not_joined = 3  # no run at the address, or it could not be entered
    too_few = 4  # fewer than network.min_peers for longer than network.max_wait_s
    diverged = 5  # the loss is not finite


# What a joiner sets itself.
OWN_SETTINGS = ("device", "threads", "out", "log", "network")


@dataclasses.dataclass(slots=True, kw_only=True)
class Place:
    """Which peer of the run this is, and how it begins."""

    folder: Path  # for events and checkpoints
    slot: int | None = None  # share of the data; None: the lowest that nobody has
    joining: bool = False  # the run may be under way: fetch its state first
    resume: Path | None = None  # checkpoint to begin from
    exactly: bool = True  # that checkpoint is this peer's own, and all peers' are of the same round
    expected: int = 1  # replicas to wait for before the first step
    still_expected: Callable[[int], int] = lambda count: count
    evaluates_alone: bool = True
    sinks: Sequence[Sink] = ()


# -- the commands ------------------------------------------------------------------------------------------------------


def start(config: Config, *, say: Say = print) -> int:
    """Begin a run on this machine and train; prints the line with which others join."""
    leaving = Leaving(config.network.drain_timeout_s)
    leaving.install()
    with _errors(say) as outcome, _socket_folder() as sockets:
        resume = _newest(Path(config.resume)) if config.resume is not None else None
        settings = config.network.settings(sockets)
        node = Node.start(config.name, initial_peers=config.network.initial_peers, settings=settings)
        try:
            node.publish_config(config_to_json(config))
            say(f"run {config.name!r} is up; join it with:\n    swarmkit join {node.addresses[0]}")
            place = Place(folder=_run_folder(config), resume=resume, expected=config.network.min_peers)
            outcome.code = _train(node, config, place, leaving, say)
        finally:
            node.close()
    return outcome.code


def join(addresses: Sequence[str], overrides: Sequence[str] = (), *, say: Say = print) -> int:
    """Enter a run: its configuration and state come from the swarm; `overrides` are for what is this machine's own."""
    with _errors(say) as outcome:
        files, others = split_paths(overrides)
        own = _own_settings(addresses, others)
        leaving = Leaving(own.network.drain_timeout_s)
        leaving.install()
        with _socket_folder() as sockets:
            node = Node.start(None, initial_peers=addresses, settings=own.network.settings(sockets))
            try:
                config = with_paths(_adapt(config_from_json(node.fetch_config()), own), files)
                say(f"joined run {node.run!r} as {node.peer_id}")
                place = Place(folder=_run_folder(config), joining=True, expected=config.network.min_peers)
                outcome.code = _train(node, config, place, leaving, say)
            finally:
                node.close()
    return outcome.code


def bootstrap(config: Config, *, say: Say = print) -> int:
    """Keep a run's DHT up without training, until a signal comes."""
    leaving = Leaving(config.network.drain_timeout_s)
    leaving.install()
    with _errors(say) as outcome, _socket_folder() as sockets:
        settings, known = config.network.settings(sockets), config.network.initial_peers
        node = Node.start(config.name, initial_peers=known, settings=settings, role="bootstrap")
        try:
            stop = threading.Event()
            leaving.ready(stop.set, stop.set)
            say(f"bootstrap of {config.name!r} is up; begin the run with network.initial_peers=[{node.addresses[0]}]")
            stop.wait()
            outcome.code = leaving.exit_code
        finally:
            node.close()
    return outcome.code


def _own_settings(addresses: Sequence[str], overrides: Sequence[str]) -> Config:
    """What a joiner decides for itself; the rest is the run's."""
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        if key.partition(".")[0] not in OWN_SETTINGS:
            raise ConfigError(f"{override}: the run decides this; a joiner can set {', '.join(OWN_SETTINGS)}")
    own = load_config(overrides)
    remote = not all("/127." in address or "/::1/" in address for address in addresses)
    if remote and host_port("network.listen", own.network.listen)[0] == "127.0.0.1":
        # Peers elsewhere cannot reach a loopback address.
        own.network.listen = "0.0.0.0:0"
    return own


def _adapt(published: Config, own: Config) -> Config:
    """The run's configuration with what belongs to this machine."""
    ours = {name: getattr(own, name) for name in OWN_SETTINGS}
    run = published.network
    network = dataclasses.replace(
        own.network,
        min_peers=run.min_peers,
        max_wait_s=run.max_wait_s,
        round_timeout_s=run.round_timeout_s,
        heartbeat_s=run.heartbeat_s,
        silence_s=run.silence_s,
    )
    return dataclasses.replace(published, **{**ours, "network": network, "resume": None})


def _run_folder(config: Config) -> Path:
    return make_run_folder(config) / "peer-0"


def _newest(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the newest one in a peer's or a run's folder."""
    from swarmkit.resume import find_checkpoints

    found = find_checkpoints(path)
    if not found:
        raise CheckpointError(f"resume={path}: there is no whole checkpoint")
    return found[-1].path


# -- a peer of `swarmkit local` ----------------------------------------------------------------------------------------


class LinkSink:
    """Sends events to the supervisor."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def write(self, event: Event) -> None:
        """See Sink; what a slow supervisor has no room for is dropped, but never how the peer ended."""
        plain = {
            key: value if isinstance(value, int | float | str | None) else str(value) for key, value in event.items()
        }
        self._link.send(plain, patience=2.0 if event["kind"] in ("done", "sample", "eval") else 0.0)

    def close(self) -> None:
        """See Sink."""


def local_peer(end: socket.socket, arguments: Mapping[str, Any]) -> int:
    """The process of one peer of `swarmkit local`; called by the nursery."""
    config = config_from_json(arguments["config"])
    leaving = Leaving(float(arguments["leave_s"]))
    leaving.install()
    link = Link(end)
    say: Say = lambda text: print(text, flush=True)  # noqa: E731 - its log
    with _errors(say, lambda text: link.send({"kind": "error", "text": text}, patience=2.0)) as outcome:
        addresses = _receive_addresses(link) if arguments["wants_addresses"] else []
        settings = config.network.settings(arguments["sockets"])
        node = Node.start(config.name, initial_peers=addresses, settings=settings)
        try:
            node.publish_config(config_to_json(config))
            link.send({"kind": "up", "addresses": node.addresses, "peer_id": node.peer_id}, patience=5.0)
            resume = arguments["resume"]
            place = Place(
                folder=Path(arguments["folder"]),
                slot=arguments["slot"],
                joining=arguments["joining"],
                resume=None if resume is None else Path(resume),
                exactly=arguments["exactly"],
                expected=arguments["expected"],
                still_expected=lambda count: _told(link, count),
                evaluates_alone=False,
                sinks=[LinkSink(link)],
            )
            outcome.code = _train(node, config, place, leaving, say)
        finally:
            node.close()
    return outcome.code


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


# -- common to all -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Result:
    code: int = Exit.error


@contextlib.contextmanager
def _errors(say: Say, tell: Callable[[str], object] = lambda text: None) -> Iterator[_Result]:
    """Turn errors that users can do something about into one line and an exit code."""
    result = _Result()
    codes: list[tuple[type[Exception], Exit]] = [
        (TrainingDiverged, Exit.diverged),
        (JoinFailed, Exit.not_joined),
        (SwarmError, Exit.not_joined),
        (ConfigError, Exit.settings),
        (CheckpointError, Exit.settings),
        (DataError, Exit.settings),
    ]
    try:
        yield result
    except (TrainingDiverged, SwarmError, ConfigError, CheckpointError, DataError) as error:
        result.code = next(code for kind, code in codes if isinstance(error, kind))
        say(f"error: {error}")
        tell(str(error))
    except Exception as error:
        tell(f"{type(error).__name__}: {error}")
        raise


@contextlib.contextmanager
def _socket_folder() -> Iterator[str]:
    folder = make_socket_folder()
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sinks(config: Config, folder: Path) -> list[Sink]:
    sinks: list[Sink] = []
    if config.log.tensorboard:
        sinks.append(TensorBoardSink(folder))
    if config.log.prometheus_port:
        sinks.append(PrometheusSink(config.log.prometheus_port))
    return sinks


def _train(node: Node, config: Config, place: Place, leaving: Leaving, say: Say) -> int:
    """Train on a started node and return the exit code."""
    if config.threads:
        torch.set_num_threads(config.threads)
    stop = threading.Event()
    sinks = [*place.sinks, *_sinks(config, place.folder)]
    with EventLog(place.folder / "events.jsonl", peer=node.peer_id, sinks=sinks) as events:
        neighbours = Neighbours(node, config, events=events, stop=stop, say=say)
        try:
            return _Run(node, config, place, leaving, say, events, neighbours, stop).go()
        except Exception as error:
            events.emit("error", text=f"{type(error).__name__}: {error}")
            raise


class _Run:
    """One peer's way through a run."""

    def __init__(
        self,
        node: Node,
        config: Config,
        place: Place,
        leaving: Leaving,
        say: Say,
        events: EventLog,
        neighbours: Neighbours,
        stop: threading.Event,
    ) -> None:
        self.node, self.config, self.place, self.leaving, self.say = node, config, place, leaving, say
        self.events, self.neighbours, self.stop = events, neighbours, stop

    def go(self) -> int:
        corpus = open_corpus(self.config)
        slot = self.place.slot
        if slot is None:
            slot = self.neighbours.claim_slot()
        self.node.heartbeat(slot=slot, device=self.config.device, version=__version__)
        collective = self.node.collective(joining=True)
        trainer = build_trainer(
            self.config,
            collective=collective,
            corpus=corpus,
            source=open_stream(self.config, corpus, slot),
            events=self.events,
            checkpoints=self.place.folder / "checkpoints",
            surroundings=self.neighbours,
            evaluates_alone=self.place.evaluates_alone,
            slot=slot,
        )
        anchor = trainer.optimizer.anchor().values()
        self.events.emit(
            "run_start",
            id=self.node.peer_id,
            pid=os.getpid(),
            version=__version__,
            steps=self.config.steps,
            slot=slot,
            parameters=sum(tensor.numel() for tensor in anchor),
        )
        trainer.stop = self.stop
        self.leaving.ready(self.stop.set, collective.close)
        if self.place.resume is not None:
            trainer.resume(checkpoint.load(self.place.resume), exactly=self.place.exactly)
            self.say(f"resumed {self.place.resume} at step {trainer.optimizer.step_count}")
        code = self._begin(trainer)
        if code is not None:
            return code
        return self._report(trainer.run())

    def _begin(self, trainer: Trainer) -> int | None:
        """Enter the run; an exit code when that was not possible."""
        under_way = any(r.state == "training" for r in self.node.refresh() if r.peer_id != self.node.peer_id)
        if self.place.joining:
            trainer.join(observe=under_way)
        self.node.serve_state(trainer.optimizer.snapshot)
        self.neighbours.change_state("waiting")
        if not self.neighbours.wait_for(self.place.expected, self.place.still_expected):
            return self.leaving.exit_code if self.leaving.number is not None else Exit.too_few
        self.neighbours.change_state("training")
        self.say(f"training from step {trainer.optimizer.step_count} of {self.config.steps}")
        return None

    def _report(self, outcome: Outcome) -> int:
        if outcome.finished:
            self.neighbours.linger()
        fields: dict[str, object] = {
            "finished": outcome.finished,
            "step": outcome.step,
            "round": outcome.round,
            "digest": outcome.digest,
            "tokens": outcome.tokens,
            "bytes_sent": self.node.bytes_sent,
            "bytes_received": self.node.bytes_received,
        }
        if outcome.score is not None:
            fields |= {"loss": outcome.score.loss, "bpb": outcome.score.bpb, "accuracy": outcome.score.accuracy}
        self.events.emit("done", **fields)
        self.say(f"{'finished' if outcome.finished else 'left'} at step {outcome.step}, digest {outcome.digest}")
        if outcome.score is not None:
            self.say(f"validation loss {outcome.score.loss:.4f} nats, {outcome.score.bpb:.4f} bits")
        self.node.close(state="done" if outcome.finished else "gone")
        if outcome.finished:
            return Exit.ok
        return self.leaving.exit_code if self.leaving.number is not None else Exit.too_few
