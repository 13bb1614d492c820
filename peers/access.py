"""Who may take part in a run: everybody in an open one, holders of a valid invitation in a closed one."""

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from swarmkit.peers.clock import swarm_time
from swarmkit.peers.errors import AccessRefused, KeyFileError, NotInvited, ProtocolError, Refusal
from swarmkit.peers.identity import Identity
from swarmkit.peers.invitation import FOUNDER, Invitation, RunKey, Token, read_credential, read_revocation
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.wire import decode, encode

logger = logging.getLogger(__name__)
MAX_REMEMBERED = 4096  # peers whose credential need not be checked again
MAX_REVOCATIONS = 4096
FOUNDER_S = 3650 * 86400.0
NO_RUN_KEY = b""


class Access:
    """Checks the credentials of other peers and holds this one's."""

    def __init__(
        self,
        identity: Identity,
        run: str | None,
        *,
        run_key: bytes = NO_RUN_KEY,
        credential: bytes = b"",
        clock: Callable[[], float] = swarm_time,
    ) -> None:
        self.identity = identity
        self.run = run  # of a closed run; None: open, and the name need not be known yet
        self.run_key = run_key  # public half
        self.credential = credential  # what this peer shows; empty in an open run
        self.on_revoked: list[Callable[[], None]] = []
        self._clock = clock
        self._seen: OrderedDict[str, tuple[bytes, Invitation]] = OrderedDict()
        self._revoked: dict[str, float] = {}  # name -> invitations issued up to then are void
        self._revocations: dict[str, bytes] = {}  # the same, as signed

    @property
    def is_closed(self) -> bool:
        """True when peers need an invitation."""
        return bool(self.run_key)

    def check(self, peer_id: str, credential: bytes, *, takes_part: bool = False) -> None:
        """Let a peer, whose id is proven, pass; raises AccessRefused naming the cause.

        Signatures are verified once for each peer and credential. Who `takes_part` needs the role of a replica.
        """
        if not self.is_closed or peer_id == self.identity.peer_id:
            return
        known = self._seen.get(peer_id)
        if known is None or known[0] != credential:
            invitation = read_credential(peer_id, credential, self.run_key)
            self._judge(invitation)
            self._seen[peer_id] = known = credential, invitation
            while len(self._seen) > MAX_REMEMBERED:
                self._seen.popitem(last=False)
        self._judge(known[1])
        if takes_part and known[1].role != "replica":
            raise AccessRefused(f"the invitation is for the role of {known[1].role} only", Refusal.not_invited)

    def check_known(self, peer_id: str, *, takes_part: bool = False) -> None:
        """Let a peer pass whose credential was seen before; raises AccessRefused."""
        known = self._seen.get(peer_id)
        self.check(peer_id, known[0] if known is not None else b"", takes_part=takes_part)

    def check_own(self) -> None:
        """Raise AccessRefused when this peer's own invitation has ended."""
        if self.is_closed:
            self._judge(read_credential(self.identity.peer_id, self.credential, self.run_key))

    def may_appear_as(self, peer_id: str, role: str) -> bool:
        """Whether a peer that has been let in may have this role in the table."""
        known = self._seen.get(peer_id)
        return (
            not self.is_closed
            or peer_id == self.identity.peer_id
            or (known is not None and known[1].role in ("replica", role))
        )

    def _judge(self, invitation: Invitation) -> None:
        if invitation.run != self.run:
            raise AccessRefused(f"the invitation is for run {invitation.run[:40]!r}", Refusal.wrong_run)
        if self._revoked.get(invitation.name, -1.0) >= invitation.issued:
            raise AccessRefused(f"the invitation of {invitation.name!r} was revoked", Refusal.revoked)
        late = self._clock() - invitation.until
        if late > 0:
            raise AccessRefused(
                f"the invitation of {invitation.name!r} ended {late:.0f} s ago: ask for a new one", Refusal.expired
            )

    # -- revocations ---------------------------------------------------------------------------------------------------

    @property
    def revocations(self) -> list[bytes]:
        """Every signed revocation that is known."""
        return list(self._revocations.values())

    @property
    def revocations_digest(self) -> str:
        """Equal on peers that know the same revocations; empty without any."""
        if not self._revoked:
            return ""
        text = repr(sorted(self._revoked.items()))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def adopt(self, revocations: Sequence[object]) -> bool:
        """Take over signed revocations; True when there was a new one. Raises ProtocolError for a false one."""
        if len(revocations) > MAX_REVOCATIONS:
            raise ProtocolError(f"{len(revocations)} revocations: {MAX_REVOCATIONS} at most")
        is_new = False
        known = set(self._revocations.values())
        for data in revocations:
            if not isinstance(data, bytes):
                raise ProtocolError("a revocation is not bytes")
            if data in known:
                continue
            name, at = read_revocation(data, self.run_key)
            if at > self._revoked.get(name, -1.0) and (name in self._revoked or len(self._revoked) < MAX_REVOCATIONS):
                self._revoked[name], self._revocations[name] = at, data
                is_new = True
                logger.warning("invitations of %r are revoked", name)
        if is_new:
            for callback in self.on_revoked:
                callback()
        return is_new


def open_access(identity: Identity, run: str | None, settings: NetworkSettings) -> tuple[Access, RunKey | None]:
    """The access that settings ask for, and the run key where this peer has it.

    Raises NotInvited for an invitation that cannot be used and KeyFileError for a run key that cannot.
    """
    if settings.run_key is not None:
        if run is None:
            raise ValueError("the owner of a run key has to say the run's name")
        path = Path(settings.run_key)
        key = RunKey.load_or_make(path)
        token = key.invite(run, FOUNDER, now=swarm_time(), seconds=FOUNDER_S, peer_id=identity.peer_id)
        access = Access(identity, run, run_key=key.public, credential=token.credential(identity))
        access.adopt(read_revocations(path, key))
        return access, key
    if settings.invitation is None:
        return Access(identity, None), None
    token = Token.read(settings.invitation)
    invitation = token.invitation
    if run is not None and run != invitation.run:
        raise NotInvited(f"the invitation is for run {invitation.run!r}, not {run!r}", Refusal.wrong_run)
    access = Access(identity, invitation.run, run_key=invitation.run_key, credential=token.credential(identity))
    return access, None


# -- the owner's list of revocations, beside the run key ---------------------------------------------------------------


def revocations_file(run_key: Path) -> Path:
    """Where the owner's revocations are kept."""
    return run_key.with_name(run_key.name + ".revoked")


def read_revocations(run_key: Path, key: RunKey) -> list[bytes]:
    """What the owner has revoked; raises KeyFileError when the list is damaged, for who is on it must stay out."""
    path = revocations_file(run_key)
    if not path.exists():
        return []
    try:
        found = decode(path.read_bytes()).get("revocations")
        if not isinstance(found, list):
            raise ProtocolError("no list of revocations")
        for data in found:
            read_revocation(data if isinstance(data, bytes) else b"", key.public)
    except (OSError, ProtocolError) as error:
        raise KeyFileError(f"the revocations in {path} cannot be read: {error}") from error
    return found


def add_revocation(run_key: Path, name: str, *, now: float) -> bytes:
    """Revoke a name's invitations in the owner's list and return the signed revocation."""
    key = RunKey.load(run_key)
    known = read_revocations(run_key, key)
    data = key.revoke(name, now=now)
    path = revocations_file(run_key)
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(encode({"revocations": [*known, data]}))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {error.strerror or error}") from error
    return data
