"""Remembers on disk which peers of a run were seen, so that a run outlives the addresses that anybody was told."""

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmkit.peers.preflight import check_address, split_peer_id
from swarmkit.peers.roster import PeerRecord

MAX_PEERS = 64  # addresses of a run
MAX_KNOWN = 256  # peer ids by which a run is recognised
MAX_RUNS = 64
MAX_FILE_BYTES = 64 << 10
EXPIRE_S = 7 * 24 * 3600.0


@dataclass(slots=True, kw_only=True)
class Remembered:
    """What is known of a run from before."""

    run: str | None = None
    addresses: list[str] = field(default_factory=list)  # seen last first


@dataclass(slots=True)
class _Run:
    """The content of one file."""

    name: str
    seen: dict[str, float] = field(default_factory=dict)  # address -> wall-clock time at which its peer last beat
    known: list[str] = field(default_factory=list)  # peer ids that were of the run, those that were given included


def default_folder() -> Path:
    """The user's cache folder for it: $XDG_CACHE_HOME/swarmkit/peers, ~/.cache without."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "swarmkit" / "peers"


class PeerCache:
    """One small JSON file for each run.

    A name does not tell two runs apart: what is remembered counts only for a run in which one of the remembered peer
    ids is seen again, or is the one that the user gave.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock

    def recall(self, run: str | None, given: Sequence[str]) -> Remembered:
        """The run (of that name, if one is wanted) that the `given` addresses were of, and where else it was."""
        ids = {split_peer_id(address)[1] for address in given}
        for path in self._files():
            found = self._read(path)
            if found is not None and run in (None, found.name) and ids & set(found.known):
                newest = sorted(found.seen, key=lambda address: -found.seen[address])
                return Remembered(run=found.name, addresses=newest)
        return Remembered()

    def note(self, run: str, given: Sequence[str], records: Iterable[PeerRecord]) -> None:
        """Keep where the peers of a run are; raises OSError when the folder cannot be written."""
        now = self._clock()
        seen = {record.address: now for record in records if _is_of(record)}
        ids = [split_peer_id(address)[1] for address in (*given, *seen)]
        path = self._path(run)
        before = self._read(path)
        if before is not None and (not ids or set(ids) & set(before.known)):
            seen, ids = before.seen | seen, [*before.known, *ids]
        newest = sorted(seen, key=lambda address: -seen[address])[:MAX_PEERS]
        unique = list(dict.fromkeys(reversed(ids)))[:MAX_KNOWN]
        content = {"run": run, "seen": {address: seen[address] for address in newest}, "known": unique[::-1]}
        self._write(path, json.dumps(content))

    def _path(self, run: str) -> Path:
        readable = re.sub(r"[^\w-]", "_", run, flags=re.ASCII)[:40]
        return self._folder / f"{readable}-{hashlib.blake2b(run.encode(), digest_size=4).hexdigest()}.json"

    def _files(self) -> list[Path]:
        """The newest first."""
        times: list[tuple[float, Path]] = []
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it since
                times.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(times, reverse=True)]

    def _read(self, path: Path) -> _Run | None:
        """What a file holds, without what has expired; a damaged one holds nothing and is replaced by the next note."""
        try:
            with path.open("rb") as file:
                return _parse(json.loads(file.read(MAX_FILE_BYTES)), now=self._clock())
        except (OSError, ValueError):
            return None

    def _write(self, path: Path, text: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # mkstemp's files are their owner's alone; the rename makes readers see the old or the new one, whole.
        handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self._folder)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        for old in self._files()[MAX_RUNS:]:
            old.unlink(missing_ok=True)


def _is_of(record: PeerRecord) -> bool:
    """True for an address that can be dialled and is the peer's own: it comes from a stranger."""
    try:
        check_address(record.address)
    except ValueError:
        return False
    return split_peer_id(record.address)[1] == record.peer_id and len(record.address) <= 300


def _parse(content: Any, now: float) -> _Run:  # noqa: ANN401 - any JSON
    """Raises ValueError for what no `note` has written."""
    try:
        name, seen, known = content["run"], dict(content["seen"]), list(content["known"])
    except (TypeError, KeyError) as error:
        raise ValueError("not a peer cache") from error
    if not isinstance(name, str) or not all(isinstance(one, str) for one in known):
        raise ValueError("not a peer cache")
    fresh = {}
    for address, when in seen.items():
        check_address(address)
        # A clock that was ahead must not keep an address for ever.
        if isinstance(when, int | float) and now - EXPIRE_S < when <= now + EXPIRE_S:
            fresh[address] = min(float(when), now)
    return _Run(name, fresh, known)
