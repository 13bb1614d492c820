"""Keeps an optimizer of somebody's own loop with its run: takes the state over, serves it, catches up."""

import logging
import time
from typing import TYPE_CHECKING

from swarmkit.optim.errors import SwarmError
from swarmkit.peers.errors import JoinFailed, NotInvited

if TYPE_CHECKING:
    from swarmkit.optim.agreement import Agreed
    from swarmkit.optim.synced import RoundReport, SyncedOptimizer
    from swarmkit.peers.node import Node

logger = logging.getLogger(__name__)
# Seconds after each failed attempt at the swarm's state: it may lack a round that was under way, and whoever serves it
# has that one a step later.
PAUSES_S = tuple(min(0.5 * 2**attempt, 10.0) for attempt in range(8))


def attach(node: "Node", optimizer: "SyncedOptimizer") -> None:
    """See Node.attach."""
    node.announce("joining")
    if any(record.state == "training" and record.peer_id != node.peer_id for record in node.refresh()):
        catch_up(node, optimizer)
    node.serve_state(optimizer.snapshot, optimizer.version)
    node.announce("training")

    def tell(report: "RoundReport") -> None:
        node.heartbeat(round=report.round + 1, step=report.step)

    def tell_digest(agreed: "Agreed") -> None:
        node.heartbeat(lineage=agreed.lineage, digest=agreed.digest)

    def heal(*_: object) -> None:
        report = optimizer.last_report
        reason = "" if optimizer.needs_state or not optimizer.digests.are_comparable else node.disagreement()
        if reason:
            optimizer.digests.note_outcome(diverged=True)
            optimizer.needs_state = True
        elif report is not None and report.diverged:
            reason = str(report.failed)
        if optimizer.needs_state:
            logger.warning("%s: fetching their state", reason or "the others closed a round without this peer")
            catch_up(node, optimizer)

    optimizer.on_round.append(tell)
    optimizer.digests.on_agreed.append(tell_digest)
    # After the step rather than in it: its gradients are of parameters that the state replaces.
    optimizer.register_step_post_hook(heal)


def catch_up(node: "Node", optimizer: "SyncedOptimizer") -> None:
    """Fetch the swarm's state and watch its next round; raises JoinFailed when that failed too often, or may not be."""
    reason = ""
    for pause in PAUSES_S:
        try:
            optimizer.load_snapshot(*node.fetch_state())
            optimizer.observe_round()
        except NotInvited:
            raise  # nobody will ever serve it
        except (SwarmError, ValueError) as error:
            reason = str(error)
            time.sleep(pause)
        else:
            return
    raise not_adopted(reason)


def not_adopted(reason: str) -> JoinFailed:
    """What to raise after the last pause."""
    return JoinFailed(f"the swarm's state could not be adopted in {len(PAUSES_S)} attempts; the last: {reason}")
