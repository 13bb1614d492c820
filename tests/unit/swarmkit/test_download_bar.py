"""What a joiner sees of its download."""

import io

from swarmkit.download_bar import DownloadBar
from swarmkit.peers.transfer import Transfer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at(done: int, **changes: object) -> Transfer:
    values = {"total": 200_000_000, "rate": 2.5e6, "eta_s": 40.0, "donors": ("a", "b"), **changes}
    return Transfer(done=done, **values)  # type: ignore[arg-type]


def test_elsewhere_than_on_a_terminal_it_is_a_line_now_and_then() -> None:
    said: list[str] = []
    now = [0.0]
    bar = DownloadBar(said.append, file=io.StringIO(), clock=lambda: now[0])
    for done in range(0, 200_000_001, 1_000_000):
        bar.show(at(done))
        now[0] += 0.25
    bar.close()
    assert len(said) == 26
    assert said[12] == "downloading the state: 48 % of 200.0 MB at 2.5 MB/s from 2 donors, 40 s to go"
    assert said[-1].startswith("downloading the state: 100 %")


def test_what_happens_on_the_way_is_said_at_once() -> None:
    said: list[str] = []
    bar = DownloadBar(said.append, file=io.StringIO(), clock=lambda: 0.0)
    bar.show(at(1))
    bar.show(at(2, note="lost a donor: a"))
    assert said[1:] == ["lost a donor: a"]


def test_before_there_is_a_size_it_shows_nothing() -> None:
    said: list[str] = []
    DownloadBar(said.append, file=io.StringIO()).show(at(0, total=0))
    assert said == []


def test_on_a_terminal_it_is_a_bar(monkeypatch: object) -> None:
    terminal, said = Terminal(), list[str]()
    bar = DownloadBar(said.append, file=terminal, clock=iter(range(100)).__next__)
    bar.show(at(50_000_000))
    bar.show(at(100_000_000))
    bar.close()
    text = terminal.getvalue()
    assert "100.0/200.0 MB" in text
    assert "2.5 MB/s from 2" in text
    assert said == []
