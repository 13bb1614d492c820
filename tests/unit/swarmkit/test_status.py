"""The status table shows every peer, and whether the anchors agree."""

import dataclasses
import json

import pytest
from rich.console import Console

from swarmkit import status
from swarmkit.peers.entry import Entry
from swarmkit.peers.roster import PeerRecord
from swarmkit.peers.shares import Range, Shares
from swarmkit.status import show_status, table

PEER = PeerRecord(
    peer_id="QmAbcdefgh12345678",
    state="training",
    updated_at=997.0,
    round=3,
    step=96,
    tokens_per_s=12345.6,
    loss=2.3456,
    bytes_sent=7_890_000,
    device="cpu",
    digest="d" * 32,
    lineage="",
)


def shown(*records: PeerRecord, now: float = 1000.0) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table("demo", records, now=now))
    return capture.get()


def test_a_row_holds_what_the_heartbeat_said() -> None:
    text = shown(PEER)
    for cell in ("345678", "replica", "training", "96", "3", "2.346", "12,346", "7.9", "cpu", "3 s", "dddddd"):
        assert cell in text
    assert "run demo: 1 peers, anchors equal" in text
    assert "..." not in text.replace("\u2026", "..."), "eighty columns are enough"


def test_an_observers_clock_that_is_behind_shows_no_negative_age() -> None:
    assert "0 s" in shown(PEER, now=0.0)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "anchors equal"),
        ({"digest": ""}, "anchors equal"),
        ({"digest": "e" * 32}, "anchors DIFFER"),
        ({"digest": "e" * 32, "round": 4}, "heartbeats of different rounds"),
    ],
)
def test_digests_are_compared_within_a_round(changes: dict[str, object], verdict: str) -> None:
    assert verdict in shown(PEER, dataclasses.replace(PEER, peer_id="QmOther", **changes))  # type: ignore[arg-type]


def test_who_is_in_the_minority_is_marked() -> None:
    peers = [dataclasses.replace(PEER, peer_id=f"QmPeer{i}", lineage="abcd", round=3 + i % 2) for i in range(3)]
    assert "ab/dddd" in shown(*peers)
    assert "!" not in shown(*peers)
    wrong = dataclasses.replace(peers[1], digest="e" * 32)
    rows = shown(peers[0], wrong, peers[2]).splitlines()
    assert "anchors DIFFER" in rows[0]
    assert [row for row in rows if "!" in row] == [row for row in rows if "ab!eeee" in row] != []
    # Of two that differ nobody knows which one is right.
    assert "!" not in shown(peers[0], wrong)


def test_no_anchor_yet() -> None:
    assert "no anchor yet" in shown(dataclasses.replace(PEER, digest=""))
    assert "0 peers" in shown()


def test_markup_in_a_strangers_heartbeat_stays_text() -> None:
    assert "[red]x" in shown(dataclasses.replace(PEER, device="[red]x", state="[/]"))


class FakeNode:
    """What show_status uses of a Node."""

    run = "demo"
    entry = Entry()

    def __init__(self) -> None:
        self.closed = False

    def shares(self) -> Shares:
        told = Shares()
        told.note("a", Range(0, 0, 100))
        told.note("b", Range(0, 90, 150))
        told.note("c", Range(1, 0, 7))
        told.note("d", Range(1, 10, 20))
        return told

    def refresh(self) -> list[PeerRecord]:
        return [PEER]

    def close(self) -> None:
        self.closed = True


def test_json_is_one_object_with_every_field(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = FakeNode()
    monkeypatch.setattr(status.Node, "start", lambda *args, **kwargs: node)
    show_status(["/ip4/127.0.0.1/tcp/1/p2p/Qm"], name=None, as_json=True)
    said = json.loads(capsys.readouterr().out)
    data = {"0": {"learnt": 150, "lost": 0, "doubled": 10}, "1": {"learnt": 17, "lost": 3, "doubled": 0}}
    assert said == {"run": "demo", "peers": [dataclasses.asdict(PEER)], "data": data}
    assert node.closed


def test_lost_and_doubled_samples_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(status.Node, "start", lambda *args, **kwargs: FakeNode())
    show_status(["/ip4/127.0.0.1/tcp/1/p2p/Qm"], name=None, as_json=False)
    assert "data: 167 samples learnt, 3 lost, 10 doubled, in 2 slots" in capsys.readouterr().out


def test_values_stand_under_their_titles() -> None:
    title, row = (shown(dataclasses.replace(PEER, device="cpu9"))).splitlines()[1:3]
    assert title.index("device") == row.index("cpu9")
