"""Who broke an attempt at a round, as its members tell each other and their coordinator."""

# A chunk that no slice has: the attempt of who sends it is over, for a cause that is not in this stream.
ENDED = b""


class Blame(Exception):
    """An attempt broke because of one member; `peer_id` is None when nobody in particular is to blame.

    `is_link` says that a stream broke; else what came over it was wrong. `is_echo` says that the member ended its own
    attempt first: what ended that is the cause, and this only its consequence.
    """

    def __init__(self, peer_id: str | None, reason: str, *, is_link: bool = True, is_echo: bool = False) -> None:
        super().__init__(reason)
        self.peer_id = peer_id
        self.reason = reason
        self.is_link = is_link
        self.is_echo = is_echo


def expect(chunk: bytes | None, member: str) -> bytes:
    """The chunk that came from a member; raises Blame when its stream or its attempt has ended."""
    if chunk is None:
        raise Blame(member, f"{member[-8:]} ended its stream early")
    if chunk == ENDED:
        raise Blame(member, f"{member[-8:]} ended its attempt", is_echo=True)
    return chunk
