"""`swarmkit local`: N peers on this machine, supervised from the first to the last."""

import contextlib
import dataclasses
import os
import selectors
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import psutil

from swarmkit.config import Config, config_to_json, config_to_publish
from swarmkit.errors import ConfigError
from swarmkit.exits import Exit
from swarmkit.network_config import host_port
from swarmkit.peers.hygiene import make_socket_folder
from swarmkit.processes import Child, Children
from swarmkit.progress import Progress, Row
from swarmkit.run_folder import make_run_folder
from swarmkit.summary import Member, summarise

PRELOAD = [
    "torch",
    "torch.optim.adamw",
    "torch._dynamo",
    "swarmkit.peers.node",
    "swarmkit.local_peer",
    "swarmkit.baseline",
]
MAX_RESTARTS = 3
# Of launch.grace_s, what is kept for SIGKILL and for cleaning up after it.
KILL_S = 3.0
LOG_TAIL = 6


def run_local(config: Config, *, file: TextIO | None = None) -> int:
    """Train with `config.peers` processes on this machine and return the exit code.

    0 when at least one peer finished and all that did hold the same parameters, which they averaged in rounds; 2 when
    the peers found a setting or the data wrong; 130 after Ctrl-C; 0 after another signal when every peer left in order;
    1 otherwise.
    """
    run = LocalRun(config, file=file)
    try:
        return run.supervise()
    finally:
        run.close()


class LocalRun:
    """The supervisor: one thread that waits for children, their messages, and signals."""

    def __init__(self, config: Config, *, file: TextIO | None = None) -> None:
        _check(config)
        self.config = config
        self.began = psutil.Process().create_time()
        self._plan = None
        if config.resume is not None:
            from swarmkit.resume import check_fit, plan_resume

            self._plan = plan_resume(Path(config.resume))
            check_fit(self._plan.paths[0], config)
        self.folder = make_run_folder(config)
        self._sockets = make_socket_folder()
        grace_s = max(1.0, config.launch.grace_s - KILL_S)
        self._children = Children(PRELOAD, cleanup=[self._sockets], threads=config.threads, grace_s=grace_s)
        self._progress = Progress(config.steps, file=file)
        self._members: dict[int, Member] = {}  # by the child's number
        self._addresses: dict[int, list[str]] = {}  # of peers that run
        self._waiting: list[Child] = []  # peers that need an address to begin with
        self._baseline: Member | None = None
        self._signals: list[int] = []
        self._failed: Exit | None = None  # what ended everybody: a setting that is wrong for all, or nobody to join
        self._said: set[str] = set()  # errors, each of which is told once
        self._asked: list[Child] = []  # those that ran when the first signal came
        self._killed = False
        self._kill_after: float | None = None
        self._wake, self._wake_end = os.pipe()
        self._before = dict(self._take_signals())
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._children, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._first_step: float | None = None

    # -- signals -------------------------------------------------------------------------------------------------------

    def _take_signals(self) -> Iterator[tuple[int, Any]]:
        for end in (self._wake, self._wake_end):
            os.set_blocking(end, False)
        self._old_wake = signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            yield number, signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _obey_signals(self) -> None:
        """First signal: everybody leaves in order. Second, or time up: everybody is killed."""
        if not self._signals:
            return
        if self._kill_after is None:
            if self._failed is None:
                name = signal.Signals(self._signals[0]).name
                self._progress.say(f"{name}: asking the peers to leave; once more ends them at once")
            self._kill_after = time.monotonic() + max(1.0, self.config.launch.grace_s - KILL_S)
            self._children.give_up()
            self._asked = self._children.running()
            for child in self._asked:
                self._children.signal(child, signal.SIGTERM)
        elif not self._killed and (len(self._signals) > 1 or time.monotonic() > self._kill_after):
            self._killed = True
            for child in self._children.running():
                self._progress.say(f"{child.name} is killed: it did not leave in time")
                self._children.signal(child, signal.SIGKILL)

    # -- children ------------------------------------------------------------------------------------------------------

    def supervise(self) -> int:
        """Start everybody and stay until all have ended."""
        if self._plan is not None:
            own = self._plan.exactly and len(self._plan.paths) >= self.config.peers
            how = "each peer from its own checkpoint" if own else "peers without one from what was shared"
            self._progress.say(f"resuming at step {self._plan.step}, {how}")
        self._progress.say(f"{self.config.peers} peers, {self.config.steps} steps; results in {self.folder}")
        for number in range(self.config.peers):
            self._spawn_peer(number)
        self._wait()
        if self.config.launch.baseline and not self._signals and self._finished():
            self._spawn_baseline()
            self._wait()
        self._progress.refresh(force=True)
        self._progress.close()
        return self._conclude()

    def _spawn_peer(self, slot: int, *, restart: bool = False, restarts: int = 0) -> None:
        resume, exactly = (None, True) if self._plan is None or restart else self._plan.for_peer(slot)
        folder = self.folder / f"peer-{slot}"
        arguments = {
            "config": config_to_json(_of_slot(self.config, slot)),
            "published": config_to_publish(self.config),
            "folder": str(folder),
            "slot": slot,
            "sockets": str(self._sockets),
            "leave_s": self._leave_s(),
            "wants_addresses": slot > 0 or restart,
            "joining": restart,
            "resume": None if resume is None else str(resume),
            "exactly": exactly,
            "beside": resume is not None and self._plan is not None and self._plan.exactly and not exactly,
            "expected": 1 if restart else self.config.peers,
        }
        child = self._spawn(f"peer-{slot}", "swarmkit.local_peer:local_peer", arguments)
        member = self._members[child.number]
        member.slot, member.restarts = slot, restarts
        if arguments["wants_addresses"]:
            self._waiting.append(child)
            self._introduce()

    def _spawn_baseline(self) -> None:
        self._progress.say("training the baseline: one process, the same samples in every step")
        folder = self.folder / "baseline"
        arguments = {"config": config_to_json(self.config), "folder": str(folder), "leave_s": self._leave_s()}
        child = self._spawn("baseline", "swarmkit.baseline:run_baseline", arguments)
        self._baseline = self._members.pop(child.number)

    def _leave_s(self) -> float:
        return min(self.config.network.drain_timeout_s, max(1.0, self.config.launch.grace_s - KILL_S - 1.0))

    def _spawn(self, name: str, entry: str, arguments: Mapping[str, object]) -> Child:
        child = self._children.spawn(name, entry, arguments, log=self.folder / name / "log.txt")
        row = next((row for row in self._progress.rows if row.name == name), None) or self._progress.add(name)
        self._members[child.number] = Member(child=child, row=row)
        self._selector.register(child.link, selectors.EVENT_READ, child)
        return child

    def _introduce(self) -> None:
        """Give an address to those who wait for one."""
        known = [address for addresses in self._addresses.values() for address in addresses]
        if known:
            for child in self._waiting:
                child.link.send({"addresses": known}, patience=1.0)
            self._waiting.clear()

    def _wait(self) -> None:
        """Handle what happens until no child runs."""
        while self._children.running():
            for key, _ in self._selector.select(timeout=0.2):
                if isinstance(key.data, Child):
                    self._listen(key.data)
                elif key.fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 512)
            for child in self._children.poll():
                self._listen(child)
                self._on_end(child)
            self._obey_signals()
            self._progress.refresh()

    def _listen(self, child: Child) -> None:
        member = self._member(child)
        for event in child.link.receive():
            self._on_event(member, event)
        if child.link.closed:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(child.link)

    def _member(self, child: Child) -> Member:
        if self._baseline is not None and self._baseline.child is child:
            return self._baseline
        return self._members[child.number]

    def _on_event(self, member: Member, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind == "up":
            if not self._addresses:
                self._progress.say(f"more peers can join: swarmkit join {event['addresses'][0]}")
            self._addresses[member.child.number] = list(event["addresses"])
            self._introduce()
            return
        member.note(event)
        member.row.update(dict(event))
        if kind == "train" and self._first_step is None:
            self._first_step = time.time() - self.began
            self._progress.say(f"first step {self._first_step:.1f} s after the command")
        elif kind == "eval":
            self._progress.say(f"{member.name}: step {event['step']}, validation {event['bpb']:.4f} bits per byte")
        elif kind == "fault":
            # All members see the same; one line is enough.
            self._say_once(member, str(event["text"]))
        elif kind == "error":
            self._say_once(member, str(event["text"]))
        elif kind == "checkpoint" and event.get("failed"):
            self._say_once(member, f"no checkpoint of step {event['step']}, older ones stay: {event['failed']}")

    def _say_once(self, member: Member, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._progress.say(f"{member.name}: {text}")

    def _on_end(self, child: Child) -> None:
        """A child has ended: say so, and let the others go on."""
        self._addresses.pop(child.number, None)
        member = self._member(child)
        assert child.code is not None
        if child.code == 0 or (self._signals and member.done is not None):
            if not self._signals and not member.finished and member is not self._baseline:
                self._progress.say(f"{child.name} has left")
                self._expect_fewer()
            return
        member.row.state = "died"
        if self._signals and child.pid is None:
            return  # it never began
        if child.code == Exit.settings and not self._signals:
            self._failed = Exit.settings
            self._signals.append(signal.SIGTERM)
        if self._failed is Exit.settings:
            return
        self._progress.say(f"{child.name} ended {_describe(child.code)} at step {member.row.step}; its log ends with:")
        for line in _tail(self.folder / child.name / "log.txt"):
            self._progress.say(f"    {line}")
        if self._signals or member is self._baseline:
            return
        if not self._addresses and self._waiting:
            self._progress.say("no peer is up that the others could join: giving up")
            self._failed = Exit(child.code) if child.code in {code.value for code in Exit} else Exit.error
            self._signals.append(signal.SIGTERM)
        elif self.config.launch.restart and self._addresses and member.restarts < MAX_RESTARTS:
            self._progress.say(f"{child.name} is started again ({member.restarts + 1} of {MAX_RESTARTS})")
            self._spawn_peer(member.slot, restart=True, restarts=member.restarts + 1)
        else:
            self._expect_fewer()

    def _expect_fewer(self) -> None:
        """Tell those who wait for everybody how many there still are."""
        running = len([one for one in self._children.running() if one.number in self._members])
        for other in self._children.running():
            other.link.send({"expect": running})

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finished(self) -> list[Member]:
        return [member for member in self._members.values() if member.finished]

    def _conclude(self) -> int:
        if self._failed is not None:
            return self._failed
        lines, agreed = summarise(self.config, list(self._members.values()), self._baseline)
        for line in lines:
            self._progress.say(line)
        self._progress.say(f"report      {self._write_report()}")
        found = self.folder.glob("peer-*/checkpoints/step-*")
        for path in sorted(found, key=lambda path: (path.name, str(path)))[-1:]:
            self._progress.say(f"checkpoint  {path}")
        if self._signals:
            orderly = all(child.code in (0, 130) for child in self._asked)
            return 130 if self._signals[0] == signal.SIGINT else 0 if orderly else 1
        return 0 if agreed else 1

    def _write_report(self) -> str:
        from swarmkit.report import write_report

        try:
            return str(write_report(self.folder, plots=self.config.log.plots))
        except (OSError, ValueError) as error:
            return f"could not be written: {error}"

    def close(self) -> None:
        """End what still runs and leave nothing behind."""
        self._progress.close()
        self._children.close()
        shutil.rmtree(self._sockets, ignore_errors=True)
        signal.set_wakeup_fd(self._old_wake)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._selector.close()
        os.close(self._wake)
        os.close(self._wake_end)


def _check(config: Config) -> None:
    """Raise ConfigError for settings that peers on one machine cannot share."""
    network = config.network
    own = network.bulk_port, config.log.prometheus_port, host_port("control.listen", config.control.listen)[1]
    _, *ports = *host_port("network.listen", network.listen), *own
    if max(ports) + config.peers - 1 > 65535:
        raise ConfigError(f"peers={config.peers}: not enough ports above {max(ports)}")
    if network.initial_peers:
        raise ConfigError(
            "network.initial_peers: peers of `swarmkit local` find each other by themselves; "
            "to enter a run that is up, use `swarmkit join`"
        )
    for key in ("identity", "announce"):
        if getattr(network, key) and config.peers > 1:
            raise ConfigError(
                f"network.{key}={getattr(network, key)}: every peer needs one of its own, which `swarmkit local` has "
                "no way to give; use `swarmkit start` and `join`"
            )


def _of_slot(config: Config, slot: int) -> Config:
    """The settings of one peer: ports that are given count upwards from the first peer's."""
    bulk, prometheus = config.network.bulk_port, config.log.prometheus_port
    network = dataclasses.replace(
        config.network, listen=_nth("network.listen", config.network.listen, slot), bulk_port=bulk and bulk + slot
    )
    log = dataclasses.replace(config.log, prometheus_port=prometheus and prometheus + slot)
    control = dataclasses.replace(config.control, listen=_nth("control.listen", config.control.listen, slot))
    return dataclasses.replace(config, network=network, log=log, control=control)


def _nth(key: str, listen: str, slot: int) -> str:
    host, port = host_port(key, listen)
    return f"[{host}]:{port and port + slot}" if ":" in host else f"{host}:{port and port + slot}"


def _describe(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _tail(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_text(errors="replace").splitlines()[-LOG_TAIL:]


__all__ = ["LocalRun", "Row", "run_local"]
