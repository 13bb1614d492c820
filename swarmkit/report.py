"""The end-of-run report: what the peers' events say, as Markdown with plots."""

import math
from collections.abc import Sequence
from pathlib import Path

from swarmkit.events import PeerEvents, bytes_per_token, final_digests, read_run
from swarmkit.plots import HOW_TO_INSTALL, draw_plots
from swarmkit.shares import read_data

REPORT = "report.md"


def write_report(folder: Path, *, plots: bool = True) -> Path:
    """Write `report.md`, and PNG plots when matplotlib is installed, into a run's folder; returns the report's path."""
    everybody = read_run(folder)
    peers = [peer for peer in everybody if peer.name.startswith("peer")]
    baseline = next((peer for peer in everybody if peer.name == "baseline"), None)
    lines = [f"# Run {folder.name}", ""]
    lines += _outcome(peers, baseline)
    lines += _peer_table(peers)
    lines += _data(peers)
    lines += _allocation(peers)
    lines += _failures(peers)
    lines += _plots(folder, peers, baseline) if plots else []
    lines += _sample(peers)
    if (folder / "config.yaml").exists():
        lines += ["All settings are in [config.yaml](config.yaml).", ""]
    path = folder / REPORT
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


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
    ]
    if sent:
        more = f"{_number(every_step)} ({_number(every_step / sent)} times as much)"
        rows.append(("averaging in every step would send", more))
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


def _data(peers: Sequence[PeerEvents]) -> list[str]:
    """What became of the samples, slot by slot."""
    record = read_data(peers)
    if not record.slots and not record.extra:
        return []
    total = record.total
    told = f"{total.learnt:,} samples learnt, {total.lost:,} lost, {total.doubled:,} doubled"
    if record.extra:
        told += f"; {record.extra:,} more by peers beyond the {max(record.slots, default=0) + 1} that were planned"
    if record.redrawn:
        told += f"; {record.redrawn:,} drawn in vain and drawn again"
    lines = ["## Data", "", f"{told}.", "", "| slot | held by | learnt | lost | doubled |", "|---|---|---|---|---|"]
    for slot, found in record.slots.items():
        held = ", ".join(f"`{peer_id[-8:]}`" for peer_id in record.claims[slot])
        lines.append(f"| {slot} | {held} | {found.learnt:,} | {found.lost:,} | {found.doubled:,} |")
    return [*lines, ""]


def _allocation(peers: Sequence[PeerEvents]) -> list[str]:
    """What L-GreCo chose last, the largest payloads first."""
    told = [event for peer in peers for event in peer.of("allocation")]
    if not told:
        return []
    last = max(told, key=lambda event: event["step"])
    lines = [f"## What each tensor is sent with, from step {last['step']} on", ""]
    lines += ["| tensor | size | chosen parameter | bytes | error share |", "|---|---|---|---|---|"]
    for row in sorted(last["rows"], key=lambda row: -row["bytes"]):
        numbers = f"{row['size']:,} | {row['parameter']:g} | {row['bytes']:,} | {row['error_share']:.1%}"
        lines.append(f"| {row['tensor']} | {numbers} |")
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


def _plots(folder: Path, peers: Sequence[PeerEvents], baseline: PeerEvents | None) -> list[str]:
    made = draw_plots(folder, peers, baseline)
    if made is None:
        return [f"*No plots: install them with `{HOW_TO_INSTALL}`.*", ""]
    return ["## Plots", "", *(f"![{title}]({file})" for title, file in made), ""]
