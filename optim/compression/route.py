"""Which way payloads that cannot be summed take: to all, by slices, or not at all."""

from enum import Enum


class Route(Enum):
    """How a round of a gather codec travels."""

    gather = "gather"  # every payload to every member
    sharded = "sharded"  # encoded slices to their owners, encoded means to all
    fp16 = "fp16"  # without the codec, by an all-reduce in float16


def choose(members: int, payload_bytes: int, elements: int) -> Route:
    """The route of a round among about as many members; from facts that are the same on all of them.

    A gather while it costs no more than an all-reduce in float16, as it encodes only once; then slices, which cost two
    payloads whatever the number of members. A codec that saves nothing over float16 leaves the place to it.
    """
    if members * payload_bytes <= 2 * 2 * elements:
        return Route.gather
    return Route.sharded if payload_bytes < 2 * elements else Route.fp16
