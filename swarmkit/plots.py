"""The report's plots: loss against tokens and time, bytes per token, and where each peer's time went."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmkit.events import PeerEvents, bytes_per_token, bytes_per_token_so_far

HOW_TO_INSTALL = "pip install 'swarmkit-torch[plots]'"
# The parts of a train event's time, in the order in which they are drawn.
_TIMES = (
    ("compute_s", "computing", "tab:green"),
    ("communication_s", "communicating", "tab:blue"),
    ("waiting_s", "waiting", "tab:orange"),
)


def draw_plots(folder: Path, peers: Sequence[PeerEvents], baseline: PeerEvents | None) -> list[tuple[str, str]] | None:
    """Write PNG files into a run's folder and return their titles and names; None without matplotlib."""
    try:
        import matplotlib  # noqa: F401 - the name that is missing without the extra
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    plots: list[tuple[str, str, Callable[[Any], None]]] = [
        ("loss_tokens", "Loss against tokens", lambda axes: _draw_loss(axes, peers, baseline, "tokens")),
        ("loss_time", "Loss against time", lambda axes: _draw_loss(axes, peers, baseline, "seconds")),
        ("bytes", "Bytes sent per token", lambda axes: _draw_bytes(axes, peers)),
        ("rounds", "Where the time of each peer went", lambda axes: _draw_timeline(axes, peers)),
    ]
    made = []
    for name, title, draw in plots:
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_title(title)
        # With a canvas of its own no global backend is touched.
        FigureCanvasAgg(figure).print_png(folder / f"{name}.png")
        made.append((title, f"{name}.png"))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where a swarm stood at an inner step."""

    tokens: float  # that all peers together had learnt from
    seconds: float  # since the first report of any
    loss: float


def swarm_curve(peers: Sequence[PeerEvents], kind: str = "train") -> list[Point]:
    """The peers' mean loss at each step that any of them reported."""
    trains = {peer.name: [e for e in peer.of("train") if e.get("tokens") is not None] for peer in peers}
    origin = min((events[0]["time"] for events in trains.values() if events), default=0.0)
    reports: dict[int, list[tuple[float, float]]] = {}
    for peer in peers:
        for event in peer.of(kind):
            if event.get("loss") is not None and event.get("step") is not None:
                reports.setdefault(event["step"], []).append((event["time"] - origin, event["loss"]))
    points = []
    for step, found in sorted(reports.items()):
        tokens = sum(_tokens_at(events, step) for events in trains.values())
        seconds = sum(when for when, _ in found) / len(found)
        points.append(Point(tokens=tokens, seconds=seconds, loss=sum(loss for _, loss in found) / len(found)))
    return points


def _tokens_at(events: Sequence[dict[str, Any]], step: int) -> float:
    before = [event["tokens"] for event in events if event["step"] <= step]
    return float(before[-1]) if before else 0.0


def _draw_loss(axes: Any, peers: Sequence[PeerEvents], baseline: PeerEvents | None, x: str) -> None:  # noqa: ANN401
    groups = [("swarm", list(peers), "tab:blue")]
    if baseline is not None:
        groups.append(("one process", [baseline], "tab:gray"))
    for label, members, colour in groups:
        curve, scores = swarm_curve(members), swarm_curve(members, "eval")
        axes.plot(*_columns(curve, x), color=colour, label=f"{label}, training")
        axes.plot(*_columns(scores, x), "o", color=colour, label=f"{label}, validation")
    names = {"tokens": "tokens learnt from, all peers together", "seconds": "seconds since the first step"}
    axes.set(xlabel=names[x], ylabel="nats per prediction")
    axes.legend()


def _columns(points: Sequence[Point], x: str) -> tuple[list[float], list[float]]:
    return [getattr(point, x) for point in points], [point.loss for point in points]


def _draw_bytes(axes: Any, peers: Sequence[PeerEvents]) -> None:  # noqa: ANN401
    points = list(bytes_per_token_so_far(peers))
    axes.plot([tokens for tokens, _ in points], [sent for _, sent in points], ".-", label="this run")
    _, every_step = bytes_per_token(peers)
    if points and every_step > 0:
        axes.axhline(every_step, color="tab:gray", linestyle="--", label="averaging in every step")
        axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set(xlabel="tokens learnt from, all peers together", ylabel="bytes sent per token")
    axes.legend()


def _draw_timeline(axes: Any, peers: Sequence[PeerEvents]) -> None:  # noqa: ANN401
    origin = min((event["time"] for peer in peers for event in peer.of("train")[:1]), default=0.0)
    for row, peer in enumerate(peers):
        for left, seconds, colour in _spans(peer, origin):
            axes.barh(row, seconds, left=left, color=colour, height=0.8)
    for _, label, colour in _TIMES:
        axes.barh(0, 0, color=colour, label=label)
    axes.set(yticks=range(len(peers)), yticklabels=[peer.name for peer in peers], xlabel="seconds")
    axes.figure.legend(loc="outside lower center", ncols=len(_TIMES))


def _spans(peer: PeerEvents, origin: float) -> Iterator[tuple[float, float, str]]:
    """Begin, length and colour of each bar: a train event tells the time up to it."""
    for event in peer.of("train"):
        spent = [event.get(key) or 0.0 for key, _, _ in _TIMES]
        left = event["time"] - origin - sum(spent)
        for seconds, (_, _, colour) in zip(spent, _TIMES, strict=True):
            yield left, seconds, colour
            left += seconds
