"""How revocations spread: every peer holds them all, and asks whoever says in a heartbeat that it knows others."""

import asyncio
import logging
from pathlib import Path

from swarmkit.peers.access import read_revocations, revocations_file
from swarmkit.peers.errors import KeyFileError, PeerUnreachable, ProtocolError
from swarmkit.peers.invitation import RunKey
from swarmkit.peers.roster import Roster
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.wire import Message, field

logger = logging.getLogger(__name__)
CALL_TIMEOUT_S = 5.0


class Revoking:
    """Keeps this peer's revocations equal to the others'."""

    def __init__(self, rpc: Rpc, roster: Roster, run_key: RunKey | None, run_key_file: str | None) -> None:
        self._rpc = rpc
        self._access = rpc.access
        self._roster = roster
        self._run_key = run_key
        self._file = None if run_key_file is None else Path(run_key_file)
        self._read_at = 0  # mtime of the owner's list as it was read last
        rpc.handle("revocations", self._on_revocations, onlookers=True)

    async def look(self) -> None:
        """Read the owner's list if it has changed, and exchange with peers that know others; called now and then."""
        if not self._access.is_closed:
            return
        if self._read_list():
            await self.tell()
        mine = self._access.revocations_digest
        others = [r.peer_id for r in self._roster.table() if r.revoked != mine and r.peer_id != self._rpc.peer_id]
        await asyncio.gather(*(self._exchange(peer) for peer in others))

    async def tell(self) -> list[str]:
        """Give this peer's revocations to all that it knows; returns those that took them."""
        others = [record.peer_id for record in self._roster.table() if record.peer_id != self._rpc.peer_id]
        took = await asyncio.gather(*(self._exchange(peer) for peer in others))
        return [peer for peer, taken in zip(others, took, strict=True) if taken]

    def _read_list(self) -> bool:
        if self._file is None or self._run_key is None:
            return False
        path = revocations_file(self._file)
        changed = path.stat().st_mtime_ns if path.exists() else 0
        if changed == self._read_at:
            return False
        self._read_at = changed
        try:
            return self._access.adopt(read_revocations(self._file, self._run_key))
        except KeyFileError as error:
            logger.error("%s", error)
            return False

    async def _exchange(self, peer_id: str) -> bool:
        try:
            message: Message = {"revocations": self._access.revocations}
            answer = await self._rpc.call(peer_id, "revocations", message, timeout=CALL_TIMEOUT_S)
            self._access.adopt(field(answer, "revocations", list))
        except (PeerUnreachable, ProtocolError) as error:
            logger.info("no revocations from %s: %s", peer_id[-8:], error)
            return False
        return True

    async def _on_revocations(self, caller: str, message: Message) -> Message:
        known = self._access.revocations_digest
        self._access.adopt(field(message, "revocations", list))
        if self._access.revocations_digest != known:
            # At once, not only with the next heartbeat: whoever is revoked may be in a round.
            asyncio.ensure_future(self.tell()).add_done_callback(lambda task: task.cancelled() or task.exception())
        return {"revocations": self._access.revocations}
