"""Node: one peer's place in a run, from finding the others to leaving them."""

import asyncio
import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from swarmkit.peers.access import open_access
from swarmkit.peers.agreement import Agreement
from swarmkit.peers.attach import attach
from swarmkit.peers.checkup import Checkup
from swarmkit.peers.collective import SwarmCollective
from swarmkit.peers.control import Controlled, ControlServer
from swarmkit.peers.coordinator import Coordinator
from swarmkit.peers.daemon_checks import check_daemon
from swarmkit.peers.directory import KEY, LIFETIME_S, announce_run, find_run
from swarmkit.peers.directory import PURPOSE as ANNOUNCEMENT
from swarmkit.peers.door import Door, knock
from swarmkit.peers.engine import get_dht_time, start_dht, start_p2p, stop_p2p
from swarmkit.peers.entry import Entry, enter, refuse_twin
from swarmkit.peers.errors import AccessRefused, DaemonFailed, JoinFailed, NotInvited
from swarmkit.peers.gate import Gate
from swarmkit.peers.hygiene import make_socket_folder
from swarmkit.peers.identity import Identity
from swarmkit.peers.loop import NetworkThread
from swarmkit.peers.manifest import Snapshot
from swarmkit.peers.pace import SwarmPace
from swarmkit.peers.peer_cache import PeerCache, Remembered
from swarmkit.peers.preflight import check_address
from swarmkit.peers.records import Guard
from swarmkit.peers.reunion import Reunion
from swarmkit.peers.revoking import Revoking
from swarmkit.peers.roster import PURPOSE as HEARTBEAT
from swarmkit.peers.roster import PeerRecord, Roster, peers_key
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.rules import Rules
from swarmkit.peers.run_config import PURPOSE as CONFIGURATION
from swarmkit.peers.run_config import RunConfig, config_key
from swarmkit.peers.settings import ControlSettings, NetworkSettings, is_loopback
from swarmkit.peers.shares import Shares
from swarmkit.peers.state import Provider, StateServer, Version
from swarmkit.peers.state_client import StateClient
from swarmkit.peers.transfer import Progress
from swarmkit.peers.transport import Bulk

if TYPE_CHECKING:
    from swarmkit.optim.synced import SyncedOptimizer

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
CLOSE_S = 15.0
REMEMBER_S = 5.0  # between two looks at who is there, for the peer cache
_NOT_SAID = {"peer_id", "joined_at", "updated_at", "config", "revoked"}
_BEAT_FIELDS = frozenset(f.name for f in fields(PeerRecord)) - _NOT_SAID


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
        self._collectives: list[SwarmCollective] = []
        self._control: ControlServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = threading.Lock()
        self._agreement = Agreement()
        self._ended: AccessRefused | None = None  # why this peer's own invitation is good for nothing any more

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
        settings = settings or NetworkSettings()
        if run is None and not initial_peers:
            raise ValueError("a run's name or the address of a peer is needed")
        if run is not None and (not run or "." in run or len(run) > 100):
            raise ValueError(f"run name {run!r}: must have 1 to 100 characters and no dot (hivemind's key separator)")
        for address in initial_peers:
            check_address(address)
        if settings.invitation is not None and settings.run_key is None and not initial_peers:
            raise ValueError("an invitation is to a run that is up: the address of one of its peers is needed")
        node = cls(run, settings, role)
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
        await refuse_twin(self.settings, self._sockets, initial_peers)
        identity = Identity.of(self.settings.identity)
        self.peer_id: str = identity.peer_id
        access, run_key = open_access(identity, self._wanted_run, self.settings)
        wanted = access.run or self._wanted_run
        recalled = self._cache.recall(wanted, initial_peers) if self._cache is not None else Remembered()
        self._p2p = await start_p2p(self.settings, self._sockets, identity)
        self.entry: Entry = await enter(self._p2p, initial_peers, recalled)
        await knock(self._p2p, self.entry.live, access)
        guard = Guard({KEY: (ANNOUNCEMENT, "")}, get_dht_time)
        self._dht = await start_dht(self._p2p, self.entry.live, guard, Gate(access) if access.is_closed else None)
        if access.run is not None:
            self.run = access.run
        elif self._wanted_run is None or existing or (initial_peers and self._role == "observer"):
            self.run = await find_run(self._dht, self._wanted_run or self.entry.run)
        else:
            self.run = self._wanted_run
        guard.guard(peers_key(self.run), HEARTBEAT, self.run)
        guard.guard(config_key(self.run), CONFIGURATION, self.run)
        self._access = access
        self._rpc = Rpc(self._p2p, self.run, access)
        self._bulk = Bulk(self._p2p, self._rpc, self.run, self.settings)
        mine = PeerRecord(peer_id=self.peer_id, role=self._role, joined_at=get_dht_time())
        self._roster = Roster(self._dht, self._rpc, self.run, self.settings, mine)
        self._bulk.is_alive, self._bulk.heard_from = self._roster.is_alive, self._roster.heard_from
        self._coordinator = Coordinator(self._roster, self._rpc, self.settings)
        self._state = StateServer(self._rpc, self._bulk, self.settings)
        self._state_client = StateClient(
            self._thread, self._rpc, self._bulk, self._roster, self._agreement, self.settings, self._see_if_invited
        )
        self._pace = SwarmPace(self._thread, self._rpc, self._roster, self.settings)
        self._config = RunConfig(self._dht, self._rpc, self._roster, self.run, run_key)
        self._revoking = Revoking(self._rpc, self._roster, run_key, self.settings.run_key)
        self._checkup = Checkup(self._rpc, self._p2p)
        await self._rpc.serve()
        await self._bulk.serve()
        await Door(self._p2p, access).serve()
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
        self._go_on(self._roster.run())
        self._go_on(self._watch_p2pd())
        self._go_on(Reunion(self._dht, self._roster, self.settings).run())
        if self._cache is not None:
            self._go_on(self._remember(self._cache, initial_peers))
        if access.is_closed:
            await self._revoking.look()
            self._go_on(self._watch_access())
        if self._role == "replica":
            await announce_run(self._dht, self.run, identity)
            self._go_on(self._pace.run())
            self._go_on(self._keep_records())

    def _go_on(self, work: Coroutine[None, None, None]) -> None:
        """Do something in the background until the node closes; an end before that is told."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(_tell_failure)
        self._tasks.append(task)

    async def _watch_p2pd(self) -> None:
        """End rounds when p2pd dies: without it this peer would take all others for dead and go on alone."""
        child = self._p2p._child
        if child is not None:
            await child.wait()
            logger.error("p2pd ended with code %s: this peer is cut off", child.returncode)
            for collective in self._collectives:
                collective.close("p2pd died, so this peer cannot reach anybody; restart it")

    async def _watch_access(self) -> None:
        """Spread revocations, and end rounds when this peer's own invitation has ended: the others refuse it now."""
        while True:
            await asyncio.sleep(self.settings.heartbeat_s)
            try:
                await self._revoking.look()
                self._look_at_own_access()
            except Exception:
                logger.warning("revocations could not be exchanged", exc_info=True)

    def _look_at_own_access(self) -> None:
        try:
            self._access.check_own()
        except AccessRefused as error:
            self._ended = error
            for collective in self._collectives:
                collective.close(str(error))

    async def _keep_records(self) -> None:
        """Renew what expires on the DHT: the run's announcement and its configuration."""
        while True:
            await asyncio.sleep(LIFETIME_S / 3)
            try:
                await announce_run(self._dht, self.run, self._access.identity)
                await self._config.store()
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
        self._roster.say(**values)
        if values.get("digest"):
            self._agreement.note(self._roster.mine.lineage, self._roster.mine.digest)

    def disagreement(self) -> str:
        """Why this peer should fetch the state: most others hold another anchor after the same rounds. Empty: none."""
        return self._agreement.verdict(self._roster.table(), self._roster.mine)

    def announce(self, state: str, *, wait: bool = True) -> None:
        """Change this peer's state and tell the others at once; raises TimeoutError when only a heartbeat will.

        Without `wait` they are told while the caller goes on.
        """
        if wait:
            self._thread.run(self._announce(state), timeout=10)
        else:
            self._thread.submit(self._announce(state))

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

    def shares(self) -> Shares:
        """What the peers of this run, gone ones too, have told of the data that they learnt from."""
        self._ask(self._ask_for_shares(), self.settings.startup_timeout_s, "the shares of the data could not be read")
        return self._roster.shares

    async def _ask_for_shares(self) -> None:
        others = [record.peer_id for record in self._roster.table() if record.peer_id != self.peer_id]
        await self._roster.shares.ask(others)

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

    def collective(
        self, *, round_timeout: float | None = None, joining: bool = False, rules: Rules | None = None
    ) -> SwarmCollective:
        """Take part in rounds; one collective serves a process.

        From here on the others wait for this peer, unless it is `joining`: then call `announce("training")` when it
        holds the swarm's state. `rules`, by default those of the settings, must be the same on all members.
        """
        if not joining:
            self.announce("training")
        collective = SwarmCollective(
            self._thread, self._rpc, self._bulk, self._roster, self._coordinator, self.settings, round_timeout, rules
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
        """Offer the run's configuration (JSON text) to joiners; in a closed run its owner's key signs it.

        Raises ValueError when it is too long or no JSON, or when this peer does not own the closed run.
        """
        self._ask(self._publish_config(config), 30.0, "the configuration could not be published")

    async def _publish_config(self, config: str) -> None:
        self._config.publish(config)
        await asyncio.gather(self._config.store(), self._roster.beat())

    def fetch_config(self) -> str:
        """Get the run's configuration, checked, and offer it too; raises JoinFailed when nobody offers one."""
        return self._ask(self._config.fetch(), 60.0, "the run's configuration could not be read")

    def _see_if_invited(self) -> None:
        self._look_at_own_access()
        self.check_invited()

    def check_invited(self) -> None:
        """Raise NotInvited when the others refuse this peer, because its invitation has ended or was revoked."""
        if self._ended is not None:
            raise NotInvited(self._ended.text, self._ended.refusal)

    @property
    def is_closed(self) -> bool:
        """True when peers need an invitation to this run."""
        return self._access.is_closed

    def tell_revocations(self) -> list[str]:
        """Give every peer that is known the revocations of this one; returns those that hold them now."""
        return self._ask(self._tell_revocations(), 30.0, "the revocations could not be spread")

    async def _tell_revocations(self) -> list[str]:
        await self._roster.refresh()
        return await self._revoking.tell()

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
        sends anything any more. NotInvited tells that no further attempt can work. Call `observe_round` of the strategy
        next: the rounds wait for that, at most for the round's timeout.
        """
        return self._state_client.fetch(progress, timeout)

    def abandon_fetch(self) -> None:
        """End a download of the state that another thread waits for, and every later one; they raise JoinFailed."""
        self._state_client.abandon()

    # -- the control plane ---------------------------------------------------------------------------------------------

    def serve_control(self, controlled: Controlled, settings: ControlSettings) -> ControlServer:
        """Serve this peer's control plane until the node closes; raises OSError when the port cannot be had."""
        server = ControlServer(self._thread, controlled, settings)
        self._thread.run(server.start(), timeout=10)
        self._control = server
        if not is_loopback(settings.host) or is_loopback(self.settings.host):
            self.heartbeat(control=server.visible_target(self.addresses[0]))
        return server

    # -- traffic and leaving -------------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Bulk payload bytes sent since the start."""
        return self._bulk.total.sent

    @property
    def bytes_received(self) -> int:
        """Bulk payload bytes received since the start."""
        return self._bulk.total.received

    def close(self, *, state: str = "gone", within_s: float = CLOSE_S) -> None:
        """Tell the others, stop everything, remove sockets, in about `within_s` at most; safe to call twice."""
        if not self._closed.acquire(blocking=False):
            return
        for collective in self._collectives:
            collective.close()
        within_s = min(within_s, CLOSE_S)
        try:
            self._thread.run(self._stop(state, within_s / CLOSE_S), timeout=within_s)
        except TimeoutError:
            pass  # the loop is stopped below and p2pd killed with it
        finally:
            self._thread.close()
            if self._owns_sockets:
                shutil.rmtree(self._sockets, ignore_errors=True)

    async def _stop(self, state: str, hurry: float) -> None:
        """Leave, with a share of the usual patience for each part."""
        if self._tasks:
            for task in self._tasks:
                task.cancel()
            child = self._p2p._child
            if child is None or child.returncode is None:
                await _at_most(self._roster.announce(state), seconds=5 * hurry)
            await self._coordinator.close(seconds=5 * hurry)
        if self._control is not None:
            await self._control.close()
        if hasattr(self, "_bulk"):
            await self._bulk.close()
        if hasattr(self, "_dht"):
            await _at_most(self._dht.shutdown(), seconds=3 * hurry)
        if hasattr(self, "_p2p"):
            await stop_p2p(self._p2p)


def _tell_failure(task: "asyncio.Task[None]") -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("a part of this peer ended, which it should not: restart it", exc_info=error)


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
