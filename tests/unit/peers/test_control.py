"""The control plane's server and client over real sockets: calls, health, reflection, limits, TLS."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from swarmkit.peers import control_pb2 as pb
from swarmkit.peers.control import HEALTH, MAX_WAITING, MAX_WATCHERS, SERVICE, ControlServer
from swarmkit.peers.control_client import ControlClient
from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.grpc_library import grpc
from swarmkit.peers.loop import NetworkThread
from swarmkit.peers.settings import ControlSettings, Tls
from tests.unit.peers.harness_certificates import Authority

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[3]


class Peer:
    """Answers what the tests look for."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.written: Future[pb.CheckpointReply] | None = Future()

    def status(self) -> pb.StatusReply:
        return pb.StatusReply(run="demo", peer_id="12D3", state="training", peers=[pb.Peer(peer_id="12D3", step=7)])

    def drain(self, reason: str) -> pb.DrainReply:
        self.reasons.append(reason)
        return pb.DrainReply(already=len(self.reasons) > 1, within_s=20.0)

    def checkpoint(self) -> "Future[pb.CheckpointReply] | None":
        return self.written


class Served:
    """A server in a network thread of its own."""

    def __init__(self, settings: ControlSettings | None = None) -> None:
        self.peer = Peer()
        self.thread = NetworkThread()
        self.server = ControlServer(self.thread, self.peer, settings or ControlSettings())
        try:
            self.thread.run(self.server.start(), timeout=10)
        except OSError:
            self.thread.close()
            raise
        self.target = self.server.target

    def close(self) -> None:
        self.thread.run(self.server.close(), timeout=10)
        self.thread.close()


@pytest.fixture
def served() -> Iterator[Served]:
    running = Served()
    yield running
    running.close()


@pytest.fixture
def client(served: Served) -> Iterator[ControlClient]:
    with ControlClient(served.target) as made:
        yield made


def probe(target: str, service: str) -> str:
    """What grpc_health_probe does."""
    with grpc.insecure_channel(target) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def test_status_tells_what_the_peer_says(client: ControlClient) -> None:
    reply = client.status()
    assert (reply.run, reply.state, reply.peers[0].step) == ("demo", "training", 7)


def test_drain_answers_at_once_and_asking_again_changes_nothing(client: ControlClient, served: Served) -> None:
    assert not client.drain("upgrade").already
    again = client.drain("up\x1b[31mgrade\n" + "x" * 500)
    assert again.already
    assert again.within_s == 20.0
    # What ends up in logs and on terminals has neither control characters nor any length.
    assert served.peer.reasons[0] == "upgrade"
    assert served.peer.reasons[1].startswith("up[31mgrade")
    assert len(served.peer.reasons[1]) <= 200


def test_a_checkpoint_is_answered_when_it_is_written(client: ControlClient, served: Served) -> None:
    assert served.peer.written is not None
    served.peer.written.set_result(pb.CheckpointReply(path="/x/step-7", step=7))
    assert client.checkpoint(timeout=5).path == "/x/step-7"


def test_a_checkpoint_that_fails_or_takes_too_long_is_told(client: ControlClient, served: Served) -> None:
    with pytest.raises(PeerUnreachable, match="in time"):
        client.checkpoint(timeout=0.3)
    served.peer.written = Future()
    served.peer.written.set_exception(OSError("no space left"))
    with pytest.raises(ProtocolError, match="no space left"):
        client.checkpoint(timeout=5)
    served.peer.written = None
    with pytest.raises(ProtocolError, match="does not train"):
        client.checkpoint(timeout=5)


def test_metrics_arrive_in_order_until_the_peer_ends(served: Served) -> None:
    with ControlClient(served.target) as client:
        happened = client.watch(timeout=20)
        assert next(happened).state.state == "training"
        for number in range(5):
            served.server.publish(pb.Metrics(round=pb.Round(round=number)))
        assert [next(happened).round.round for _ in range(5)] == list(range(5))
        served.server.publish(pb.Metrics(done=pb.Done(step=9)))
        closing = served.thread.submit(served.server.close())
        assert [metrics.done.step for metrics in happened] == [9]
        closing.result(10)
        served.server.publish(pb.Metrics())  # after the end: nobody hears it, and nothing breaks


def test_a_watcher_that_is_behind_misses_the_oldest_and_hears_how_many(served: Served) -> None:
    with ControlClient(served.target) as client:
        happened = client.watch(timeout=20)
        next(happened)
        # More than sockets and queues hold while nobody reads.
        text = "x" * 20_000
        total = 4 * MAX_WAITING
        for number in range(total):
            served.server.publish(pb.Metrics(round=pb.Round(round=number, failed=text)))
        served.server.publish(pb.Metrics(done=pb.Done(step=1)))
        seen, dropped = [], 0
        for metrics in happened:
            dropped += metrics.dropped
            if metrics.HasField("done"):
                break
            seen.append(metrics.round.round)
        assert dropped > 0
        assert len(seen) + dropped == total
        assert seen == sorted(seen)
        assert seen[-1] == total - 1


def test_only_so_many_may_watch(served: Served) -> None:
    with ControlClient(served.target) as client:
        watching = [client.watch(timeout=20) for _ in range(MAX_WATCHERS)]
        for happened in watching:
            next(happened)
        with pytest.raises(ProtocolError, match="watch already"):
            next(client.watch(timeout=20))
        watching.pop().close()  # type: ignore[attr-defined]
        client.status()
        while True:  # the server hears of it soon
            try:
                assert next(client.watch(timeout=20)).state.state == "training"
                break
            except ProtocolError:
                continue


def test_health_is_the_standard_service_and_says_when_the_peer_leaves(served: Served) -> None:
    for service in ("", SERVICE):
        assert probe(served.target, service) == "SERVING"
    with pytest.raises(grpc.RpcError) as caught:
        probe(served.target, "nothing.like.it")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    served.server.leaving()
    served.thread.run(_nothing(), timeout=5)
    while probe(served.target, SERVICE) != "NOT_SERVING":
        continue


async def _nothing() -> None:
    return


def test_reflection_describes_the_services(served: Served) -> None:
    with grpc.insecure_channel(served.target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, HEALTH} <= set(database.get_services())
        described = database.FindFileContainingSymbol(SERVICE)
    assert [method.name for method in described.service[0].method] == ["Status", "Drain", "Checkpoint", "WatchMetrics"]


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"\0" * (1 << 20), "RESOURCE_EXHAUSTED"),
        (b"\xff" * 100, "INVALID_ARGUMENT"),
        (b"\x0a\x05ab", "INVALID_ARGUMENT"),
    ],
    ids=["huge", "garbage", "cut"],
)
def test_what_a_hostile_caller_sends_is_refused_and_the_server_lives(
    served: Served, client: ControlClient, request_bytes: bytes, code: str
) -> None:
    with grpc.insecure_channel(served.target) as channel:
        for method in ("Status", "Drain", "Checkpoint"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{SERVICE}/{method}")(request_bytes, timeout=5)
            assert caught.value.code().name == code
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{SERVICE}/Nothing")(b"", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert served.peer.reasons == []
    assert client.status().run == "demo"


def test_a_port_that_is_taken_is_refused(served: Served) -> None:
    with pytest.raises(OSError, match="port taken"):
        Served(ControlSettings(port=int(served.target.rpartition(":")[2])))


def test_nobody_there_is_told_with_the_address() -> None:
    with ControlClient("127.0.0.1:9") as client, pytest.raises(PeerUnreachable, match=r"answers at 127\.0\.0\.1:9"):
        client.status(timeout=5)


def test_beyond_loopback_it_needs_mutual_tls() -> None:
    certificate, key = Authority("swarm").vouch("peer")
    for tls in (None, Tls(certificate, key)):
        with pytest.raises(ValueError, match="needs TLS with a client CA"):
            ControlSettings(host="0.0.0.0", tls=tls)
    ControlSettings(host="0.0.0.0", tls=Tls(certificate, key, certificate))


def test_only_callers_with_a_certificate_of_the_right_authority_get_in() -> None:
    servers, clients, strangers = Authority("servers"), Authority("clients"), Authority("strangers")
    certificate, key = servers.vouch("peer")
    served = Served(ControlSettings(host="0.0.0.0", tls=Tls(certificate, key, clients.certificate)))
    target = served.target.replace("0.0.0.0", "127.0.0.1")
    try:
        mine = clients.vouch("me")
        with ControlClient(target, Tls(*mine, servers.certificate)) as client:
            assert client.status().run == "demo"
        refused = [
            None,
            Tls(b"", b"", servers.certificate),
            Tls(*strangers.vouch("me"), servers.certificate),
            Tls(*mine, strangers.certificate),  # it is the server that is not believed
        ]
        for tls in refused:
            with ControlClient(target, tls) as client, pytest.raises(PeerUnreachable):
                client.drain("let me in", timeout=5)
        assert served.peer.reasons == []
    finally:
        served.close()


def test_the_generated_code_is_that_of_the_proto_file(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT), f"--pyi_out={tmp_path}",
         f"--descriptor_set_out={tmp_path}/set", "swarmkit/peers/control.proto"], check=True, cwd=ROOT
    )  # fmt: skip
    written = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(written)
    compiled = FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file[0]
    for field in (message_field for message in compiled.message_type for message_field in message.field):
        field.ClearField("json_name")  # only protoc fills it in
    for message in written.message_type:
        for field in message.field:
            field.ClearField("json_name")
    assert written == compiled, "run make proto"
    stubs = (tmp_path / "swarmkit" / "peers" / "control_pb2.pyi").read_text()
    assert (ROOT / "peers" / "control_pb2.pyi").read_text() == stubs, "run make proto"
