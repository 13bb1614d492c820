"""Which runs a DHT holds: what lets `join` and `status` do with an address alone."""

from swarmkit.peers.engine import DHTNode, get_dht_time
from swarmkit.peers.errors import OtherVersion, ProtocolError, UnknownRun
from swarmkit.peers.identity import Identity
from swarmkit.peers.records import seal, unseal
from swarmkit.peers.wire import decode, encode, field

# Raised with every change that makes old and new peers misunderstand each other.
PROTOCOL = 2
KEY = "swarmkit.announced"
PURPOSE = "announcement"
LIFETIME_S = 60.0


async def announce_run(dht: DHTNode, run: str, identity: Identity) -> None:
    """Say on the DHT that a run exists and which protocol it speaks."""
    body = encode({"protocol": PROTOCOL, "run": run})
    # Each peer has a subkey of its own: nobody can put something else in the place of another's.
    subkey = f"{identity.peer_id}/{run}"
    await dht.store(KEY, seal(identity, PURPOSE, "", body), get_dht_time() + LIFETIME_S, subkey=subkey)


async def find_run(dht: DHTNode, wanted: str | None) -> str:
    """Return the name of the run to join: `wanted`, or the only one there is.

    Raises UnknownRun when there is none, or several to choose from, and OtherVersion when it speaks another protocol.
    """
    found = await dht.get(KEY, latest=True)
    entries = found.value if found is not None and isinstance(found.value, dict) else {}
    runs: dict[str, set[int]] = {}
    for subkey, entry in entries.items():
        try:
            run, protocol = _read(subkey, entry.value)
        except ProtocolError:
            continue
        runs.setdefault(run, set()).add(protocol)
    names = ", ".join(sorted(runs)[:20]) or "none"
    if wanted is None and len(runs) == 1:
        wanted = next(iter(runs))
    if wanted is None:
        hint = "is the run still up?" if not runs else "say which with --name"
        raise UnknownRun(f"runs at this address: {names}; {hint}")
    if wanted not in runs:
        raise UnknownRun(f"no run {wanted!r} at this address; runs there: {names}; choose one with --name")
    if PROTOCOL not in runs[wanted]:
        raise other_protocol(f"run {wanted!r}", max(runs[wanted]))
    return wanted


def _read(subkey: object, data: object) -> tuple[str, int]:
    peer_id, _, run = subkey.partition("/") if isinstance(subkey, str) else ("", "", "")
    body, _ = unseal(peer_id, PURPOSE, "", data)
    message = decode(body)
    if not run.isprintable() or not 0 < len(run) <= 100 or field(message, "run", str) != run:
        raise ProtocolError("an announcement that does not fit its place")
    return run, field(message, "protocol", int)


def other_protocol(who: str, theirs: int) -> OtherVersion:
    """What to raise when a run or a peer speaks another protocol than this one."""
    older = "this peer" if theirs > PROTOCOL else "the run"
    return OtherVersion(f"{who} speaks protocol {theirs}, this peer {PROTOCOL}: upgrade swarmkit on {older}")
