"""Invitations, credentials and key files: what is accepted is what was signed, and every fault has its name."""

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkit.peers.access import Access, add_revocation, open_access, read_revocations, revocations_file
from swarmkit.peers.engine import PeerID
from swarmkit.peers.errors import AccessRefused, KeyFileError, NotInvited, ProtocolError, Refusal
from swarmkit.peers.identity import Identity, is_signed, public_key
from swarmkit.peers.invitation import PREFIX, RunKey, Token, is_name, read_credential, read_revocation
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.wire import encode

NOW = 1_000_000.0
names = st.text(st.characters(blacklist_categories=("C", "Z")), min_size=1, max_size=60).filter(is_name)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> RunKey:
    return RunKey.load_or_make(tmp_path_factory.mktemp("key") / "run-key")


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def access_of(key: RunKey, token: Token | None, clock: Clock, run: str = "run") -> Access:
    identity = Identity.generate()
    credential = b"" if token is None else token.credential(identity)
    return Access(identity, run, run_key=key.public, credential=credential, clock=clock)


# -- the token ---------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    run=names,
    guest=names,
    seconds=st.floats(1e-3, 1e9),
    is_bound=st.booleans(),
    role=st.sampled_from(["replica", "observer"]),
)
def test_what_was_invited_is_what_is_read(
    key: RunKey, run: str, guest: str, seconds: float, is_bound: bool, role: str
) -> None:
    peer_id = Identity.generate().peer_id if is_bound else ""
    token = key.invite(run, guest, now=NOW, seconds=seconds, role=role, peer_id=peer_id)
    text = token.to_text()
    assert text.isascii()
    assert len(text.split()) == 1
    # Mail programs break lines.
    again = Token.from_text(f"  {text[:50]}\n{text[50:]}\n")
    assert again == token
    found = again.invitation
    assert (found.run, found.name, found.role, found.peer_id) == (run, guest, role, peer_id)
    assert (found.issued, found.until) == (NOW, NOW + seconds)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_an_invitation_with_any_character_changed_is_refused(key: RunKey, data: st.DataObject) -> None:
    text = key.invite("run", "guest", now=NOW, seconds=60.0).to_text()
    position = data.draw(st.integers(len(PREFIX), len(text) - 2))  # the last one holds unused bits
    other = data.draw(st.sampled_from("ABCDwxyz0189-_").filter(lambda c: c != text[position]))
    with pytest.raises(NotInvited) as refused:
        Token.from_text(text[:position] + other + text[position + 1 :])
    assert refused.value.refusal is Refusal.forged


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda raw: PREFIX + raw.hex()))
def test_anything_else_is_no_invitation_and_never_another_error(text: str) -> None:
    with pytest.raises(NotInvited):
        Token.from_text(text)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400))
def test_rubbish_is_no_credential_and_never_another_error(key: RunKey, data: bytes) -> None:
    with pytest.raises(AccessRefused):
        read_credential(Identity.generate().peer_id, data, key.public)


@pytest.mark.parametrize("cut", [10, 40, 200])
def test_a_line_that_was_not_copied_whole_says_so(key: RunKey, cut: int) -> None:
    text = key.invite("run", "guest", now=NOW, seconds=60.0).to_text()
    with pytest.raises(NotInvited, match="copy the whole line"):
        Token.from_text(text[:-cut])


def test_an_invitation_comes_from_a_file_too(key: RunKey, tmp_path: Path) -> None:
    token = key.invite("run", "guest", now=NOW, seconds=60.0)
    (tmp_path / "guest.invite").write_text(token.to_text() + "\n")
    assert Token.read(str(tmp_path / "guest.invite")) == token
    with pytest.raises(NotInvited, match="neither an invitation nor a file"):
        Token.read(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "two\nlines"}, "printable"),
        ({"name": "x" * 61}, "1 to 60"),
        ({"role": "king"}, "one of replica"),
        ({"seconds": 0.0}, "positive"),
        ({"seconds": float("inf")}, "positive"),
        ({"peer_id": "QmTTSmGoWvbDzYNU4GSLsPUw8sk6xRZBN71BrEkQ2HxvVc"}, "no peer id of an Ed25519 key"),
    ],
)
def test_what_no_invitation_can_say_is_refused(key: RunKey, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        key.invite("run", **{"name": "guest", "now": NOW, "seconds": 60.0, **changes})  # type: ignore[arg-type]


# -- whom an access lets pass ------------------------------------------------------------------------------------------


def cause(access: Access, guest: Access, *, takes_part: bool = False) -> Refusal | None:
    try:
        access.check(guest.identity.peer_id, guest.credential, takes_part=takes_part)
    except AccessRefused as error:
        return error.refusal
    return None


def test_every_cause_has_its_name(key: RunKey, tmp_path: Path) -> None:
    clock = Clock()
    owner = access_of(key, None, clock)
    other = RunKey.load_or_make(tmp_path / "other")
    guest = access_of(key, key.invite("run", "guest", now=NOW, seconds=60.0), clock)
    assert cause(owner, guest) is None
    assert cause(owner, access_of(key, None, clock)) is Refusal.not_invited
    assert cause(owner, access_of(key, other.invite("run", "guest", now=NOW, seconds=60.0), clock)) is Refusal.wrong_run
    assert cause(owner, access_of(key, key.invite("ran", "guest", now=NOW, seconds=60.0), clock)) is Refusal.wrong_run
    thief = access_of(key, None, clock)
    thief.credential = guest.credential
    assert cause(owner, thief) is Refusal.forged
    observer = access_of(key, key.invite("run", "o", now=NOW, seconds=60.0, role="observer"), clock)
    assert cause(owner, observer) is None
    assert cause(owner, observer, takes_part=True) is Refusal.not_invited
    clock.now += 61.0
    # Also of whom it has seen before: signatures are verified once, times always.
    assert cause(owner, guest) is Refusal.expired


def test_a_revocation_holds_for_what_was_issued_before_it(key: RunKey) -> None:
    clock = Clock()
    owner = access_of(key, None, clock)
    before = access_of(key, key.invite("run", "guest", now=NOW, seconds=600.0), clock)
    after = access_of(key, key.invite("run", "guest", now=NOW + 2, seconds=600.0), clock)
    other = access_of(key, key.invite("run", "other", now=NOW, seconds=600.0), clock)
    assert cause(owner, before) is None
    revocation = key.revoke("guest", now=NOW + 1)
    assert owner.revocations_digest == ""
    assert owner.adopt([revocation])
    assert not owner.adopt([revocation]), "nothing new"
    assert [cause(owner, guest) for guest in (before, after, other)] == [Refusal.revoked, None, None]
    assert owner.revocations_digest
    before.adopt([revocation])
    with pytest.raises(AccessRefused, match="revoked"):
        before.check_own()


def test_a_revocation_that_another_signed_is_refused(key: RunKey, tmp_path: Path) -> None:
    other = RunKey.load_or_make(tmp_path / "other")
    body = encode({"run_key": key.public, "name": "guest", "at": NOW})
    forged = encode({"body": body, "signature": other.sign("revocation", body)})
    with pytest.raises(ProtocolError, match="has not signed"):
        access_of(key, None, Clock()).adopt([forged])
    # A signature for one purpose is good for no other.
    crossed = encode({"body": body, "signature": key.sign("invitation", body)})
    with pytest.raises(ProtocolError, match="has not signed"):
        read_revocation(crossed, key.public)


def test_known_credentials_cost_no_signature(key: RunKey, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, guest = (access_of(key, key.invite("run", n, now=NOW, seconds=60.0), Clock()) for n in ("o", "g"))
    assert cause(owner, guest) is None
    monkeypatch.setattr("swarmkit.peers.invitation.is_signed", None)
    for _ in range(100):
        assert cause(owner, guest) is None


# -- files -------------------------------------------------------------------------------------------------------------


def test_key_files_are_for_their_owner_only_and_stay(tmp_path: Path) -> None:
    run_key, identity = tmp_path / "run-key", tmp_path / "identity"
    os.umask(os.umask(0) & 0)  # whatever the umask
    key, mine = RunKey.load_or_make(run_key), Identity.load_or_make(identity)
    for path in (run_key, identity):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert RunKey.load_or_make(run_key).public == key.public
    assert Identity.load_or_make(identity).peer_id == mine.peer_id
    assert sorted(path.name for path in tmp_path.iterdir()) == ["identity", "run-key"], "no temporary file is left"


def test_a_peer_id_is_libp2ps_and_gives_the_key_back() -> None:
    identity = Identity.generate()
    assert PeerID.from_base58(identity.peer_id).to_bytes()[6:] == identity.public
    assert public_key(identity.peer_id) == identity.public
    assert is_signed(identity.public, identity.sign("x", b"a", "b"), "x", b"a", "b")
    assert not is_signed(identity.public, identity.sign("x", b"a", "b"), "x", b"ab")


RSA = rsa.generate_private_key(65537, 2048).private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
)


@pytest.mark.parametrize(
    ("what", "data", "mode", "reason"),
    [
        ("run key", b"", 0o600, "is empty"),
        ("run key", None, 0o600, "damaged or cut off"),
        ("run key", RSA, 0o600, "another kind of key"),
        ("run key", b"hello", 0o600, "no private key"),
        ("run key", RSA, 0o644, "can be read by others"),
        ("identity", b"", 0o600, "is empty"),
        ("identity", None, 0o600, "is damaged"),
        ("identity", b"\x08\x00\x12\xa7", 0o600, "RSA key"),
        ("identity", b"hello", 0o600, "no libp2p key"),
        ("identity", b"hello", 0o604, "can be read by others"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_named_in_one_line_and_left_as_it_is(
    tmp_path: Path, what: str, data: bytes | None, mode: int, reason: str
) -> None:
    path = tmp_path / "file"
    read = RunKey.load_or_make if what == "run key" else Identity.load_or_make
    if data is None:
        read(path)
        data = path.read_bytes()[:60]
    path.write_bytes(data)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=reason) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert path.read_bytes() == data


def test_the_owners_list_of_revocations_grows_and_its_damage_is_no_pardon(tmp_path: Path) -> None:
    path = tmp_path / "run-key"
    key = RunKey.load_or_make(path)
    assert read_revocations(path, key) == []
    for name in ("a", "b"):
        add_revocation(path, name, now=NOW)
    assert [read_revocation(data, key.public) for data in read_revocations(path, key)] == [("a", NOW), ("b", NOW)]
    access, _ = open_access(Identity.generate(), "run", NetworkSettings(run_key=str(path)))
    assert len(access.revocations) == 2
    revocations_file(path).write_bytes(b"rubbish")
    with pytest.raises(KeyFileError, match=r"revoked cannot be read"):
        open_access(Identity.generate(), "run", NetworkSettings(run_key=str(path)))
