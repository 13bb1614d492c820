"""Closed runs with real nodes: who gets in, what an outsider gets, and how one is put out."""

import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swarmkit.optim.collective import RoundKey
from swarmkit.optim.errors import RoundFailed
from swarmkit.peers.access import Access, add_revocation
from swarmkit.peers.engine import start_dht, start_p2p, stop_p2p
from swarmkit.peers.entry import enter
from swarmkit.peers.errors import AccessRefused, JoinFailed, NotInvited, PeerUnreachable, Refusal
from swarmkit.peers.hygiene import make_socket_folder
from swarmkit.peers.identity import Identity
from swarmkit.peers.invitation import RunKey, Token
from swarmkit.peers.loop import NetworkThread
from swarmkit.peers.node import Node
from swarmkit.peers.peer_cache import Remembered
from swarmkit.peers.roster import peers_key
from swarmkit.peers.rpc import Rpc
from swarmkit.peers.settings import Transport
from swarmkit.peers.transport import Bulk
from swarmkit.peers.wire import Message, encode

from .harness_closed import QUICK, ClosedRun, all_together, closed_run, identity_file

pytestmark = pytest.mark.timeout(120)
STATE = {"weight": torch.arange(1000.0)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClosedRun]:
    """One for all tests that leave it as it is."""
    with closed_run(tmp_path_factory.mktemp("run")) as made:
        made.owner.publish_config(json.dumps({"steps": 7}))
        made.owner.serve_state(lambda: (STATE, {"round": 3}))
        made.owner.announce("training")
        yield made


def refusal(run: ClosedRun, invitation: str | None) -> NotInvited:
    with pytest.raises(NotInvited) as refused:
        run.join(invitation)
    return refused.value


# -- who gets in -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", list(Transport))
def test_the_invited_get_configuration_and_state(run: ClosedRun, transport: Transport) -> None:
    guest = run.join(run.invite(), transport=transport)
    try:
        assert guest.run == run.name
        assert json.loads(guest.fetch_config()) == {"steps": 7}
        tensors, meta = guest.fetch_state(timeout=20)
        assert torch.equal(tensors["weight"], STATE["weight"])
        assert meta == {"round": 3}
    finally:
        guest.close()


def test_an_outsider_with_the_address_and_the_name_hears_that_it_is_not_invited(run: ClosedRun) -> None:
    assert refusal(run, None).refusal is Refusal.not_invited
    with pytest.raises(NotInvited, match="not invited: this run is closed"):
        Node.start(run.name, initial_peers=[run.address], settings=QUICK)


def test_an_expired_invitation_is_refused_with_its_age(run: ClosedRun) -> None:
    error = refusal(run, run.invite("late", issued=time.time() - 100.0, seconds=60.0))
    assert error.refusal is Refusal.expired
    assert re.search(r"'late' ended 4\d s ago", str(error))


def test_a_forged_invitation_is_refused(run: ClosedRun, tmp_path: Path) -> None:
    token = Token.from_text(run.invite())
    other = RunKey.load_or_make(tmp_path / "other")
    # Signed by another key, though it names the run's.
    forged = Token(token.body, other.sign("invitation", token.body), token.secret)
    with pytest.raises(NotInvited, match="forged"):
        Token.from_text(forged.to_text())
    # And so when the forger's program does not look.
    credential = forged.credential(Identity.generate())
    with pytest.raises(AccessRefused) as refused:
        run.owner._access.check(Identity.generate().peer_id, credential)
    assert refused.value.refusal is Refusal.forged


def test_an_invitation_to_another_run_is_refused(run: ClosedRun, tmp_path: Path) -> None:
    other = RunKey.load_or_make(tmp_path / "other").invite(run.name, "guest", now=time.time(), seconds=60.0)
    assert refusal(run, other.to_text()).refusal is Refusal.wrong_run
    # The same owner's, to another run.
    sibling = run.key.invite("sibling", "guest", now=time.time(), seconds=60.0)
    assert refusal(run, sibling.to_text()).refusal is Refusal.wrong_run
    # An invitation shown at an open run is no way in either: the guest would take another run for its own.
    with_open = Node.start("open", settings=QUICK)
    try:
        settings = replace(QUICK, invitation=run.invite())
        with pytest.raises(NotInvited, match="wrong run"):
            Node.start(initial_peers=[with_open.addresses[0]], settings=settings, existing=True)
    finally:
        with_open.close()


def test_an_invitation_that_names_a_peer_is_of_no_use_to_others(run: ClosedRun, tmp_path: Path) -> None:
    file, peer_id = identity_file(tmp_path)
    invitation = run.invite("bound", peer_id=peer_id)
    with pytest.raises(NotInvited, match=f"is for peer {peer_id}"):
        run.join(invitation)
    guest = run.join(invitation, identity=file)
    assert guest.peer_id == peer_id
    guest.close()


def test_a_credential_that_was_overheard_is_of_no_use(run: ClosedRun) -> None:
    """Replayed by another peer, whose id libp2p proves to be another."""
    guest = run.join(run.invite())
    try:
        overheard = guest._access.credential
        with pytest.raises(AccessRefused, match="does not hold its secret"):
            run.owner._access.check(Identity.generate().peer_id, overheard)
    finally:
        guest.close()


def test_onlookers_see_the_table_and_nothing_else(run: ClosedRun) -> None:
    onlooker = run.join(run.invite("onlooker", role="observer"), role="observer")
    try:
        assert run.owner.peer_id in [record.peer_id for record in onlooker.refresh()]
        assert json.loads(onlooker.fetch_config()) == {"steps": 7}
        with pytest.raises(JoinFailed, match="role of observer only"):
            onlooker.fetch_state(timeout=20)
    finally:
        onlooker.close()
    # Nor does it get into the table by saying that it is a replica.
    liar = run.join(run.invite("liar", role="observer"), role="replica")
    try:
        liar.announce("training")
        assert liar.peer_id not in [record.peer_id for record in run.owner.refresh()]
    finally:
        liar.close()


# -- what an outsider can do without asking ----------------------------------------------------------------------------


class Outsider:
    """Speaks the protocol, and has no invitation: a node whose own checks are out of the way."""

    def __init__(self, run: ClosedRun) -> None:
        self.run = run
        self.thread = NetworkThread()
        self.sockets = make_socket_folder()
        self.identity = Identity.generate()
        self.p2p = self.thread.run(start_p2p(QUICK, self.sockets, self.identity), timeout=30)
        self.thread.run(enter(self.p2p, [run.address], Remembered()), timeout=30)

        self.rpc = Rpc(self.p2p, run.name, Access(self.identity, None))
        self.bulk = Bulk(self.p2p, self.rpc, run.name, QUICK)

    def call(self, method: str, message: Message) -> Message:
        call = self.rpc.call(self.run.owner.peer_id, method, message, timeout=5.0)
        return self.thread.run(call, timeout=10)

    def stream(self, kind: str, message: Message) -> list[bytes]:
        async def nothing() -> AsyncIterator[bytes]:
            for chunk in list[bytes]():
                yield chunk

        async def read() -> list[bytes]:
            header = {**message, "kind": kind, "credential": b""}

            messages = self.bulk._with_header(encode(header), nothing())
            return [chunk async for chunk in self.bulk._open_libp2p(self.run.owner.peer_id, messages)]

        return self.thread.run(read(), timeout=15)

    def close(self) -> None:
        self.thread.run(stop_p2p(self.p2p), timeout=10)
        self.thread.close()


@pytest.fixture
def outsider(run: ClosedRun) -> Iterator[Outsider]:
    made = Outsider(run)
    try:
        yield made
    finally:
        made.close()


def test_an_outsider_gets_no_answer_to_any_call_and_disturbs_no_round(run: ClosedRun, outsider: Outsider) -> None:
    for method in list(run.owner._rpc._handlers):
        with pytest.raises(AccessRefused, match="not invited"):
            outsider.call(method, {"round": "x", "index": 0})
    with pytest.raises(AccessRefused):
        outsider.call("no such method", {})
    collective = run.owner.collective()
    result = collective.all_reduce([torch.ones(3)], round=RoundKey("quiet", 0), weight=1.0).result(10)
    assert result.members == (run.owner.peer_id,)


@pytest.mark.parametrize("kind", ["state", "reduce", "gather"])
def test_an_outsider_gets_no_stream(run: ClosedRun, outsider: Outsider, kind: str) -> None:
    told = []
    for _ in range(5):
        with pytest.raises(PeerUnreachable) as refused:
            outsider.stream(kind, {"ticket": "x", "offset": 0, "attempt": "x"})
        told.append(str(refused.value))
        if "not invited" in told[-1]:
            return  # at times the stream is gone before its reason has come
    pytest.fail(f"never told why: {told}")


def test_an_outsider_cannot_read_or_write_the_dht(run: ClosedRun, outsider: Outsider) -> None:
    with pytest.raises(JoinFailed):
        outsider.thread.run(start_dht(outsider.p2p, [run.address]), timeout=20)
    stored = run.owner._thread.run(run.owner._dht.get(peers_key(run.name), latest=True), timeout=10)
    assert outsider.identity.peer_id not in stored.value


# -- how one is put out ------------------------------------------------------------------------------------------------


def test_who_is_revoked_is_out_of_the_table_the_rounds_and_the_door_within_seconds(tmp_path: Path) -> None:
    with closed_run(tmp_path) as run:
        bad_invitation = run.invite("bad")
        good, bad = run.join(run.invite("good")), run.join(bad_invitation)
        collectives = [node.collective() for node in (run.owner, good, bad)]
        for node in (run.owner, good, bad):
            assert node.wait_for_peers(3, timeout=20)
        assert [len(result.members) for result in all_together(collectives, 0)] == [3, 3, 3]
        add_revocation(run.key_file, "bad", now=time.time())
        # The owner's peer reads the list with its next heartbeat, and tells everybody.
        deadline = time.monotonic() + 15
        while any(bad.peer_id in [r.peer_id for r in node.table()] for node in (run.owner, good)):
            assert time.monotonic() < deadline
            run.owner.wait_for_peers(99, timeout=0.1)
        futures = [c.all_reduce([torch.ones(3)], round=RoundKey("x", 1), weight=1.0) for c in collectives]
        assert [len(future.result(15).members) for future in futures[:2]] == [2, 2]
        with pytest.raises(RoundFailed):
            futures[2].result(15)
        # Nobody will ever serve it the state: to try again, as after other failures, would hide the cause.
        with pytest.raises(NotInvited, match="revoked: the invitation of 'bad' was revoked"):
            bad.fetch_state(timeout=15)
        with pytest.raises(NotInvited, match="revoked: the invitation of 'bad' was revoked"):
            run.join(bad_invitation)
        # Invited anew, the same person may come again.
        again = run.join(run.invite("bad", issued=time.time() + 1.0))
        assert again.run == run.name


def test_an_invitation_that_ends_ends_what_its_guest_does(tmp_path: Path) -> None:
    with closed_run(tmp_path) as run:
        guest = run.join(run.invite("short", seconds=6.0))
        collectives = [run.owner.collective(), guest.collective()]
        assert run.owner.wait_for_peers(2, timeout=10)
        assert guest.wait_for_peers(2, timeout=10)
        assert [len(result.members) for result in all_together(collectives, 0)] == [2, 2]
        late = time.monotonic() + 12
        while not collectives[1]._closed:
            assert time.monotonic() < late
            guest.wait_for_peers(99, timeout=0.2)
        with pytest.raises(RoundFailed, match="expired"):
            collectives[1].all_reduce([torch.ones(3)], round=RoundKey("x", 1), weight=1.0).result(10)
        alone = collectives[0].all_reduce([torch.ones(3)], round=RoundKey("x", 1), weight=1.0).result(10)
        assert alone.members == (run.owner.peer_id,)


def test_only_the_owner_publishes_the_configuration(run: ClosedRun) -> None:
    guest = run.join(run.invite("meddler"))
    try:
        with pytest.raises(ValueError, match="only the owner of the run key"):
            guest.publish_config("{}")
        # One that it offers nevertheless is not taken.
        guest._config._text = '{"steps": 9}'
        guest._config._signature = guest._access.identity.sign("configuration", run.name, '{"steps": 9}')
        guest._roster.say(config="0" * 32)
        guest.announce("training")
        third = run.join(run.invite("third"))
        assert json.loads(third.fetch_config()) == {"steps": 7}
        third.close()
    finally:
        guest.close()
