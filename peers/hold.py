"""Has the rounds of a run wait for a joiner while it downloads the state."""

from swarmkit.peers.errors import AccessRefused, PeerUnreachable, ProtocolError
from swarmkit.peers.roster import Roster
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.wire import field

MAX_TRIES = 5  # redirects and dead coordinators together


async def hold_rounds(rpc: Rpc, roster: Roster) -> None:
    """Ask whoever coordinates to wait, at most for a round's timeout; raises AccessRefused when it may not be asked."""
    me = roster.mine.peer_id
    target = next((peer for peer in roster.active() if peer != me), None)
    for _ in range(MAX_TRIES):
        if target is None:
            return
        try:
            answer = await rpc.call(target, "hold", {}, timeout=10)
        except AccessRefused:
            raise
        except (PeerUnreachable, ProtocolError):
            roster.suspect(target)
            target = next((peer for peer in roster.active() if peer != me), None)
            continue
        if answer.get("outcome") == "held":
            return
        target = field(answer, "to", str)
