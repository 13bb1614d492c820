"""How many samples a round took: what the weights of its members mean in each strategy."""

from dataclasses import dataclass

from swarmkit.config import Config
from swarmkit.optim.round_report import RoundReport
from swarmkit.strategy import DeMoConfig


@dataclass(frozen=True, slots=True)
class Taken:
    """What a round took, in samples."""

    mine: int  # of this peer
    per_weight: int  # of any member, for each unit of its weight; 0: this round takes none


def samples_taken(config: Config, report: RoundReport, *, me: str, pending: int) -> Taken:
    """Read a round's report; `pending` samples of this peer, `me`, were in no round yet.

    Weights are samples. DeMo's are samples a step; a model in k fragments has k rounds a window, of which that of the
    first fragment counts: each takes all samples since its last one.
    """
    if isinstance(config.strategy, DeMoConfig):
        per_weight = report.window
    else:
        per_weight = int(report.round % getattr(config.strategy, "fragments", 1) == 0)
    if report.failed is not None:
        return Taken(0, per_weight)
    # A round may leave out what was offered, as of a peer whose codec lacks the state that the others share.
    weight = dict(zip(report.members, report.weights, strict=True)).get(me, report.weight)
    return Taken(min(pending, round(weight * per_weight)), per_weight)
