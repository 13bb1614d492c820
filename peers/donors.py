"""Which peers a joiner asks for the state, in which order."""

import hashlib
from collections.abc import Sequence

from swarmkit.peers.roster import PeerRecord
from swarmkit.peers.votes import outvoted

BEHIND = 3  # rounds; who is further behind than that has been left behind, not only beaten a moment ago


def rank_donors(records: Sequence[PeerRecord], me: str) -> list[str]:
    """Peers that may serve the state to `me`: those at the newest round first, each joiner in an order of its own.

    Who holds another anchor than the majority after the same rounds is not asked.
    So joiners that come at once spread over the donors (rendezvous hashing) without anybody keeping count.
    """
    wrong = outvoted(records)
    donors = [r for r in records if r.is_active and r.peer_id != me and r.peer_id not in wrong]
    newest = max((record.round for record in donors), default=0)

    def order(record: PeerRecord) -> tuple[bool, bytes]:
        mixed = hashlib.blake2b(f"{me}|{record.peer_id}".encode(), digest_size=8).digest()
        return record.round < newest - BEHIND, mixed

    return [record.peer_id for record in sorted(donors, key=order)]
