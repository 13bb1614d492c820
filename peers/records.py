"""Signed records: what a peer stores of itself on the DHT, so that nobody can store anything in its name."""

import math
from collections.abc import Callable

import msgpack

from swarmkit.peers.engine import DHTID, DHTRecord, RecordValidatorBase
from swarmkit.peers.errors import ProtocolError
from swarmkit.peers.identity import Identity, is_signed, public_key
from swarmkit.peers.wire import Message, decode, encode, field

# The DHT keeps nothing of ours for longer: a record that expires in a year could not be replaced until then.
MAX_LIFETIME_S = 2 * 3600.0
MAX_RECORD_BYTES = 300 << 10


def seal(identity: Identity, purpose: str, run: str, body: bytes, credential: bytes = b"") -> bytes:
    """Sign a record of this peer; in a closed run its credential goes along."""
    message: Message = {"body": body, "signature": identity.sign(purpose, run, body)}
    return encode({**message, "credential": credential} if credential else message)


def unseal(peer_id: str, purpose: str, run: str, data: object) -> tuple[bytes, bytes]:
    """The body of a record and the credential beside it; raises ProtocolError unless that peer has signed it."""
    if not isinstance(data, bytes):
        raise ProtocolError(f"a record is bytes, not {type(data).__name__}")
    message = decode(data)
    body = field(message, "body", bytes)
    if not is_signed(public_key(peer_id), field(message, "signature", bytes), purpose, run, body):
        raise ProtocolError(f"a record in the name of {peer_id[-8:]} that it has not signed")
    return body, field(message, "credential", bytes) if "credential" in message else b""


def peer_of(subkey: object) -> str:
    """Whose record lies under a subkey, which is a peer id or begins with one and a slash."""
    if not isinstance(subkey, str):
        raise ProtocolError("a subkey is text")
    return subkey.partition("/")[0]


class Guard(RecordValidatorBase):
    """Has this peer's part of the DHT keep only what its owner has signed, under the keys that swarmkit uses.

    hivemind applies it to what others store here and to what they answer. What lies under other keys is not looked at.
    """

    def __init__(self, purposes: dict[str, tuple[str, str]], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._purposes = {DHTID.generate(key).to_bytes(): purpose for key, purpose in purposes.items()}

    def guard(self, key: str, purpose: str, run: str) -> None:
        """Look after one more key, whose records are signed for this purpose and run."""
        self._purposes[DHTID.generate(key).to_bytes()] = purpose, run

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record may be stored or read."""
        if not math.isfinite(record.expiration_time) or record.expiration_time > self._clock() + MAX_LIFETIME_S:
            return False
        if len(record.value) > MAX_RECORD_BYTES:
            return False
        found = self._purposes.get(record.key)
        if found is None:
            return True
        try:
            subkey = msgpack.unpackb(record.subkey, raw=False)
            # A plain value would take the place of everybody's records.
            unseal(peer_of(subkey), *found, msgpack.unpackb(record.value, raw=False))
        except (ProtocolError, ValueError, msgpack.exceptions.UnpackException):
            return False
        return True
