"""What a local run says at its end: losses, agreement, traffic, a sample."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swarmkit.config import Config, has_images
from swarmkit.events import every_step_bytes
from swarmkit.processes import Child
from swarmkit.progress import Row, megabytes


@dataclass(slots=True, kw_only=True)
class Member:
    """A child of a local run, and what it has told."""

    child: Child
    row: Row
    slot: int = 0
    restarts: int = 0
    parameters: int = 0
    first_tokens: int = 0  # learnt before this process began, by whom it was resumed from
    tokens_per_step: int = 0
    done: Mapping[str, Any] | None = None
    score: Mapping[str, Any] | None = None  # its last evaluation
    sample: str = ""
    events: dict[str, int] = field(default_factory=dict)  # how many of each kind

    @property
    def name(self) -> str:
        """As in the run's folder."""
        return self.child.name

    @property
    def finished(self) -> bool:
        """True when it trained to the last step and ended in order."""
        return self.done is not None and bool(self.done["finished"]) and self.child.code == 0

    def note(self, event: Mapping[str, Any]) -> None:
        """Keep what the summary needs."""
        kind = event["kind"]
        self.events[kind] = self.events.get(kind, 0) + 1
        if kind == "run_start":
            self.parameters = int(event["parameters"])
            self.first_tokens, self.tokens_per_step = int(event["tokens"]), int(event["tokens_per_step"])
        elif kind == "done":
            self.done = event
        elif kind == "eval":
            self.score = event
        elif kind == "sample":
            self.sample = str(event["text"])


def summarise(config: Config, members: list[Member], baseline: Member | None) -> tuple[list[str], bool]:
    """Lines for the user, and whether at least one peer finished and all that did agree."""
    finished = [member for member in members if member.finished]
    digests = {str(member.done["digest"]) for member in finished if member.done is not None}
    lines = [""]
    met = max((int(member.done["rounds_closed"]) for member in finished if member.done is not None), default=0)
    if not finished:
        lines.append("no peer finished")
    elif not met:
        lines.append(
            "digests     NO ROUND GAVE A RESULT: every peer trained alone, the shared parameters are untrained"
        )
    elif len(digests) == 1:
        lines.append(
            f"digests     {len(finished)} of {config.peers} peers finished and hold the same parameters, "
            f"{next(iter(digests))}"
        )
    else:
        lines.append("digests     THE PEERS THAT FINISHED DIFFER:")
        lines += [f"    {member.name}: {member.done['digest']}" for member in finished if member.done is not None]
    lines += _losses(config, members, baseline)
    lines += _traffic(config, members)
    sample = next((member.sample for member in members if member.sample), "")
    if sample:
        lines += ["sample", *(f"    {line}" for line in sample.splitlines())]
    return lines, len(finished) > 0 and len(digests) == 1 and met > 0


def _losses(config: Config, members: list[Member], baseline: Member | None) -> list[str]:
    scores = [member.score for member in members if member.score is not None]
    if not scores:
        return []
    best = max(scores, key=lambda score: int(score["step"]))
    lines = [f"validation  {_score(config, best)} at step {best['step']}"]
    if baseline is not None and baseline.finished and baseline.score is not None and baseline.done is not None:
        lines.append(
            f"baseline    {_score(config, baseline.score)}: one process, the same "
            f"{int(baseline.done['tokens']):,} {'images' if has_images(config.data) else 'tokens'}; "
            f"the swarm's loss is {100 * (float(best['loss']) / float(baseline.score['loss']) - 1):+.1f} % of that"
        )
    return lines


def _score(config: Config, score: Mapping[str, Any]) -> str:
    if has_images(config.data):
        return f"{float(score['loss']):.4f} nats, accuracy {float(score['accuracy']):.1%}"
    return f"{float(score['bpb']):.4f} bits per byte ({float(score['loss']):.4f} nats)"


def _traffic(config: Config, members: list[Member]) -> list[str]:
    """Bytes per token, beside what averaging gradients in every step would have sent for the same tokens."""
    learnt = [(member, member.row.tokens - member.first_tokens) for member in members if member.tokens_per_step]
    tokens = sum(count for _, count in learnt)
    sent = sum(member.row.bytes_sent for member in members)
    parameters = max((member.parameters for member in members), default=0)
    if tokens <= 0 or not parameters or config.peers < 2:
        return []
    steps = sum(count / member.tokens_per_step for member, count in learnt)
    every_step = every_step_bytes(steps, config.peers, parameters)
    ratio = f", {every_step / sent:.1f} times as much" if sent else ""
    return [
        f"traffic     {sent / tokens:.2f} bytes sent per token ({megabytes(sent)} in all); "
        f"averaging in every step would send {every_step / tokens:.2f}{ratio}"
    ]
