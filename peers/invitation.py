"""Closed runs: the run key, the invitations that it signs, what a peer shows of one, and how one is revoked."""

import base64
import binascii
import math
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmkit.peers.errors import AccessRefused, KeyFileError, NotInvited, ProtocolError, Refusal
from swarmkit.peers.identity import Identity, is_signed, public_key, read_private, sign, write_new
from swarmkit.peers.wire import Message, decode, encode, field

PREFIX = "swarmkit-invite-"
MAX_TEXT = 2048  # characters of a token
MAX_CREDENTIAL_BYTES = 1024
MAX_NAME = 60
ROLES = ("replica", "bootstrap", "observer")
FOUNDER = "founder"  # whose name a peer with the run key gives itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What a run key has signed: who may enter which run, as what, until when."""

    run: str
    run_key: bytes  # public
    name: str  # of the guest, for revoking
    role: str  # "replica" may do everything, "bootstrap" and "observer" only look on
    issued: float  # seconds since the epoch
    until: float
    peer_id: str = ""  # the only peer that it is for; empty: whoever holds the token
    holder: bytes = b""  # public half of the secret in the token, where there is no peer_id

    def to_bytes(self) -> bytes:
        """The signed form."""
        message: Message = {name: getattr(self, name) for name in self.__slots__}
        return encode(message)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Invitation":
        """Read one that anybody may have made; raises ProtocolError."""
        message = decode(data)
        found = cls(
            run=field(message, "run", str, lambda text: 0 < len(text) <= 100),
            run_key=field(message, "run_key", bytes, lambda key: len(key) == 32),
            name=field(message, "name", str, is_name),
            role=field(message, "role", str, lambda role: role in ROLES),
            issued=field(message, "issued", float, math.isfinite),
            until=field(message, "until", float, math.isfinite),
            peer_id=field(message, "peer_id", str, lambda text: len(text) <= 80),
            holder=field(message, "holder", bytes, lambda key: len(key) in (0, 32)),
        )
        if bool(found.peer_id) == bool(found.holder):
            raise ProtocolError("an invitation is for a peer id or for the holder of a secret")
        return found


def is_name(text: str) -> bool:
    """True for a guest's name: short and printable, for it ends up on terminals."""
    return 0 < len(text) <= MAX_NAME and text.isprintable() and text == text.strip()


class RunKey:
    """The private key of a closed run: whoever has it invites."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes_raw()

    @classmethod
    def load(cls, path: Path) -> "RunKey":
        """Read one; raises KeyFileError saying what is wrong with the file."""
        data = read_private(path, "run key")
        try:
            key = serialization.load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            how = "is damaged or cut off" if data.startswith(b"-----BEGIN") else "holds no private key in PEM form"
            raise KeyFileError(f"run key {path} {how}; it is left as it is") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise KeyFileError(f"run key {path} holds another kind of key, not an Ed25519 one; it is left as it is")
        return cls(key)

    @classmethod
    def load_or_make(cls, path: Path) -> "RunKey":
        """Read one, or make it in a file of mode 0600; a file that is there is never overwritten."""
        if not path.exists():
            pem = Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            write_new(path, pem)
        return cls.load(path)

    def sign(self, purpose: str, *parts: bytes | str) -> bytes:
        """Sign for the run."""
        return sign(self._key, purpose, *parts)

    def invite(
        self, run: str, name: str, *, now: float, seconds: float, role: str = "replica", peer_id: str = ""
    ) -> "Token":
        """Invite a guest; raises ValueError for what no invitation can say."""
        if not is_name(name):
            raise ValueError(f"name {name!r}: must have 1 to {MAX_NAME} printable characters, no blank at either end")
        if role not in ROLES:
            raise ValueError(f"role {role!r}: must be one of {', '.join(ROLES)}")
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"an invitation for {seconds} s: must be a positive time")
        if peer_id:
            try:
                public_key(peer_id)
            except ProtocolError as error:
                raise ValueError(f"{error}; `swarmkit join` prints a peer's own") from error
        secret = None if peer_id else Ed25519PrivateKey.generate()
        body = Invitation(
            run=run,
            run_key=self.public,
            name=name,
            role=role,
            issued=now,
            until=now + seconds,
            peer_id=peer_id,
            holder=secret.public_key().public_bytes_raw() if secret else b"",
        ).to_bytes()
        return Token(body, self.sign("invitation", body), secret.private_bytes_raw() if secret else b"")

    def revoke(self, name: str, *, now: float) -> bytes:
        """Sign that every invitation of this name issued up to now is void."""
        body = encode({"run_key": self.public, "name": name, "at": now})
        return encode({"body": body, "signature": self.sign("revocation", body)})


@dataclass(frozen=True, slots=True)
class Token:
    """An invitation as the guest gets it; the secret stays with the guest."""

    body: bytes
    signature: bytes
    secret: bytes

    @property
    def invitation(self) -> Invitation:
        """What it says."""
        return Invitation.from_bytes(self.body)

    def to_text(self) -> str:
        """One line to paste."""
        data = encode({"body": self.body, "signature": self.signature, "secret": self.secret})
        return PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")

    @classmethod
    def from_text(cls, text: str) -> "Token":
        """Read a pasted line; raises NotInvited when it is no invitation or was damaged on its way."""
        text = "".join(text.split())
        if not text.startswith(PREFIX):
            raise NotInvited(f"an invitation begins with {PREFIX!r}: copy the whole line", Refusal.not_invited)
        coded = text.removeprefix(PREFIX)
        try:
            if len(text) > MAX_TEXT or not coded.isascii():
                raise ProtocolError("too long, or not ASCII")
            data = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
            message = decode(data)
            token = cls(
                field(message, "body", bytes),
                field(message, "signature", bytes, lambda found: len(found) == 64),
                field(message, "secret", bytes, lambda found: len(found) in (0, 32)),
            )
            invitation = token.invitation
            fits = not token.secret or _public(token.secret) == invitation.holder
        except (ProtocolError, binascii.Error) as error:
            raise NotInvited(f"the invitation is damaged, copy the whole line ({error})", Refusal.forged) from error
        if not fits or not is_signed(invitation.run_key, token.signature, "invitation", token.body):
            raise NotInvited("the invitation's signature does not fit: copy the whole line", Refusal.forged)
        return token

    @classmethod
    def read(cls, text_or_file: str) -> "Token":
        """Read an invitation that is given itself, or as the name of a file that holds it."""
        if text_or_file.strip().startswith(PREFIX):
            return cls.from_text(text_or_file)
        try:
            with open(text_or_file, "rb") as file:
                return cls.from_text(file.read(2 * MAX_TEXT).decode(errors="replace"))
        except OSError as error:
            reason = f"{text_or_file[:100]!r} is neither an invitation nor a file that can be read ({error.strerror})"
            raise NotInvited(reason, Refusal.not_invited) from error

    def credential(self, identity: Identity) -> bytes:
        """What this peer shows others: the invitation, tied to its peer id by the secret; it is of no use to others."""
        invitation = self.invitation
        if invitation.peer_id and invitation.peer_id != identity.peer_id:
            raise NotInvited(
                f"the invitation is for peer {invitation.peer_id}, this one is {identity.peer_id}: "
                "give network.identity the key file of that peer",
                Refusal.forged,
            )
        tie = b""
        if not invitation.peer_id:
            secret = Ed25519PrivateKey.from_private_bytes(self.secret)
            tie = sign(secret, "tie", invitation.run_key, identity.peer_id)
        return encode({"body": self.body, "signature": self.signature, "tie": tie})


def read_credential(peer_id: str, data: bytes, run_key: bytes) -> Invitation:
    """Check that a credential is of this run and this peer; time and revocations are the caller's to check.

    Raises AccessRefused naming the cause.
    """
    if not data:
        raise AccessRefused("this run is closed: ask its owner for an invitation", Refusal.not_invited)
    try:
        if len(data) > MAX_CREDENTIAL_BYTES:
            raise ProtocolError("too long")
        message = decode(data)
        body, signature = field(message, "body", bytes), field(message, "signature", bytes)
        tie = field(message, "tie", bytes)
        invitation = Invitation.from_bytes(body)
    except ProtocolError as error:
        raise AccessRefused(f"the credential cannot be read ({error})", Refusal.forged) from error
    if invitation.run_key != run_key:
        raise AccessRefused(f"the invitation is for a run {invitation.run[:40]!r} of another key", Refusal.wrong_run)
    if not is_signed(run_key, signature, "invitation", body):
        raise AccessRefused("the run's key has not signed the invitation", Refusal.forged)
    if invitation.peer_id and invitation.peer_id != peer_id:
        raise AccessRefused("the invitation is for another peer id", Refusal.forged)
    if invitation.holder and not is_signed(invitation.holder, tie, "tie", run_key, peer_id):
        raise AccessRefused("the invitation was shown by a peer that does not hold its secret", Refusal.forged)
    return invitation


def read_revocation(data: bytes, run_key: bytes) -> tuple[str, float]:
    """The name and time of a signed revocation; raises ProtocolError."""
    message = decode(data)
    body, signature = field(message, "body", bytes), field(message, "signature", bytes)
    inner = decode(body)
    name, at = field(inner, "name", str, is_name), field(inner, "at", float, math.isfinite)
    if field(inner, "run_key", bytes) != run_key or not is_signed(run_key, signature, "revocation", body):
        raise ProtocolError("a revocation that the run's key has not signed")
    return name, at


def _public(secret: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
