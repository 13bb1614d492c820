"""What a peer of a run lets its control plane tell and do: its events as messages, its leave, its checkpoints."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from swarmkit import __version__
from swarmkit.config import Config
from swarmkit.errors import ConfigError
from swarmkit.metrics import Event
from swarmkit.peers import control_pb2 as pb
from swarmkit.peers.control import ControlServer
from swarmkit.peers.node import Node
from swarmkit.peers.roster import PeerRecord
from swarmkit.signals import Leaving
from swarmkit.targets import CONTROL_FILE

Checkpointer = Callable[[], "Future[tuple[str, int]]"]  # path and step of the checkpoint, once it is written


class ControlPlane:
    """One peer's control plane: what ControlServer serves, and a Sink that keeps and passes on what happens."""

    def __init__(self, node: Node, config: Config, leaving: Leaving, *, folder: Path | None = None) -> None:
        """Serve nothing yet; without a `folder` for its address and checkpoints the peer does not train."""
        self._node = node
        self._config = config
        self._leaving = leaving
        self._folder = folder
        self._started = time.monotonic()
        self._checkpointer: Checkpointer | None = None
        self._server: ControlServer | None = None
        self._newest = ""  # checkpoint
        self._rounds = {"closed": 0, "failed": 0}
        self._train: Mapping[str, Any] = {}  # the last train event
        self._faults: dict[tuple[str, str], pb.Fault] = {}

    def serve(self, checkpointer: Checkpointer | None = None) -> str:
        """Listen, and write into the folder where; returns host:port. Raises ConfigError when it cannot."""
        self._checkpointer = checkpointer
        try:
            self._server = self._node.serve_control(self, self._config.control.settings())
        except OSError as error:
            raise ConfigError(f"control.listen={self._config.control.listen}: {error}") from error
        if self._folder is not None:
            values = {"target": local_target(self._server.target), "pid": os.getpid(), "peer_id": self._node.peer_id}
            path = self._folder / CONTROL_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: a command may look for it at any time.
            path.with_suffix(".tmp").write_text(json.dumps(values | {"run": self._node.run}))
            path.with_suffix(".tmp").replace(path)
        return self._server.target

    def leave(self) -> None:
        """Tell those who probe and watch that this peer leaves."""
        if self._server is not None:
            self._server.leaving()
        self._tell("leaving", self._leaving.reason)

    def left(self) -> None:
        """Tell those who watch that a peer that had not begun to train left in order."""
        self._tell("left")

    def _tell(self, state: str, reason: str = "") -> None:
        if self._server is not None:
            self._server.publish(pb.Metrics(time=time.time(), state=pb.State(state=state, reason=reason)))

    def withdraw(self) -> None:
        """Remove the address from the folder: nothing will listen there any more."""
        if self._folder is not None:
            (self._folder / CONTROL_FILE).unlink(missing_ok=True)

    # -- what the server calls -----------------------------------------------------------------------------------------

    def status(self) -> pb.StatusReply:
        """See Controlled."""
        records = self._node.table()
        mine = next((record for record in records if record.peer_id == self._node.peer_id), None)
        now = time.time()
        return pb.StatusReply(
            run=self._node.run,
            peer_id=self._node.peer_id,
            version=__version__,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started,
            state="" if mine is None else mine.state,
            leaving=self._leaving.reason,
            steps=0 if self._folder is None else self._config.steps,
            folder="" if self._folder is None else str(self._folder.absolute()),
            checkpoint=self._newest,
            rounds_closed=self._rounds["closed"],
            rounds_failed=self._rounds["failed"],
            peers=[peer_message(record, now=now) for record in records],
            faults=list(self._faults.values()),
        )

    def drain(self, reason: str) -> pb.DrainReply:
        """See Controlled."""
        return pb.DrainReply(already=not self._leaving.ask(reason), within_s=self._leaving.timeout_s)

    def checkpoint(self) -> "Future[pb.CheckpointReply] | None":
        """See Controlled."""
        if self._checkpointer is None:
            return None
        reply: Future[pb.CheckpointReply] = Future()
        written = self._checkpointer()

        def answer(done: "Future[tuple[str, int]]") -> None:
            if not reply.set_running_or_notify_cancel() or done.cancelled():
                return
            error = done.exception()
            if error is not None:
                reply.set_exception(error)
            else:
                path, step = done.result()
                reply.set_result(pb.CheckpointReply(path=path, step=step))

        written.add_done_callback(answer)
        return reply

    # -- the sink ------------------------------------------------------------------------------------------------------

    def write(self, event: Event) -> None:
        """See Sink."""
        kind = event["kind"]
        if kind == "train":
            self._train = event
        elif kind == "round":
            self._rounds["closed" if event.get("failed") is None else "failed"] += 1
        elif kind == "checkpoint" and not event.get("failed"):
            self._newest = str(Path(event["path"]).absolute())
        elif kind == "fault":
            key = (str(event["id"]), str(event["what"]))
            self._faults.pop(key, None)
            if not event["ended"]:
                self._faults[key] = _fault(event)
        if self._server is not None and (message := to_metrics(event, self._train)) is not None:
            self._server.publish(message)

    def close(self) -> None:
        """See Sink."""


def local_target(target: str) -> str:
    """Where a listener is reached from its own machine: one on all interfaces on loopback too."""
    host, _, port = target.rpartition(":")
    return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host) + f":{port}"


def peer_message(record: PeerRecord, *, now: float) -> pb.Peer:
    """A row of the peer table; `now` is wall-clock time, which heartbeats carry as well."""
    return pb.Peer(
        peer_id=record.peer_id,
        role=record.role,
        state=record.state,
        step=record.step,
        round=record.round,
        loss=record.loss,
        tokens_per_s=record.tokens_per_s,
        bytes_sent=record.bytes_sent,
        bytes_received=record.bytes_received,
        device=record.device,
        version=record.version,
        digest=record.digest,
        lineage=record.lineage,
        seen_s=max(0.0, now - record.updated_at),
        address=record.address,
    )


def to_metrics(event: Event, train: Mapping[str, Any]) -> pb.Metrics | None:
    """An event as a message, or None for one that nobody watches for; `train` is the last train event."""
    make = _MESSAGES.get(str(event["kind"]))
    if make is None:
        return None
    metrics = pb.Metrics(time=float(event["time"]))
    name, message = make(event, train)
    getattr(metrics, name).CopyFrom(message)
    return metrics


def _number(values: Mapping[str, Any], key: str) -> float:
    value = values.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return "" if value is None else str(value)


def _members(event: Mapping[str, Any]) -> Sequence[str]:
    return [str(member) for member in event.get("members") or ()]


def _fault(event: Mapping[str, Any]) -> pb.Fault:
    return pb.Fault(
        peer_id=_text(event, "id"),
        what=_text(event, "what"),
        seconds=_number(event, "seconds"),
        usual_s=_number(event, "usual_s"),
        round=int(_number(event, "round")),
        ended=bool(event.get("ended")),
        text=_text(event, "text"),
    )


def _round(event: Mapping[str, Any], train: Mapping[str, Any]) -> pb.Round:
    return pb.Round(
        round=int(event["round"]),
        step=int(event["step"]),
        members=_members(event),
        seconds=_number(event, "seconds"),
        waited=_number(event, "waited"),
        exposed=_number(event, "exposed"),
        bytes_sent=int(_number(event, "bytes_sent")),
        bytes_received=int(_number(event, "bytes_received")),
        failed=_text(event, "failed"),
        digest=_text(event, "digest"),
        loss=_number(train, "loss"),
        tokens_per_s=_number(train, "tokens_per_s"),
    )


def _train(event: Mapping[str, Any]) -> pb.Train:
    return pb.Train(
        step=int(event["step"]),
        loss=_number(event, "loss"),
        tokens_per_s=_number(event, "tokens_per_s"),
        lr=_number(event, "lr"),
    )


def _evaluation(event: Mapping[str, Any]) -> pb.Evaluation:
    return pb.Evaluation(
        step=int(event["step"]),
        loss=_number(event, "loss"),
        bits=_number(event, "bpb"),
        accuracy=_number(event, "accuracy"),
    )


def _checkpointed(event: Mapping[str, Any]) -> pb.Checkpointed:
    return pb.Checkpointed(step=int(event["step"]), path=_text(event, "path"), failed=_text(event, "failed"))


def _done(event: Mapping[str, Any]) -> pb.Done:
    return pb.Done(
        finished=bool(event["finished"]),
        step=int(event["step"]),
        round=int(event["round"]),
        digest=_text(event, "digest"),
    )


# By the kind of event: the field of Metrics, and the message in it.
_MESSAGES: dict[str, Callable[[Event, Mapping[str, Any]], tuple[str, Any]]] = {
    "state": lambda event, _: ("state", pb.State(state=_text(event, "state"))),
    "round": lambda event, train: ("round", _round(event, train)),
    "train": lambda event, _: ("train", _train(event)),
    "eval": lambda event, _: ("evaluation", _evaluation(event)),
    "checkpoint": lambda event, _: ("checkpoint", _checkpointed(event)),
    "fault": lambda event, _: ("fault", _fault(event)),
    "done": lambda event, _: ("done", _done(event)),
}
