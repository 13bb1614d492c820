"""Which runs a DHT holds: what lets `join` and `status` do with an address alone."""

from swarmkit.peers.engine import DHTNode, get_dht_time
from swarmkit.peers.errors import OtherVersion, ProtocolError, UnknownRun
from swarmkit.peers.wire import decode, encode, field

# Raised with every change that makes old and new peers misunderstand each other.
PROTOCOL = 1
KEY = "swarmkit.runs"
LIFETIME_S = 60.0


async def announce_run(dht: DHTNode, run: str) -> None:
    """Say on the DHT that a run exists and which protocol it speaks."""
    await dht.store(KEY, encode({"protocol": PROTOCOL}), get_dht_time() + LIFETIME_S, subkey=run)


async def find_run(dht: DHTNode, wanted: str | None) -> str:
    """Return the name of the run to join: `wanted`, or the only one there is.

    Raises UnknownRun when there is none, or several to choose from, and OtherVersion when it speaks another protocol.
    """
    found = await dht.get(KEY, latest=True)
    entries = found.value if found is not None and isinstance(found.value, dict) else {}
    runs = {run: entry.value for run, entry in entries.items() if isinstance(run, str) and run.isprintable()}
    names = ", ".join(sorted(runs)[:20]) or "none"
    if wanted is None and len(runs) == 1:
        wanted = next(iter(runs))
    if wanted is None:
        hint = "is the run still up?" if not runs else "say which with --name"
        raise UnknownRun(f"runs at this address: {names}; {hint}")
    if wanted not in runs:
        raise UnknownRun(f"no run {wanted!r} at this address; runs there: {names}; choose one with --name")
    try:
        theirs = field(decode(runs[wanted]), "protocol", int)
    except (ProtocolError, TypeError) as error:
        raise OtherVersion(f"run {wanted!r} is announced in a way that this version cannot read") from error
    if theirs != PROTOCOL:
        older = "this peer" if theirs > PROTOCOL else "the run"
        raise OtherVersion(
            f"run {wanted!r} speaks protocol {theirs}, this peer {PROTOCOL}: upgrade swarmkit on {older}"
        )
    return wanted
