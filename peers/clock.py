"""The swarm's time: seconds since the epoch by the clock of the peer at which this one joined."""

import time

MAX_SKEW_S = 300.0  # of a joiner's clock; beyond that it has to be set
NOTICED_S = 1.0  # less may be the network's delay

# By the monotonic clock: a wall clock that is set meanwhile must not age or rejuvenate records.
_epoch = time.time() - time.monotonic()


def swarm_time() -> float:
    """Seconds since the epoch, as the swarm's peers count them."""
    return time.monotonic() + _epoch


def adjust(ahead: float) -> bool:
    """Go along with a swarm whose clock is `ahead` seconds before this one's; True when that was worth it.

    hivemind drops peers whose clocks are 3 s apart and lets records expire by the wall clock of whoever reads them.
    """
    global _epoch
    if abs(ahead) < NOTICED_S:
        return False
    _epoch += ahead
    return True
