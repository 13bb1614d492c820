"""The end-of-run report: what the peers' events say, as Markdown with plots."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmkit.metrics import Event, read_events

REPORT = "report.md"


@dataclass(slots=True)
class PeerEvents:
    """The events of one peer, by kind."""

    name: str
    by_kind: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))

    def of(self, kind: str) -> list[Event]:
        """All events of a kind, in order."""
        return self.by_kind.get(kind, [])

    def last(self, kind: str) -> Event:
        """The last event of a kind; empty when there was none."""
        events = self.of(kind)
        return events[-1] if events else {}

    def total(self, kind: str, key: str) -> float:
        """Sum of a field over all events of a kind."""
        return sum(event.get(key) or 0 for event in self.of(kind))

    @property
    def good_rounds(self) -> list[Event]:
        """Rounds that gave a result."""
        return [event for event in self.of("round") if event.get("failed") is None]


def read_run(folder: Path) -> list[PeerEvents]:
    """Read every peer-*/events.jsonl below a run's folder, in the order of the peers' numbers."""
    peers = []
    for path in sorted(folder.glob("*/events.jsonl"), key=lambda path: (len(path.parent.name), path.parent.name)):
        peer = PeerEvents(path.parent.name)
        for event in read_events(path):
            peer.by_kind[event["kind"]].append(event)
        peers.append(peer)
    return peers


def write_report(folder: Path) -> Path:
    """Write `report.md`, and PNG plots when matplotlib is installed, into a run's folder; returns the report's path."""
    everybody = read_run(folder)
    peers = [peer for peer in everybody if peer.name.startswith("peer")]
    baseline = next((peer for peer in everybody if peer.name == "baseline"), None)
    lines = [f"# Run {folder.name}", ""]
    lines += _outcome(peers, baseline)
    lines += _peer_table(peers)
    lines += _failures(peers)
    lines += _plots(folder, peers, baseline)
    lines += _sample(peers)
    path = folder / REPORT
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def final_digests(peers: Sequence[PeerEvents]) -> dict[str, str]:
    """Each finished peer's anchor digest at the end."""
    return {peer.name: str(peer.last("done")["digest"]) for peer in peers if peer.last("done").get("digest")}


def bytes_per_token(peers: Sequence[PeerEvents]) -> tuple[float, float]:
    """Payload bytes that a peer sent per token it learnt from, and what averaging in every step would have sent.

    Every-step averaging of P parameter bytes among n peers sends 2 (n - 1) / n * P bytes per step; P is taken from the
    rounds themselves, which move the same number of bytes once.
    """
    sent = sum(peer.total("round", "bytes_sent") for peer in peers)
    tokens = sum(float(peer.last("train").get("tokens") or 0) for peer in peers)
    every_step = 0.0
    for peer in peers:
        if peer.good_rounds:
            full = max(len(event["members"]) for event in peer.good_rounds)
            complete = [event["bytes_sent"] for event in peer.good_rounds if len(event["members"]) == full]
            every_step += min(complete) * float(peer.last("round").get("step") or 0)
    if not tokens:
        return math.nan, math.nan
    return sent / tokens, every_step / tokens


def _outcome(peers: Sequence[PeerEvents], baseline: PeerEvents | None) -> list[str]:
    scores = [event for peer in peers for event in peer.of("eval")]
    best = max(scores, key=lambda event: event["step"]) if scores else {}
    digests = final_digests(peers)
    sent, every_step = bytes_per_token(peers)
    tokens = sum(int(peer.last("train").get("tokens") or 0) for peer in peers)
    rows = [
        ("validation, bits per byte", _number(best.get("bpb"))),
        ("validation loss, nats", _number(best.get("loss"))),
    ]
    if baseline is not None and baseline.last("eval"):
        rows.append(("one process, the same tokens, bits per byte", _number(baseline.last("eval").get("bpb"))))
    rows += [
        ("tokens learnt from, all peers", f"{tokens:,}"),
        ("peers that finished", f"{len(digests)} of {len(peers)}"),
        ("anchor digests", _agreement(digests)),
        ("bytes sent per token", _number(sent)),
        ("averaging in every step would send", f"{_number(every_step)} ({_number(every_step / sent)} times as much)")
        if sent
        else ("bytes sent per token", "0"),
    ]
    return ["| what | value |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows), ""]


def _agreement(digests: dict[str, str]) -> str:
    different = sorted(set(digests.values()))
    if not different:
        return "none reported"
    if len(different) == 1:
        return f"equal on {len(digests)} peers: `{different[0]}`"
    return "DIFFERENT: " + ", ".join(f"{name} `{digest[:12]}`" for name, digest in digests.items())


def _number(value: object, digits: int = 4) -> str:
    return f"{value:,.{digits}g}" if isinstance(value, int | float) and math.isfinite(value) else "-"


def _peer_table(peers: Sequence[PeerEvents]) -> list[str]:
    lines = [
        "## Peers",
        "",
        "| peer | steps | tokens/s | rounds | failed | MB sent | MB received | computing | communicating | waiting |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for peer in peers:
        train = peer.of("train")
        rates = sorted(event["tokens_per_s"] or 0.0 for event in train)
        shares = [peer.total("train", key) for key in ("compute_s", "communication_s", "waiting_s")]
        whole = sum(shares) or 1.0
        cells = [
            peer.name,
            str(peer.last("train").get("step", 0)),
            _number(rates[len(rates) // 2] if rates else None),
            str(len(peer.good_rounds)),
            str(len(peer.of("round")) - len(peer.good_rounds)),
            f"{peer.total('round', 'bytes_sent') / 1e6:.2f}",
            f"{peer.total('round', 'bytes_received') / 1e6:.2f}",
            *(f"{share / whole:.0%}" for share in shares),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _failures(peers: Sequence[PeerEvents]) -> list[str]:
    lines = []
    for peer in peers:
        for event in peer.of("round"):
            if event.get("failed") is not None:
                lines.append(f"- {peer.name}, round {event['round']}, step {event['step']}: {event['failed']}")
        lines += [
            f"- {peer.name}, step {event['step']}: no checkpoint, {event['failed']}"
            for event in peer.of("checkpoint")
            if event.get("failed") is not None
        ]
        lines += [f"- {peer.name}: lost a peer, {event.get('reason', '')}" for event in peer.of("peer_lost")]
    return ["## What went wrong", "", *lines[:50], ""] if lines else []


def _sample(peers: Sequence[PeerEvents]) -> list[str]:
    samples = [event for peer in peers for event in peer.of("sample") if event.get("text")]
    if not samples:
        return []
    # A fence longer than any in the text keeps the text from ending the block.
    text = str(samples[-1]["text"])
    fence = "`" * max(3, 1 + max((len(run) for run in text.split() if set(run) == {"`"}), default=0))
    return ["## A sample", "", fence, text, fence, ""]


# -- plots -------------------------------------------------------------------------------------------------------------


def _plots(folder: Path, peers: Sequence[PeerEvents], baseline: PeerEvents | None) -> list[str]:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError:
        return ["*No plots: install them with `pip install 'swarmkit-torch[plots]'`.*", ""]
    everybody = [*peers, *([baseline] if baseline is not None else [])]
    made: list[tuple[str, str]] = []
    for name, title, draw in (
        ("loss_tokens", "Training loss against tokens", _draw_loss_tokens),
        ("loss_time", "Training loss against time", _draw_loss_time),
        ("bytes", "Bytes sent against steps", _draw_bytes),
        ("rounds", "Where the time of each peer went", _draw_timeline),
    ):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        draw(axes, everybody if name.startswith("loss") else list(peers))
        axes.set_title(title)
        figure.savefig(folder / f"{name}.png", dpi=110)
        made.append((title, f"{name}.png"))
    return ["## Plots", "", *(f"![{title}]({file})" for title, file in made), ""]


def _series(peer: PeerEvents, x: str, y: str) -> Iterator[tuple[float, float]]:
    for event in peer.of("train"):
        if event.get(x) is not None and event.get(y) is not None:
            yield event[x], event[y]


def _draw_loss_tokens(axes: Any, peers: Sequence[PeerEvents]) -> None:  # noqa: ANN401 - matplotlib's Axes
    for peer in peers:
        points = list(_series(peer, "tokens", "loss"))
        axes.plot([x for x, _ in points], [y for _, y in points], label=peer.name)
    axes.set(xlabel="tokens that the peer learnt from", ylabel="nats per token")
    axes.legend()


def _draw_loss_time(axes: Any, peers: Sequence[PeerEvents]) -> None:  # noqa: ANN401
    for peer in peers:
        points = list(_series(peer, "time", "loss"))
        start = points[0][0] if points else 0.0
        axes.plot([x - start for x, _ in points], [y for _, y in points], label=peer.name)
    axes.set(xlabel="seconds since the peer's first step", ylabel="nats per token")
    axes.legend()


def _draw_bytes(axes: Any, peers: Sequence[PeerEvents]) -> None:  # noqa: ANN401
    for peer in peers:
        total, points = 0.0, []
        for event in peer.good_rounds:
            total += event["bytes_sent"]
            points.append((event["step"], total / 1e6))
        axes.step([x for x, _ in points], [y for _, y in points], where="post", label=peer.name)
    axes.set(xlabel="inner step", ylabel="MB sent")
    axes.legend()


def _draw_timeline(axes: Any, peers: Sequence[PeerEvents]) -> None:  # noqa: ANN401
    kinds = (("compute_s", "computing"), ("communication_s", "communicating"), ("waiting_s", "waiting"))
    colours = ("tab:green", "tab:blue", "tab:orange")
    starts = [event["time"] for peer in peers for event in peer.of("train")[:1]]
    origin = min(starts, default=0.0)
    for row, peer in enumerate(peers):
        for event in peer.of("train"):
            spent = [event.get(key) or 0.0 for key, _ in kinds]
            left = event["time"] - origin - sum(spent)
            for seconds, colour in zip(spent, colours, strict=True):
                axes.barh(row, seconds, left=left, color=colour, height=0.8)
                left += seconds
    axes.set(yticks=range(len(peers)), yticklabels=[peer.name for peer in peers], xlabel="seconds")
    for (_, label), colour in zip(kinds, colours, strict=True):
        axes.barh(0, 0, color=colour, label=label)
    axes.legend(loc="upper right")
