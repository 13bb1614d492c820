"""Ed25519 identities: keys whose public half is the peer id, and the signatures that they make."""

import os
import secrets
import stat
from pathlib import Path

import base58
import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarmkit.peers.errors import KeyFileError, ProtocolError

# libp2p's protobuf for a private Ed25519 key: key_type=1, then 64 bytes, the seed and the public key.
_PRIVATE = b"\x08\x01\x12\x40"
# An Ed25519 peer id is an "identity" multihash of the protobuf of the public key (libp2p's specs/peer-ids).
_PEER_ID = b"\x00\x24\x08\x01\x12\x20"
SIGNATURE_BYTES = 64
MAX_KEY_FILE_BYTES = 1 << 14


class Identity:
    """A private Ed25519 key and the peer id that follows from it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes_raw()
        self.peer_id = base58.b58encode(_PEER_ID + self.public).decode()

    @classmethod
    def generate(cls) -> "Identity":
        """Make a new one."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def of(cls, file: str | None) -> "Identity":
        """The one in a file, made when missing, or a new one without a file."""
        return cls.generate() if file is None else cls.load_or_make(Path(file))

    @classmethod
    def load_or_make(cls, path: Path) -> "Identity":
        """Read the identity in a file, or make one there, mode 0600; raises KeyFileError."""
        if not path.exists():
            write_new(path, cls.generate().to_bytes())
        return cls.load(path)

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Read the identity in a file; raises KeyFileError saying what is wrong with it."""
        data = read_private(path, "identity")
        if data[:2] == b"\x08\x00":
            raise KeyFileError(
                f"identity {path} holds an RSA key, but identities are Ed25519: move it away and a new one is made, "
                "with a new peer id"
            )
        if not data.startswith(_PRIVATE):
            raise KeyFileError(f"identity {path} holds no libp2p key; name another file, or one that does not exist")
        if len(data) != len(_PRIVATE) + 64:
            raise KeyFileError(f"identity {path} is damaged: {len(data)} bytes, a key has {len(_PRIVATE) + 64}")
        identity = cls(Ed25519PrivateKey.from_private_bytes(data[4:36]))
        if data[36:] != identity.public:
            raise KeyFileError(f"identity {path} is damaged: its two halves do not belong together")
        return identity

    def to_bytes(self) -> bytes:
        """The key as libp2p reads it from a file."""
        return _PRIVATE + self._key.private_bytes_raw() + self.public

    def sign(self, purpose: str, *parts: bytes | str) -> bytes:
        """Sign parts for one purpose: a signature is good for nothing else."""
        return sign(self._key, purpose, *parts)


def sign(key: Ed25519PrivateKey, purpose: str, *parts: bytes | str) -> bytes:
    """Sign parts for one purpose with any key."""
    return key.sign(_statement(purpose, parts))


def is_signed(public: bytes, signature: bytes, purpose: str, *parts: bytes | str) -> bool:
    """True when the owner of a public key signed these parts for this purpose."""
    if len(signature) != SIGNATURE_BYTES or len(public) != 32:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _statement(purpose, parts))
    except (InvalidSignature, ValueError):
        return False
    return True


def public_key(peer_id: str) -> bytes:
    """The public key that a peer id consists of; raises ProtocolError for an id that is not of an Ed25519 key."""
    try:
        raw = base58.b58decode(peer_id) if len(peer_id) <= 80 else b""
    except ValueError:
        raw = b""
    if len(raw) != len(_PEER_ID) + 32 or not raw.startswith(_PEER_ID):
        raise ProtocolError(f"{peer_id[:60]!r} is no peer id of an Ed25519 key")
    return raw[len(_PEER_ID) :]


def _statement(purpose: str, parts: tuple[bytes | str, ...]) -> bytes:
    """What is signed: unambiguous, and of no use under another purpose."""
    packed: bytes = msgpack.packb(["swarmkit", purpose, *parts], use_bin_type=True)
    return packed


def read_private(path: Path, what: str) -> bytes:
    """Read a file that only its owner may read; raises KeyFileError naming it."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise KeyFileError(f"{what} {path} is not a file")
        if found.st_mode & 0o077:
            raise KeyFileError(
                f"{what} {path} can be read by others (mode {stat.S_IMODE(found.st_mode):04o}): make it yours alone "
                f"with `chmod 600 {path}`, and replace it if others may have read it"
            )
        if not 0 < found.st_size <= MAX_KEY_FILE_BYTES:
            raise KeyFileError(f"{what} {path} is {'empty' if not found.st_size else 'too large for a key'}")
        return path.read_bytes()
    except OSError as error:
        raise KeyFileError(f"{what} {path} cannot be read: {error.strerror or error}") from error


def write_new(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 that did not exist, whole or not at all; one that another made meanwhile stays."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)
        except FileExistsError:
            pass  # somebody was faster: theirs counts
        finally:
            temporary.unlink()
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {error.strerror or error}") from error
