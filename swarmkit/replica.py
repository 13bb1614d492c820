"""One replica's way through a run: state, training, answers to signals, an orderly end."""

import contextlib
import dataclasses
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from swarmkit import __version__, checkpoint
from swarmkit.build import build_trainer, open_corpus, open_stream, pick_device
from swarmkit.config import Config
from swarmkit.control_plane import ControlPlane
from swarmkit.data.corpus import Corpus
from swarmkit.exits import EXPECTED, Exit, exit_code
from swarmkit.metrics import EventLog, PrometheusSink, Sink, TensorBoardSink
from swarmkit.neighbours import Neighbours, Say
from swarmkit.network_config import PaceRule
from swarmkit.peers.hygiene import make_socket_folder
from swarmkit.peers.lateness import Fault
from swarmkit.peers.node import Node
from swarmkit.peers.rules import Rules
from swarmkit.preemption import PreemptionConfig, PreemptionWatch
from swarmkit.signals import Leaving
from swarmkit.trainer import Outcome, Trainer


@dataclasses.dataclass(slots=True, kw_only=True)
class Place:
    """Which peer of the run this is, and how it begins."""

    folder: Path  # for events and checkpoints
    slot: int | None = None  # share of the data; None: the lowest that nobody has
    joining: bool = False  # the run may be under way: fetch its state first
    resume: Path | None = None  # checkpoint to begin from
    exactly: bool = True  # that checkpoint is this peer's own, and all peers' are of the same round
    beside: bool = False  # it is another's, and the others go on from their own
    expected: int = 1  # replicas to wait for before the first step
    still_expected: Callable[[int], int] = lambda count: count
    evaluates_alone: bool = True
    sinks: Sequence[Sink] = ()


@dataclasses.dataclass(slots=True)
class Result:
    """How a process ends."""

    code: int = Exit.error


@contextlib.contextmanager
def told_errors(say: Say, tell: Callable[[str], object] = lambda text: None) -> Iterator[Result]:
    """Turn errors that users can do something about into a line and an exit code."""
    result = Result()
    try:
        yield result
    except EXPECTED as error:
        result.code = exit_code(error)
        say(f"error: {error}")
        tell(str(error))
    except Exception as error:
        tell(f"{type(error).__name__}: {error}")
        raise


@contextlib.contextmanager
def socket_folder(leaving: Leaving) -> Iterator[str]:
    """A folder for p2pd's sockets, removed at the end, a sudden one too."""
    folder = make_socket_folder()
    leaving.clean = lambda: shutil.rmtree(folder, ignore_errors=True)
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_data(config: Config) -> Corpus:
    """Load the data, having checked what else is this machine's own: refused before the network starts."""
    pick_device(config.device)
    check_services(config)
    return open_corpus(config)


def check_services(config: Config) -> None:
    """Raise ConfigError for files and programs of this machine that a peer's services cannot use."""
    config.control.settings()
    config.preemption.check()


@contextlib.contextmanager
def watched_preemption(config: PreemptionConfig, leaving: Leaving, say: Say) -> Iterator[None]:
    """Leave in order when the hook says that this machine is about to be taken."""
    if not config.is_set:
        yield
        return
    watch = PreemptionWatch(config, leaving.ask, say)
    try:
        yield
    finally:
        watch.close()


def train(node: Node, config: Config, corpus: Corpus, place: Place, leaving: Leaving, say: Say) -> int:
    """Train on a started node and return the exit code."""
    if config.threads:
        torch.set_num_threads(config.threads)
    stop = threading.Event()
    control = ControlPlane(node, config, leaving, folder=place.folder)
    sinks = [*place.sinks, control, *_sinks(config, place.folder)]
    with EventLog(place.folder / "events.jsonl", peer=node.peer_id, sinks=sinks) as events:
        neighbours = Neighbours(node, config, events=events, stop=stop, say=say)
        try:
            return _Replica(node, config, corpus, place, leaving, say, events, neighbours, stop, control).go()
        except Exception as error:
            events.emit("error", text=f"{type(error).__name__}: {error}")
            raise
        finally:
            control.withdraw()


def _sinks(config: Config, folder: Path) -> list[Sink]:
    sinks: list[Sink] = []
    if config.log.tensorboard:
        sinks.append(TensorBoardSink(folder))
    if config.log.prometheus_port:
        sinks.append(PrometheusSink(config.log.prometheus_port))
    return sinks


class _Replica:
    def __init__(
        self,
        node: Node,
        config: Config,
        corpus: Corpus,
        place: Place,
        leaving: Leaving,
        say: Say,
        events: EventLog,
        neighbours: Neighbours,
        stop: threading.Event,
        control: ControlPlane,
    ) -> None:
        self.node, self.config, self.corpus, self.place = node, config, corpus, place
        self.leaving, self.say = leaving, say
        self.events, self.neighbours, self.stop, self.control = events, neighbours, stop, control

    def go(self) -> int:
        slot = self.place.slot
        if slot is None:
            slot = self.neighbours.claim_slot()
        self.node.heartbeat(slot=slot, device=str(pick_device(self.config.device)), version=__version__)
        collective = self.node.collective(
            joining=True, rules=Rules(self.config.network.trim, self.config.network.max_norm_ratio)
        )
        trainer = build_trainer(
            self.config,
            collective=collective,
            pace=self.node.pace if self.config.network.pace is PaceRule.swarm else None,
            corpus=self.corpus,
            source=open_stream(self.config, self.corpus, slot),
            events=self.events,
            checkpoints=self.place.folder / "checkpoints",
            surroundings=self.neighbours,
            evaluates_alone=self.place.evaluates_alone,
            slot=slot,
        )
        trainer.stop = self.stop
        if self.place.resume is None and (mark := self.node.shares().mark(slot)) is not None:
            trainer.take_over(mark)
        collective.watch.on_fault.append(lambda fault: self._on_fault(fault, collective.watch.summary()))
        self.leaving.ready(self._leave, collective.close)
        self.control.serve(trainer.ask_checkpoint)
        if self.place.resume is not None:
            state = checkpoint.load(self.place.resume)
            trainer.resume(state, exactly=self.place.exactly, beside=self.place.beside)
            self.say(f"resumed {self.place.resume} at step {trainer.optimizer.step_count}")
        self.node.heartbeat(data_from=trainer.ledger.first, data_to=trainer.ledger.mark)
        self.events.emit(
            "run_start",
            id=self.node.peer_id,
            pid=os.getpid(),
            version=__version__,
            steps=self.config.steps,
            slot=slot,
            slots=self.config.peers,
            data_from=trainer.ledger.first,
            parameters=sum(tensor.numel() for tensor in trainer.optimizer.anchor().values()),
            tokens=trainer.tokens,
            tokens_per_step=trainer.tokens_per_step,
        )
        with watched_preemption(self.config.preemption, self.leaving, self.say):
            code = self._begin(trainer)
            if code is not None:
                return code
            return self._report(trainer.run(), redrawn=trainer.ledger.redrawn)

    def _on_fault(self, fault: Fault, summary: str) -> None:
        """Somebody holds the rounds up, or no longer does; called in the network's thread."""
        self.node.heartbeat(late=summary)
        self.events.emit(
            "fault",
            id=fault.peer_id,
            what=fault.what,
            round=fault.round,
            seconds=fault.seconds,
            usual_s=fault.usual_s,
            ended=fault.ended,
            text=fault.text,
        )

    def _leave(self) -> None:
        """Begin to leave; a signal handler may call this at any moment, so whatever takes locks is for a thread."""
        self.stop.set()
        threading.Thread(target=self._say_leaving, name="swarmkit-leaving", daemon=True).start()

    def _say_leaving(self) -> None:
        self.node.abandon_fetch()
        self.control.leave()
        self.events.emit("leaving", reason=self.leaving.reason, within_s=self.leaving.timeout_s)
        self.say(f"leaving: {self.leaving.reason}")

    def _begin(self, trainer: Trainer) -> int | None:
        """Enter the run; an exit code when that was not possible."""
        under_way = any(r.state == "training" for r in self.node.refresh() if r.peer_id != self.node.peer_id)
        if self.place.joining:
            trainer.join(observe=under_way)
        if self.leaving.is_leaving:
            return self._left_early()  # it may hold no state, so nobody must wait for it or fetch from it
        self.node.serve_state(trainer.optimizer.snapshot, trainer.optimizer.version)
        self.neighbours.change_state("waiting")
        if not self.neighbours.wait_for(self.place.expected, self.place.still_expected):
            return self._left_early() if self.leaving.is_leaving else Exit.too_few
        self.neighbours.change_state("training")
        self.say(f"training from step {trainer.optimizer.step_count} of {self.config.steps}")
        return None

    def _left_early(self) -> int:
        """Go before there was anything to contribute or to keep."""
        self.control.left()
        self.say("left before training began")
        self._close(finished=False)
        return self.leaving.exit_code

    def _close(self, *, finished: bool) -> None:
        # Not to the last moment: the process has to end by itself before the kernel ends it.
        self.node.close(state="done" if finished else "gone", within_s=max(1.0, 0.7 * self.leaving.left_s))

    def _report(self, outcome: Outcome, *, redrawn: int) -> int:
        if outcome.finished and not outcome.left_behind:
            self.neighbours.linger()
        fields: dict[str, object] = {
            "finished": outcome.finished,
            "left_behind": outcome.left_behind,
            "rounds_closed": outcome.rounds_closed,
            "step": outcome.step,
            "round": outcome.round,
            "digest": outcome.digest,
            "tokens": outcome.tokens,
            "redrawn": redrawn,
            "bytes_sent": self.node.bytes_sent,
            "bytes_received": self.node.bytes_received,
        }
        if outcome.score is not None:
            fields |= {"loss": outcome.score.loss, "bpb": outcome.score.bpb, "accuracy": outcome.score.accuracy}
        self.events.emit("done", **fields)
        if outcome.left_behind:
            self.say(f"left behind: {outcome.left_behind}")
        self.say(f"{'finished' if outcome.finished else 'left'} at step {outcome.step}, digest {outcome.digest}")
        if outcome.score is not None:
            self.say(f"validation loss {outcome.score.loss:.4f} nats, {outcome.score.bpb:.4f} bits")
        self._close(finished=outcome.finished)
        if outcome.left_behind:
            return Exit.error
        if outcome.finished:
            return Exit.ok
        return self.leaving.exit_code if self.leaving.is_leaving else Exit.too_few
