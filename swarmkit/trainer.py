"""The training loop: batch, loss, strategy step, metrics, evaluation, checkpoint."""

import math
import queue
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmkit import checkpoint
from swarmkit.config import Config, config_to_json
from swarmkit.data.corpus import Batch, Corpus
from swarmkit.data.ledger import Ledger
from swarmkit.divergence import Divergence
from swarmkit.errors import NotInvited, RoundFailed, SwarmError, TrainingDiverged
from swarmkit.evaluation import Score, at_anchor, continue_text, evaluate
from swarmkit.lr import learning_rate
from swarmkit.network_config import RejoinRule
from swarmkit.optim.averaging import TensorChoice
from swarmkit.optim.norms import all_finite
from swarmkit.optim.synced import RoundReport, SyncedOptimizer
from swarmkit.peers.attach import PAUSES_S, not_adopted
from swarmkit.stopwatch import Stopwatch
from swarmkit.strategy import clips_itself
from swarmkit.surroundings import Events, Source, Surroundings
from swarmkit.taken import samples_taken
from swarmkit.training_state import State, collect, resume_exactly, resume_shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How training ended for this peer."""

    step: int
    round: int
    digest: str
    tokens: int  # that this peer learnt from
    finished: bool  # False: it was asked to leave, or was left alone
    left_behind: str  # why it does not hold the state of the others; empty: it does, as far as it knows
    rounds_closed: int  # that gave a result, with others in it unless the run has one peer
    score: Score | None  # None: another member of the last round evaluates
    sample: str


def _bare(position: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's position as the source told it."""
    return {name: value for name, value in position.items() if name != "pending"}


class Trainer:
    """Trains one replica. It knows a collective only through the optimizer, and no network at all."""

    def __init__(
        self,
        config: Config,
        *,
        model: nn.Module,
        optimizer: SyncedOptimizer,
        source: Source,
        corpus: Corpus,
        events: Events,
        checkpoints: Path,
        device: torch.device | None = None,
        surroundings: Surroundings | None = None,
        evaluates_alone: bool = False,
    ) -> None:
        """Prepare to train.

        With `evaluates_alone` every peer evaluates at the end; without, the first member of the last round does so for
        all, because the anchor is the same everywhere.
        """
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.source = source
        self.corpus = corpus
        self.events = events
        self.device = device or torch.device("cpu")
        self.stop = threading.Event()  # set it, and the loop ends after the step that runs
        self.tokens = 0
        self._checkpoints = checkpoints
        self._around = surroundings or Surroundings()
        self._evaluates_alone = evaluates_alone
        self._watch = Stopwatch()
        self._losses: list[tuple[int, Tensor]] = []  # step and loss of each micro-batch since the last check
        self._last_round: RoundReport | None = None
        self._members: set[str] = set()  # of the last round that gave a result
        self._rounds_closed = 0
        self._allocation: list[TensorChoice] = []  # what was told last
        self._samples = 0
        self.ledger = Ledger()
        self.ledger.begin(source.position)
        self._evaluated_at = self._saved_at = self._logged_at = 0
        self._observes_first = False  # rounds that the others, who resumed, had under way
        self._last_save = (0, 0)  # step and round of the newest checkpoint that this process wrote
        self._newest: Path | None = None  # that checkpoint
        self._wanted: queue.SimpleQueue[Future[tuple[str, int]]] = queue.SimpleQueue()  # checkpoints asked for
        self._scored: tuple[int, Score] | None = None  # round and score of the last evaluation
        self._divergence = Divergence(optimizer, events, self._around)
        optimizer.on_round.append(self._on_round)

    # -- starting ------------------------------------------------------------------------------------------------------

    def resume(self, state: State, *, exactly: bool, beside: bool = False) -> None:
        """Go on from a checkpoint, exactly or from what all shared; `beside` those, observe rounds they had begun."""
        if exactly:
            resume_exactly(self.model, self.optimizer, state)
            self.source.load(state[1]["data"])
            self.tokens = int(state[1].get("tokens", 0))
            # Work that no round had taken yet is in the optimizer's state; a share cut anew begins here.
            pending = int(state[1]["data"].get("pending", 0)) if self.source.state() == _bare(state[1]["data"]) else 0
            self.ledger.resume(max(0, self.source.position - pending), self.source.position)
        else:
            resume_shared(self.optimizer, state)
            try:
                self.source.load(state[1]["data"])
            except (ValueError, KeyError):
                # Shares of the data differ in size: another peer's position need not exist in this one's.
                self.source.seek(self.optimizer.step_count * self.config.batch_size * self.config.accumulate)
            self.ledger.begin(self.source.position)
            self._observes_first = beside and self.optimizer.lacks_rounds
        self._evaluated_at = self._saved_at = self._logged_at = self.optimizer.step_count

    def join(self, *, observe: bool = True) -> None:
        """Fetch the state of a running swarm and take part in its current round, until that works.

        A peer that is left behind does the same. Without `observe` the state is all: the run has not begun. Raises
        SwarmError when it failed too often.
        """
        reason = ""
        for attempt, pause in enumerate(PAUSES_S):
            if self.stop.is_set():
                return
            self.events.emit("state", state="joining", attempt=attempt)
            try:
                self._adopt(*self._around.fetch_state(), observe=observe)
            except NotInvited:
                raise  # nobody will ever serve it
            except SwarmError as error:
                reason = error.reason if isinstance(error, RoundFailed) else str(error)
                self.stop.wait(pause)
                continue
            self.events.emit("state", state="training", step=self.optimizer.step_count, round=self.optimizer.round)
            return
        raise not_adopted(reason)

    def _adopt(self, tensors: dict[str, Tensor], meta: Mapping[str, Any], *, observe: bool) -> None:
        kept = 0.0
        # What a peer did from an anchor that was not the others' is worth nothing to them.
        if self.config.network.rejoin is RejoinRule.offer and not self._divergence.has_diverged:
            kept = self.optimizer.rejoin(tensors, meta)
        else:
            self.optimizer.load_snapshot(tensors, meta)
        self._divergence.has_diverged = False
        self._losses.clear()
        if not kept:
            # What was drawn since the last round is part of nothing any more: it is drawn again.
            self.source.seek(self.ledger.give_up())
        if observe and self.optimizer.step_count < self.config.steps:
            self._set_learning_rate()
            step = self.optimizer.step_count + (meta.get("window") or 1)
            self._around.await_round(self.optimizer.round, step=step, tokens_per_step=self.tokens_per_step)
            self.optimizer.observe_round(contribute=kept > 0)
        self._observes_first = not observe and self.optimizer.lacks_rounds
        self._evaluated_at = self._saved_at = self._logged_at = self.optimizer.step_count

    def take_over(self, position: int) -> None:
        """Draw this share from here on: whoever had it before has learnt what comes earlier."""
        self.source.seek(position)
        self.ledger.begin(position)

    @property
    def tokens_per_step(self) -> int:
        """Tokens, or images, that this peer learns from in one inner step."""
        spec = self.corpus.spec
        return self.config.batch_size * self.config.accumulate * (spec.shape[0] if spec.kind == "tokens" else 1)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Train to the last step, or until `stop` is set, and leave everything in order.

        Raises TrainingDiverged, and JoinFailed when this peer was left behind and could not catch up; what the swarm
        had agreed on by then is kept in a checkpoint.
        """
        self._watch.restart()
        try:
            self._loop()
        except (SwarmError, TrainingDiverged):
            self._save_agreed()
            raise
        return self._finish()

    def _observe_missing(self) -> None:
        """Take part in the rounds that the others, who resumed, had under way; else catch up as who was left behind."""
        if not self._observes_first:
            return
        self._set_learning_rate()
        try:
            self.optimizer.observe_round()
        except RoundFailed:
            self.join()
        self._evaluated_at = self._saved_at = self._logged_at = self.optimizer.step_count

    def _loop(self) -> None:
        self._observe_missing()
        while self.optimizer.step_count < self.config.steps and not self.stop.is_set():
            if not self._around.may_go_on(self._last_round):
                break
            if self._at_round():
                self._divergence.compare()
            if self.optimizer.needs_state:
                self.join()
                if not self.stop.is_set():
                    # The others still have "downloading" in their tables, and rounds do not wait for that.
                    self._around.change_state("training")
                continue
            self.step()

    def step(self) -> None:
        """One optimizer step, and what is due after it."""
        self._set_learning_rate()
        self._forward_backward()
        if self.device.type == "cpu":
            self._check_losses()
        if self.config.optimizer.clip and not clips_itself(self.config.strategy):
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)
        started, exposed = time.perf_counter(), self._watch.communication
        self.optimizer.step()
        # A round that is told later than it was waited for is taken from a later step's time.
        self._watch.compute += max(0.0, time.perf_counter() - started - (self._watch.communication - exposed))
        self.optimizer.zero_grad()
        self._after_step()

    def _set_learning_rate(self) -> None:
        step, steps = self.optimizer.step_count, self.config.steps
        rate = learning_rate(step, config=self.config.optimizer, total_steps=steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _forward_backward(self) -> None:
        started = time.perf_counter()
        for _ in range(parts := self.config.accumulate):
            batch = self.source.next()
            inputs = batch.inputs.to(self.device, non_blocking=True)
            targets = batch.targets.to(self.device, non_blocking=True)
            loss: Tensor = self.model.loss(inputs, targets)  # type: ignore[operator]
            (loss / parts).backward()  # type: ignore[no-untyped-call]
            self._losses.append((self.optimizer.step_count + 1, loss.detach()))
            self.optimizer.samples += len(inputs)
            self._samples += len(inputs)
            self.ledger.draw(len(inputs))
            self._watch.tokens += targets.numel()
            self.tokens += targets.numel()
        self._watch.compute += time.perf_counter() - started

    def _check_losses(self) -> None:
        """Raise TrainingDiverged for the first loss that is not finite. On CUDA this waits for the device."""
        for step, loss in self._losses:
            if not math.isfinite(loss.item()):
                raise TrainingDiverged(
                    f"loss {loss.item()} in step {step} on peer {self.optimizer.collective.peer_id}: training stopped; "
                    "the newest checkpoint has what the peers agreed on last; lower optimizer.lr, or set optimizer.clip"
                )

    def _after_step(self) -> None:
        step = self.optimizer.step_count
        # At the swarm's pace a step of this peer may be none of the swarm's, or several.
        if self._logged_at < 1 <= step or self._is_due(self.config.log.every, self._logged_at):
            self._log()
        if self._is_due(self.config.eval.every, self._evaluated_at) and self._at_round():
            self._evaluated_at = step
            if self._evaluates():
                self._score()
        if self._is_due(self.config.checkpoint.every, self._saved_at) and self._at_round():
            self._save_if_possible()
        self._save_wanted()

    def _is_due(self, every: int, last: int) -> bool:
        return every > 0 and self.optimizer.step_count // every > last // every

    def _at_round(self) -> bool:
        """True right after a round: only then is there a new anchor to evaluate."""
        return self._last_round is not None and self._last_round.step == self.optimizer.step_count

    def _log(self) -> None:
        self._check_losses()
        watch, step = self._watch, self.optimizer.step_count
        self._logged_at = step
        loss = torch.stack([loss for _, loss in self._losses]).mean().item() if self._losses else math.nan
        rate = watch.tokens / watch.elapsed
        self.events.emit(
            "train",
            step=step,
            loss=loss,
            tokens=self.tokens,
            tokens_per_s=rate,
            lr=self.optimizer.lr,
            compute_s=watch.compute,
            communication_s=max(0.0, watch.communication - watch.waiting),
            waiting_s=watch.waiting,
        )
        self._around.report(step=step, loss=loss, tokens_per_s=rate, round=self.optimizer.round, samples=self._samples)
        self._losses.clear()
        watch.restart()

    def _on_round(self, report: RoundReport) -> None:
        self._tell_changes(report)
        self._rounds_closed += len(report.members) >= min(2, self.config.peers)
        self._last_round = report
        self._watch.communication += report.exposed
        self._watch.waiting += min(report.waited, report.exposed)
        if report.diverged:
            self._divergence.tell(str(report.failed), round=report.round)
        digest = self._divergence.digest_after(report.round)
        pending, me = self.ledger.position - self.ledger.mark, self.optimizer.collective.peer_id
        taken = samples_taken(self.config, report, me=me, pending=pending)
        self.ledger.learn(taken.mine)
        data = {"data_from": self.ledger.first, "data_to": self.ledger.mark}
        fields = {name: getattr(report, name) for name in report.__dataclass_fields__} | data
        self.events.emit("round", digest=digest, samples_per_weight=taken.per_weight, **fields)
        self._tell_allocation()
        self._around.report(round=report.round + 1, step=report.step, **data)

    def _tell_allocation(self) -> None:
        """Say what L-GreCo sends each tensor with, when that has changed."""
        found = self.optimizer.allocations()
        if found != self._allocation:
            self._allocation = found
            self.events.emit("allocation", step=self.optimizer.step_count, rows=[asdict(row) for row in found])

    def _tell_changes(self, report: RoundReport) -> None:
        """Say who came and who went, as seen by those who meet."""
        if not report.members:
            return
        present = set(report.members)
        for peer_id in sorted(present - self._members - {self.optimizer.collective.peer_id}):
            self.events.emit("peer_joined", id=peer_id, round=report.round)
        for peer_id in sorted(self._members - present):
            state = self._around.state_of(peer_id)
            reason = f"{peer_id[-8:]} was not in round {report.round}; the last that it said was: {state}"
            self.events.emit("peer_lost", id=peer_id, round=report.round, state=state, reason=reason)
        self._members = present

    # -- evaluation and checkpoints ------------------------------------------------------------------------------------

    def _evaluates(self) -> bool:
        """True for one member of the last round, and for a peer whose round failed."""
        members = self._last_round.members if self._last_round is not None else ()
        return not members or members[0] == self.optimizer.collective.peer_id

    def _score(self) -> Score:
        """Evaluate the anchor, unless that was done since the last round."""
        if self._scored is not None and self._scored[0] == self.optimizer.round:
            return self._scored[1]
        started = time.perf_counter()
        with at_anchor(self.model, self.optimizer):
            score = evaluate(self.model, self._validation(), self.device)
        seconds = time.perf_counter() - started
        self.events.emit(
            "eval",
            step=self.optimizer.step_count,
            tokens=self.tokens,
            loss=score.loss,
            bpb=score.bpb,
            accuracy=score.accuracy,
            seconds=seconds,
        )
        self._scored = (self.optimizer.round, score)
        return score

    def _validation(self) -> Iterator[Batch]:
        return self.corpus.validation(self.config.batch_size, self.config.eval.batches)

    def ask_checkpoint(self) -> "Future[tuple[str, int]]":
        """Have a checkpoint written after the step that runs; from any thread. Gives its absolute path and step."""
        future: Future[tuple[str, int]] = Future()
        self._wanted.put(future)
        return future

    def _save_wanted(self) -> None:
        while not self._wanted.empty():
            future = self._wanted.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if self._newest is None or self._last_save != (self.optimizer.step_count, self.optimizer.round):
                    self.save()
            except OSError as error:
                future.set_exception(error)
            except TrainingDiverged as error:
                future.set_exception(OSError(str(error)))
                raise
            else:
                assert self._newest is not None
                future.set_result((str(self._newest.absolute()), self._last_save[0]))

    def _save_if_possible(self) -> None:
        """Write a checkpoint; a disk that is full or gone is no reason to stop training, but is told."""
        try:
            self.save()
        except OSError as error:
            self._saved_at = self.optimizer.step_count
            reason = f"{self._checkpoints}: {error.strerror or error}"
            self.events.emit("checkpoint", step=self._saved_at, failed=reason)
            warnings.warn(f"no checkpoint of step {self._saved_at}, the older ones stay: {reason}", stacklevel=2)

    def save(self) -> Path:
        """Write a checkpoint of this peer; raises OSError when the disk is full or cannot be written."""
        self._check_losses()
        pending = self.ledger.position - self.ledger.mark
        tensors, meta = collect(self.model, self.optimizer, {**self.source.state(), "pending": pending})
        # With its configuration and what the data look like, a checkpoint can be used without the run that made it.
        meta |= {"tokens": self.tokens, "config": config_to_json(self.config), "spec": asdict(self.corpus.spec)}
        path = checkpoint.save(self._checkpoints, tensors, meta, keep=self.config.checkpoint.keep)
        self._saved_at = self.optimizer.step_count
        self._last_save = (self.optimizer.step_count, self.optimizer.round)
        self._newest = path
        self.events.emit("checkpoint", step=self._saved_at, path=str(path))
        return path

    def _save_agreed(self) -> None:
        """Keep the last anchor in a checkpoint; local work that may be broken is no part of it."""
        tensors, meta = self.optimizer.snapshot()
        if self._last_save[1] >= self.optimizer.round or not all_finite(list(tensors.values())):
            return
        shared = {name: tensor for name, tensor in tensors.items() if not name.startswith("inner/")}
        self.optimizer.load_snapshot(shared, {**meta, "inner": {}})
        self._losses.clear()
        self._save_if_possible()

    def _finish(self) -> Outcome:
        """Bring the running window in, so that its work is not lost, and leave a checkpoint."""
        finished = self.optimizer.step_count >= self.config.steps
        left_behind = ""
        if self.optimizer.step_count or self._losses:
            self._check_losses()
            self.optimizer.finish()
            if self.optimizer.needs_state and finished:
                left_behind = self._catch_up()
        if self._losses:
            self._log()
        self._around.change_state("evaluating" if finished else "draining")
        evaluates = finished and not left_behind and (self._evaluates_alone or self._evaluates())
        score = self._score() if evaluates else None
        sample = self._sample() if evaluates else ""
        if self.optimizer.step_count and self._last_save != (self.optimizer.step_count, self.optimizer.round):
            self._save_if_possible()
        self._save_wanted()
        outcome = Outcome(
            step=self.optimizer.step_count,
            round=self.optimizer.round,
            digest=self.optimizer.digest(),
            tokens=self.tokens,
            finished=finished,
            left_behind=left_behind,
            rounds_closed=self._rounds_closed,
            score=score,
            sample=sample,
        )
        self._around.report(step=outcome.step, round=outcome.round)
        return outcome

    def _catch_up(self) -> str:
        """Fetch the others' last state; returns why that was not possible, as when they have left."""
        try:
            self.join()
        except SwarmError as error:
            return str(error)
        return ""

    def _sample(self) -> str:
        spec, settings = self.corpus.spec, self.config.sample
        if not settings.tokens or spec.kind != "tokens" or spec.classes != 256 or not hasattr(self.model, "generate"):
            return ""
        with at_anchor(self.model, self.optimizer):
            text = continue_text(self.model, settings, seed=self.config.seed, device=self.device)
        self.events.emit("sample", text=text, prompt=settings.prompt, step=self.optimizer.step_count)
        return text
