"""`swarmkit status`, `drain`, `checkpoint` and `watch` over the control plane of a peer."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import psutil
from rich.console import Console

from swarmkit.control_config import load_ca, load_tls
from swarmkit.errors import ConfigError, PeerUnreachable
from swarmkit.exits import Exit
from swarmkit.peer_table import Row, table
from swarmkit.peers import control_pb2 as pb
from swarmkit.peers.control_client import ControlClient
from swarmkit.peers.settings import Tls, is_loopback
from swarmkit.targets import Target

Say = Callable[[str], object]
# Beyond what a peer may take to leave: for its last words to arrive and its process to end.
SLACK_S = 5.0


def client_tls(ca: str | None, cert: str | None, key: str | None) -> Tls | None:
    """TLS as the command's options give it; raises ConfigError."""
    if (cert is None) != (key is None):
        raise ConfigError("--cert and --key belong together: give both or none")
    if cert is not None and ca is None:
        raise ConfigError("--cert: give --ca too, which signed the peer's certificate")
    if ca is None:
        return None
    trusted = load_ca(ca, name="--ca")
    own = load_tls(cert, key, None, section="--") if cert is not None and key is not None else None
    return Tls(b"" if own is None else own.certificate, b"" if own is None else own.key, trusted)


def show_peer(target: Target, tls: Tls | None, *, as_json: bool) -> None:
    """Print where a peer stands and whom it knows."""
    with ControlClient(target.where, tls) as client:
        reply = client.status()
    records = [_row(peer) for peer in reply.peers]
    faults = [_fault_fields(fault) for fault in reply.faults]
    if as_json:
        asked = {
            name: getattr(reply, name)
            for name in ("peer_id", "pid", "uptime_s", "state", "leaving", "steps", "folder", "checkpoint")
        } | {"rounds_closed": reply.rounds_closed, "rounds_failed": reply.rounds_failed}
        peers = [asdict(record) for record in records]
        print(json.dumps({"run": reply.run, "peers": peers, "asked": asked, "faults": faults}))
        return
    console = Console(soft_wrap=True)
    console.print(table(reply.run, records, now=time.time()))
    for line in describe(target, reply):
        console.print(line, markup=False, highlight=False)


def describe(target: Target, reply: pb.StatusReply) -> Iterator[str]:
    """What only this peer knows, for people."""
    mine = next((peer for peer in reply.peers if peer.peer_id == reply.peer_id), None)
    name = f"{target.name} ({reply.peer_id[-6:]})"
    steps = f", step {mine.step} of {reply.steps}" if mine is not None and reply.steps else ""
    rounds = f", {reply.rounds_closed} rounds closed, {reply.rounds_failed} failed" if reply.steps else ""
    yield f"{name}: {reply.state}{steps}{rounds}, up for {reply.uptime_s:.0f} s, process {reply.pid}"
    if reply.leaving:
        yield f"{name} is leaving: {reply.leaving}"
    if reply.checkpoint:
        yield f"{name} wrote {reply.checkpoint}"
    yield from (fault.text for fault in reply.faults)


def drain_peer(target: Target, tls: Tls | None, *, reason: str, wait: bool, say: Say = print) -> int:
    """Have a peer leave and wait until it has; 0 when it left in order."""
    with ControlClient(target.where, tls) as client:
        process = _process(target, client.status())
        happened = client.watch(timeout=None if not wait else 3600.0)
        if wait:
            next(happened)  # from here on nothing of what it does is missed
        reply = client.drain(reason)
        say(
            f"{target.name} is leaving, within {reply.within_s:.0f} s"
            + (", as it was already" if reply.already else "")
        )
        if not wait:
            return Exit.ok
        ended = time.monotonic() + reply.within_s + SLACK_S
        orderly = False
        try:
            for metrics in happened:
                orderly = orderly or metrics.HasField("done") or metrics.state.state == "left"
                if line := line_of(metrics):
                    say(line)
        except PeerUnreachable as error:
            say(f"{target.name} went without a last word: {error}")
    if process is not None:
        try:
            process.wait(max(0.1, ended - time.monotonic()))
        except psutil.TimeoutExpired:
            say(f"{target.name} still runs: process {process.pid}")
            return Exit.error
    say(f"{target.name} has left" if orderly else f"{target.name} has ended, but not in order; see its log")
    return Exit.ok if orderly else Exit.error


def checkpoint_peer(target: Target, tls: Tls | None, *, timeout_s: float, say: Say = print) -> int:
    """Have a peer write a checkpoint and say where."""
    with ControlClient(target.where, tls) as client:
        reply = client.checkpoint(timeout=timeout_s)
    say(f"{target.name} wrote step {reply.step}: {reply.path}")
    return Exit.ok


def watch_peer(target: Target, tls: Tls | None, *, as_json: bool) -> int:
    """Print what happens at a peer, a line for each round, until it ends; 0 when it ended in order."""
    console = Console(soft_wrap=True, highlight=False)
    orderly = False
    with ControlClient(target.where, tls) as client:
        for metrics in client.watch():
            orderly = orderly or metrics.HasField("done")
            line = json_of(metrics) if as_json else line_of(metrics)
            if line:
                console.print(line, markup=False, style=None if as_json else _style(metrics))
    return Exit.ok if orderly else Exit.error


def line_of(metrics: pb.Metrics) -> str:
    """A message for people; empty for one that says nothing that a round does not say too."""
    kind = metrics.WhichOneof("what")
    clock = time.strftime("%H:%M:%S", time.localtime(metrics.time)) if metrics.time else " " * 8
    text = _LINES[kind](metrics) if kind in _LINES else ""
    missed = f" ({metrics.dropped} lines before this one are missing)" if metrics.dropped else ""
    return f"{clock}  {text}{missed}" if text else ""


def json_of(metrics: pb.Metrics) -> str:
    """A message as one JSON object, with the names of control.proto."""
    from google.protobuf.json_format import MessageToDict

    values = MessageToDict(metrics, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return json.dumps(values)


def _round_line(metrics: pb.Metrics) -> str:
    this = metrics.round
    if this.failed:
        return f"round {this.round} failed, training goes on: {this.failed}"
    return (
        f"round {this.round}  step {this.step}  loss {this.loss:.4f}  {this.tokens_per_s:,.0f} tokens/s  "
        f"{len(this.members)} members  {this.seconds:.2f} s, {this.waited:.2f} of it waiting  "
        f"{this.bytes_sent / 1e6:.2f} MB out, {this.bytes_received / 1e6:.2f} in"
    )


def _state_line(metrics: pb.Metrics) -> str:
    this = metrics.state
    return f"{this.state}: {this.reason}" if this.reason else this.state


def _checkpoint_line(metrics: pb.Metrics) -> str:
    this = metrics.checkpoint
    if this.failed:
        return f"no checkpoint of step {this.step}: {this.failed}"
    return f"checkpoint of step {this.step}: {this.path}"


def _done_line(metrics: pb.Metrics) -> str:
    this = metrics.done
    return f"{'finished' if this.finished else 'left'} at step {this.step}, round {this.round}, digest {this.digest}"


_LINES: dict[str | None, Callable[[pb.Metrics], str]] = {
    "state": _state_line,
    "round": _round_line,
    "evaluation": lambda metrics: f"step {metrics.evaluation.step}: validation loss {metrics.evaluation.loss:.4f} nats",
    "checkpoint": _checkpoint_line,
    "fault": lambda metrics: metrics.fault.text,
    "done": _done_line,
}


def _style(metrics: pb.Metrics) -> str | None:
    """Colours, which a Console leaves away where its output is no terminal."""
    if metrics.round.failed or metrics.checkpoint.failed:
        return "red"
    if metrics.HasField("fault"):
        return "green" if metrics.fault.ended else "yellow"
    return None if metrics.HasField("round") else "dim"


def _row(peer: pb.Peer) -> Row:
    values = {name: getattr(peer, name) for name in Row.__slots__ if name != "updated_at"}
    return Row(**values, updated_at=time.time() - peer.seen_s)


def _fault_fields(fault: pb.Fault) -> dict[str, object]:
    return {name: getattr(fault, name) for name in ("peer_id", "what", "seconds", "usual_s", "round", "text")}


def _process(target: Target, reply: pb.StatusReply) -> psutil.Process | None:
    """The peer's process when it is one of this machine, so that its end can be waited for."""
    if not is_loopback(target.where.rpartition(":")[0].strip("[]")):
        return None
    try:
        return psutil.Process(reply.pid)
    except psutil.NoSuchProcess:
        return None
