"""Finds peers again that fell silent: a DHT node that reached nobody for a while would stay alone for ever."""

import asyncio
import logging

from swarmkit.peers.engine import DHTNode, PeerID
from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.roster import Roster
from swarmkit.peers.settings import NetworkSettings

logger = logging.getLogger(__name__)
AT_ONCE = 8  # peers that are looked for in one turn
MAX_PAUSE_S = 60.0


class Reunion:
    """Looks for lost peers, at first every `silence_s`, then less and less often; those whose port is closed it drops.

    hivemind takes a peer that does not answer out of its routing table. After a link was cut, or a network was parted,
    the tables on either side hold nobody of the other, so it takes a call from here to join them again.
    """

    def __init__(self, dht: DHTNode, roster: Roster, settings: NetworkSettings) -> None:
        self._dht = dht
        self._roster = roster
        self._pause = settings.silence_s

    async def run(self) -> None:
        """Look for ever."""
        pause = self._pause
        while True:
            await asyncio.sleep(pause)
            lost = list(self._roster.lost)
            looks = await asyncio.gather(*(self.look(peer_id) for peer_id in lost[:AT_ONCE]), return_exceptions=True)
            for error in (look for look in looks if isinstance(look, Exception)):
                logger.warning("a peer could not be looked for", exc_info=error)
            found = [look is True for look in looks]
            for peer_id in lost[:AT_ONCE]:
                if peer_id in self._roster.lost:
                    self._roster.lost.move_to_end(peer_id)  # the others' turn
            is_waiting = bool(lost) and not any(found)
            pause = min(1.2 * pause, MAX_PAUSE_S) if is_waiting else self._pause

    async def look(self, peer_id: str) -> bool:
        """Try to reach a lost peer; True when it is in the table and on the DHT again."""
        if not await self._roster.may_be_back(peer_id):
            return False
        try:
            await self._roster.greet(peer_id)
        except (PeerUnreachable, ProtocolError):
            return False
        known = PeerID.from_base58(peer_id)
        self._dht.blacklist.register_success(known)
        await self._dht.protocol.call_ping(known)
        logger.info("%s is back", peer_id[-8:])
        return True
