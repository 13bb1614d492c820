"""StateClient: how a peer gets the swarm's state, from having the rounds wait to a state that is checked."""

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from swarmkit.optim.errors import SwarmError
from swarmkit.peers.agreement import Agreement, check_anchor
from swarmkit.peers.donors import rank_donors
from swarmkit.peers.download import Download
from swarmkit.peers.errors import AccessRefused, JoinFailed, NotInvited
from swarmkit.peers.fetch import Fetch
from swarmkit.peers.hold import hold_rounds
from swarmkit.peers.loop import NetworkThread
from swarmkit.peers.manifest import Snapshot
from swarmkit.peers.roster import Roster
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.transfer import Progress
from swarmkit.peers.transport import Bulk


class StateClient:
    """Downloads the state; `fetch` and `abandon` are called from other threads than the network's."""

    def __init__(
        self,
        thread: NetworkThread,
        rpc: Rpc,
        bulk: Bulk,
        roster: Roster,
        agreement: Agreement,
        settings: NetworkSettings,
        check_invited: Callable[[], None],
    ) -> None:
        """`check_invited` raises NotInvited when the others refuse this peer."""
        self._thread = thread
        self._rpc = rpc
        self._bulk = bulk
        self._roster = roster
        self._agreement = agreement
        self._settings = settings
        self._check_invited = check_invited
        self._download = Download()  # what an attempt that failed has left for the next
        self._fetching: Future[Snapshot] | None = None
        self._abandoned = False

    def fetch(self, progress: Progress | None, timeout: float | None) -> Snapshot:
        """See Node.fetch_state."""
        self._fetching = self._thread.submit(self._fetch(progress))
        if self._abandoned:
            self._fetching.cancel()
        try:
            return self._fetching.result(timeout)
        except TimeoutError as error:
            self._fetching.cancel()
            raise JoinFailed(f"the state did not arrive within {timeout} s") from error
        except CancelledError as error:
            raise JoinFailed("the download of the state was given up: this peer leaves") from error

    def abandon(self) -> None:
        """See Node.abandon_fetch."""
        self._abandoned = True
        if self._fetching is not None:
            self._fetching.cancel()

    async def _fetch(self, progress: Progress | None) -> Snapshot:
        try:
            await self._roster.refresh()
            await hold_rounds(self._rpc, self._roster)
            await Fetch(self._rpc, self._bulk, self._settings, self._donors, self._download, progress).run()
        except AccessRefused as error:
            raise NotInvited(error.text, error.refusal) from error
        except SwarmError:
            # Whom all refuse knows no donor any more: then the cause is its invitation.
            self._check_invited()
            raise
        done, self._download = self._download, Download()
        tensors, meta = done.snapshot()
        await asyncio.to_thread(check_anchor, tensors, meta, self._roster.table())
        self._agreement.forget()
        return tensors, meta

    def _donors(self) -> list[str]:
        active = set(self._roster.active())
        return rank_donors([record for record in self._roster.table() if record.peer_id in active], self._rpc.peer_id)
