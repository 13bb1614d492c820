"""Node: one peer's place in a run, from finding the others to leaving them."""

import asyncio
import contextlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from swarmkit.peers.attach import attach
from swarmkit.peers.checkup import Checkup
from swarmkit.peers.collective import SwarmCollective
from swarmkit.peers.coordinator import Coordinator
from swarmkit.peers.daemon_checks import check_daemon
from swarmkit.peers.directory import LIFETIME_S, announce_run, find_run
from swarmkit.peers.donors import rank_donors
from swarmkit.peers.download import Download
from swarmkit.peers.engine import get_dht_time, start_dht, start_p2p, stop_p2p
from swarmkit.peers.entry import Entry, enter, refuse_twin
from swarmkit.peers.errors import DaemonFailed, JoinFailed, PeerUnreachable, ProtocolError
from swarmkit.peers.fetch import Fetch
from swarmkit.peers.hygiene import make_socket_folder
from swarmkit.peers.loop import NetworkThread
from swarmkit.peers.manifest import Snapshot
from swarmkit.peers.pace import SwarmPace
from swarmkit.peers.peer_cache import PeerCache, Remembered
from swarmkit.peers.preflight import check_address
from swarmkit.peers.roster import PeerRecord, Roster
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.state import Provider, StateServer, Version
from swarmkit.peers.transfer import Progress
from swarmkit.peers.transport import Bulk
from swarmkit.peers.wire import Message, field

if TYPE_CHECKING:
    from swarmkit.optim.synced import SyncedOptimizer

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
CONFIG_LIFETIME_S = 3600.0
MAX_CONFIG_BYTES = 256 << 10
REMEMBER_S = 5.0  # between two looks at who is there, for the peer cache
_BEAT_FIELDS = frozenset(f.name for f in fields(PeerRecord)) - {"peer_id", "joined_at", "updated_at"}


class Node:
    """A peer in a run: DHT, control calls, bulk streams, roster, rounds and state transfer.

    Everything of the network runs in one background thread of this process, plus hivemind's p2pd as a child that dies
    with it. All methods are called from other threads and return when done, bounded in time.
    """

    def __init__(self, run: str | None, settings: NetworkSettings, role: str) -> None:
        self._wanted_run = run
        self.settings = settings
        self._role = role
        self._thread = NetworkThread()
        self._owns_sockets = settings.socket_folder is None
        self._sockets = _make_sockets() if settings.socket_folder is None else Path(settings.socket_folder)
        self._cache = PeerCache(Path(settings.peer_cache)) if settings.peer_cache is not None else None
        self._config: str | None = None
        self._collectives: list[SwarmCollective] = []
        self._closed = threading.Lock()
        self._download = Download()  # what a fetch that failed has left for the next

    @classmethod
    def start(
        cls,
        run: str | None = None,
        *,
        initial_peers: Sequence[str] = (),
        settings: NetworkSettings | None = None,
        role: str = "replica",
        existing: bool = False,
    ) -> "Node":
        """Start a peer and find the others; raises the JoinFailed of the cause, and leaves nothing behind then.

        One of `initial_peers` that answers is enough; `entry` says which did. When none does, peers that were seen in
        the run before (`settings.peer_cache`) are tried. Without a `run` it joins the only one that is known there; one
        that has to be `existing` is looked for there. Roles: "replica" takes part in rounds, "bootstrap" keeps the DHT
        up, "observer" looks on and appears in no table.
        """
        if run is None and not initial_peers:
            raise ValueError("a run's name or the address of a peer is needed")
        if run is not None and (not run or "." in run or len(run) > 100):
            raise ValueError(f"run name {run!r}: must have 1 to 100 characters and no dot (hivemind's key separator)")
        for address in initial_peers:
            check_address(address)
        node = cls(run, settings or NetworkSettings(), role)
        try:
            node._thread.run(node._start(initial_peers, existing), timeout=node.settings.startup_timeout_s + 15)
        except TimeoutError as error:
            node.close()
            raise JoinFailed(f"the node did not start within {node.settings.startup_timeout_s} s") from error
        except BaseException:
            node.close()
            raise
        return node

    async def _start(self, initial_peers: Sequence[str], existing: bool) -> None:
        check_daemon(self.settings, self._sockets)
        recalled = self._cache.recall(self._wanted_run, initial_peers) if self._cache is not None else Remembered()
        await refuse_twin(self.settings, self._sockets, initial_peers)
        self._p2p = await start_p2p(self.settings, self._sockets)
        self.peer_id: str = self._p2p.peer_id.to_base58()
        self.entry: Entry = await enter(self._p2p, initial_peers, recalled)
        self._dht = await start_dht(self._p2p, self.entry.live)
        if self._wanted_run is None or existing or (initial_peers and self._role == "observer"):
            self.run = await find_run(self._dht, self._wanted_run or self.entry.run)
        else:
            self.run = self._wanted_run
        self._rpc = Rpc(self._p2p, self.run)
        self._bulk = Bulk(self._p2p, self._rpc, self.run, self.settings)
        mine = PeerRecord(peer_id=self.peer_id, role=self._role, joined_at=get_dht_time())
        self._roster = Roster(self._dht, self._rpc, self.run, self.settings, mine)
        self._bulk.is_alive, self._bulk.heard_from = self._roster.is_alive, self._roster.heard_from
        self._coordinator = Coordinator(self._roster, self._rpc, self.settings)
        self._state = StateServer(self._rpc, self._bulk, self.settings)
        self._pace = SwarmPace(self._thread, self._rpc, self._roster, self.settings)
        self._rpc.handle("config", self._on_config)
        self._checkup = Checkup(self._rpc, self._p2p)
        await self._rpc.serve()
        await self._bulk.serve()
        self.addresses = _routable_first([str(address) for address in await self._p2p.get_visible_maddrs(latest=True)])
        await self._roster.refresh()
        newest = max(
            (record.joined_at for record in self._roster.table() if record.peer_id != self.peer_id), default=0.0
        )
        # Whoever comes later comes later in the order too, even with a clock that is behind.
        joined_at = max(get_dht_time(), newest + 1e-3)
        self._roster.mine = replace(self._roster.mine, joined_at=joined_at, address=self.addresses[0])
        if self._role != "observer":
            await self._roster.beat()
        self._tasks = [asyncio.ensure_future(self._roster.run()), asyncio.ensure_future(self._watch_p2pd())]
        if self._cache is not None:
            self._tasks.append(asyncio.ensure_future(self._remember(self._cache, initial_peers)))
        if self._role == "replica":
            await announce_run(self._dht, self.run)
            self._tasks.append(asyncio.ensure_future(self._pace.run()))
            self._tasks.append(asyncio.ensure_future(self._keep_records()))

    async def _watch_p2pd(self) -> None:
        """End rounds when p2pd dies: without it this peer would take all others for dead and go on alone."""
        child = self._p2p._child
        if child is not None:
            await child.wait()
            logger.error("p2pd ended with code %s: this peer is cut off", child.returncode)
            for collective in self._collectives:
                collective.close("p2pd died, so this peer cannot reach anybody; restart it")

    async def _keep_records(self) -> None:
        """Renew what expires on the DHT: the run's announcement and its configuration."""
        while True:
            await asyncio.sleep(LIFETIME_S / 3)
            try:
                await announce_run(self._dht, self.run)
                if self._config is not None:
                    await self._store_config()
            except Exception:
                logger.warning("the run's records could not be renewed", exc_info=True)

    async def _remember(self, cache: PeerCache, given: Sequence[str]) -> None:
        """Keep on disk where peers are; a cache that cannot be written is no reason to stop."""
        while True:
            try:
                await asyncio.to_thread(cache.note, self.run, given, self._roster.table())
            except OSError as error:
                logger.warning("peers cannot be remembered for a later start: %s", error)
                return
            await asyncio.sleep(max(REMEMBER_S, self.settings.heartbeat_s))

    # -- the peer table ------------------------------------------------------------------------------------------------

    def heartbeat(self, **values: object) -> None:
        """Change what the next heartbeat says; unknown fields raise TypeError."""
        unknown = set(values) - _BEAT_FIELDS
        if unknown:
            raise TypeError(f"unknown heartbeat fields {sorted(unknown)}; known: {sorted(_BEAT_FIELDS)}")
        self._thread.loop.call_soon_threadsafe(self._set_record, values)

    def _set_record(self, values: dict[str, object]) -> None:
        self._roster.mine = replace(self._roster.mine, **values)  # type: ignore[arg-type]

    def announce(self, state: str) -> None:
        """Change this peer's state and tell the others at once."""
        self._thread.run(self._announce(state), timeout=10)

    async def _announce(self, state: str) -> None:
        await self._roster.announce(state)
        if not self._roster.mine.may_coordinate:
            self._coordinator.hand_over()

    def table(self) -> list[PeerRecord]:
        """Every known peer in join order, this one included."""
        return self._roster.table()

    def refresh(self) -> list[PeerRecord]:
        """Read the DHT now and return the table."""
        self._ask(self._roster.refresh(), self.settings.startup_timeout_s, "the peer table could not be read")
        return self.table()

    def _ask(self, work: Coroutine[None, None, Answer], timeout: float, failed: str) -> Answer:
        try:
            return self._thread.run(work, timeout=timeout)
        except TimeoutError as error:
            raise JoinFailed(f"{failed}: the DHT did not answer within {timeout:.0f} s") from error

    def wait_for_peers(self, count: int, *, timeout: float) -> bool:
        """Wait until `count` active replicas are known, this one included; False when the time is up."""
        return self._thread.run(self._wait_for_peers(count, timeout), timeout=timeout + 10)

    async def _wait_for_peers(self, count: int, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while len(self._roster.active()) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._roster.changed.clear()
            await self._roster.refresh()
            if len(self._roster.active()) >= count:
                return True
            try:
                await asyncio.wait_for(self._roster.changed.wait(), min(left, self.settings.heartbeat_s / 4))
            except TimeoutError:
                continue
        return True

    # -- rounds --------------------------------------------------------------------------------------------------------

    def collective(self, *, round_timeout: float | None = None, joining: bool = False) -> SwarmCollective:
        """Take part in rounds; one collective serves a process.

        From here on the others wait for this peer, unless it is `joining`: then call `announce("training")` when it
        holds the swarm's state.
        """
        if not joining:
            self.announce("training")
        collective = SwarmCollective(
            self._thread, self._rpc, self._bulk, self._roster, self._coordinator, self.settings, round_timeout
        )
        self._collectives.append(collective)
        return collective

    @property
    def pace(self) -> SwarmPace:
        """Give it to a strategy, on all peers of the run, and windows are filled by all together; see optim.Pace."""
        return self._pace

    def attach(self, optimizer: "SyncedOptimizer") -> None:
        """Keep an optimizer of your own loop with the run; call it once, before the first step.

        It takes over the state of peers that train already, whatever the parameters here were, and serves it to later
        ones. When the others close a round without this peer, the step that finds out fetches their state. Raises
        JoinFailed when that fails too often.
        """
        attach(self, optimizer)

    # -- the run's configuration ---------------------------------------------------------------------------------------

    def publish_config(self, config: str) -> None:
        """Offer the run's configuration (JSON text) to joiners, on the DHT and by direct call."""
        if len(config.encode()) > MAX_CONFIG_BYTES:
            raise ValueError(f"configuration of {len(config)} characters: the limit is {MAX_CONFIG_BYTES} bytes")
        json.loads(config)
        self._config = config
        self._ask(self._store_config(), 30.0, "the configuration could not be published")

    async def _store_config(self) -> None:
        expires = get_dht_time() + CONFIG_LIFETIME_S
        await self._dht.store(f"{self.run}.config", self._config, expires)

    def fetch_config(self) -> str:
        """Get the run's configuration; raises JoinFailed when nobody offers one.

        From then on this peer offers it too: it must outlive whoever published it.
        """
        self._config = self._ask(self._fetch_config(), 60.0, "the run's configuration could not be read")
        return self._config

    async def _fetch_config(self) -> str:
        found = await self._dht.get(f"{self.run}.config", latest=True)
        if found is not None and isinstance(found.value, str) and len(found.value) <= MAX_CONFIG_BYTES:
            return found.value
        for peer in self._roster.active():
            if peer == self.peer_id:
                continue
            try:
                answer = await self._rpc.call(peer, "config", {}, timeout=10)
                return field(answer, "config", str, lambda text: len(text) <= MAX_CONFIG_BYTES)
            except (PeerUnreachable, ProtocolError):
                continue
        raise JoinFailed(f"nobody offers a configuration for run {self.run!r}: is the name right and the run up?")

    async def _on_config(self, caller: str, message: Message) -> Message:
        if self._config is None:
            raise ProtocolError("this peer has no configuration to offer")
        return {"config": self._config}

    # -- state transfer ------------------------------------------------------------------------------------------------

    def serve_state(self, provider: Provider, version: Version | None = None) -> None:
        """Serve snapshots to joiners; `provider` is called in a worker thread.

        `version` names what it would return at no cost: while that stays the same, joiners share one snapshot.
        """
        self._thread.loop.call_soon_threadsafe(self._state.serve, provider, version)

    def fetch_state(self, progress: Progress | None = None, *, timeout: float | None = None) -> Snapshot:
        """Have the swarm's rounds wait for this peer, and download the state; raises JoinFailed.

        It comes from several donors if there are, and goes on at the missing pieces when one dies; what a call that
        failed has left is used by the next one. There is no time limit unless `timeout` sets one: it ends when no donor
        sends anything any more. Call `observe_round` of the strategy next: the rounds wait for that, at most for the
        round's timeout.
        """
        fetching = self._thread.submit(self._fetch_state(progress))
        try:
            return fetching.result(timeout)
        except TimeoutError as error:
            fetching.cancel()
            raise JoinFailed(f"the state did not arrive within {timeout} s") from error

    async def _fetch_state(self, progress: Progress | None) -> Snapshot:
        await self._roster.refresh()
        await self._hold()
        await Fetch(self._rpc, self._bulk, self.settings, self._donors, self._download, progress).run()
        done, self._download = self._download, Download()
        return done.snapshot()

    def _donors(self) -> list[str]:
        active = set(self._roster.active())
        return rank_donors([record for record in self._roster.table() if record.peer_id in active], self.peer_id)

    async def _hold(self) -> None:
        target = next((peer for peer in self._roster.active() if peer != self.peer_id), None)
        for _ in range(5):
            if target is None:
                return
            try:
                answer = await self._rpc.call(target, "hold", {}, timeout=10)
            except (PeerUnreachable, ProtocolError):
                self._roster.suspect(target)
                target = next((peer for peer in self._roster.active() if peer != self.peer_id), None)
                continue
            if answer.get("outcome") == "held":
                return
            target = field(answer, "to", str)

    # -- traffic and leaving -------------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Bulk payload bytes sent since the start."""
        return self._bulk.total.sent

    @property
    def bytes_received(self) -> int:
        """Bulk payload bytes received since the start."""
        return self._bulk.total.received

    def close(self, *, state: str = "gone") -> None:
        """Tell the others, stop everything, remove sockets; safe to call twice."""
        if not self._closed.acquire(blocking=False):
            return
        for collective in self._collectives:
            collective.close()
        try:
            self._thread.run(self._stop(state), timeout=15)
        except TimeoutError:
            pass  # the loop is stopped below and p2pd killed with it
        finally:
            self._thread.close()
            if self._owns_sockets:
                shutil.rmtree(self._sockets, ignore_errors=True)

    async def _stop(self, state: str) -> None:
        if hasattr(self, "_tasks"):
            for task in self._tasks:
                task.cancel()
            child = self._p2p._child
            if child is None or child.returncode is None:
                await _at_most(self._roster.announce(state), seconds=5)
            await self._coordinator.close()
        if hasattr(self, "_bulk"):
            await self._bulk.close()
        if hasattr(self, "_dht"):
            await _at_most(self._dht.shutdown(), seconds=3)
        if hasattr(self, "_p2p"):
            await stop_p2p(self._p2p)


async def _at_most(work: Coroutine[None, None, None], *, seconds: float) -> None:
    """Do something that is good to have done before leaving, unless it takes too long."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(work, seconds)


def _make_sockets() -> Path:
    try:
        return make_socket_folder()
    except OSError as error:
        raise DaemonFailed(f"no folder for p2pd's sockets can be made ({error}); set TMPDIR to one") from error


def _routable_first(addresses: list[str]) -> list[str]:
    """Sort loopback addresses last: the first one is what a user copies to another machine."""
    return sorted(addresses, key=lambda address: "/127." in address or "/ip6/::1/" in address)
