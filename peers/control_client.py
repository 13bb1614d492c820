"""Calls a peer's control plane: every call has a deadline, every answer a limit."""

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from swarmkit.peers import control_pb2 as pb
from swarmkit.peers.control import SERVICE
from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.grpc_library import grpc
from swarmkit.peers.settings import Tls

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 4 << 20
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
# What a peer answers of its own accord; every other code says that it could not be reached.
REFUSALS = {"FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "INTERNAL", "UNIMPLEMENTED", "INVALID_ARGUMENT", "ABORTED"}


class ControlClient:
    """A connection to one peer; raises PeerUnreachable, or ProtocolError when the peer refuses."""

    def __init__(self, target: str, tls: Tls | None = None) -> None:
        """Connect when the first call is made; `target` is host:port, and `tls.ca` signed the peer's certificate."""
        self.target = target
        if tls is None:
            self._channel = grpc.insecure_channel(target, options=OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(tls.ca, tls.key or None, tls.certificate or None)
            self._channel = grpc.secure_channel(target, credentials, options=OPTIONS)

    def status(self, *, timeout: float = TIMEOUT_S) -> pb.StatusReply:
        """Ask where the peer stands."""
        answer = self._call("Status", pb.StatusRequest(), pb.StatusReply, timeout)
        assert isinstance(answer, pb.StatusReply)
        return answer

    def drain(self, reason: str, *, timeout: float = TIMEOUT_S) -> pb.DrainReply:
        """Have the peer leave; returns at once."""
        answer = self._call("Drain", pb.DrainRequest(reason=reason), pb.DrainReply, timeout)
        assert isinstance(answer, pb.DrainReply)
        return answer

    def checkpoint(self, *, timeout: float) -> pb.CheckpointReply:
        """Have a checkpoint written; returns when it is on the peer's disk."""
        answer = self._call("Checkpoint", pb.CheckpointRequest(), pb.CheckpointReply, timeout)
        assert isinstance(answer, pb.CheckpointReply)
        return answer

    def watch(self, *, timeout: float | None = None) -> Iterator[pb.Metrics]:
        """Yield what happens until the peer ends its stream; raises PeerUnreachable when it breaks or time is up.

        The first message is the peer's state, sent at once.
        """
        call = self._channel.unary_stream(
            f"/{SERVICE}/WatchMetrics",
            request_serializer=pb.WatchMetricsRequest.SerializeToString,
            response_deserializer=pb.Metrics.FromString,
        )(pb.WatchMetricsRequest(), timeout=timeout)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._explain(error) from error
        finally:
            call.cancel()

    def _call(self, method: str, request: Any, answer: Any, timeout: float) -> Any:  # noqa: ANN401 - any message
        stub = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return stub(request, timeout=timeout)
        except grpc.RpcError as error:
            raise self._explain(error) from error

    def _explain(self, error: Any) -> PeerUnreachable | ProtocolError:  # noqa: ANN401 - grpc.RpcError with a code
        code, details = error.code().name, str(error.details())[:300]
        if code in REFUSALS:
            return ProtocolError(f"the peer at {self.target} refused: {details}")
        if code == "DEADLINE_EXCEEDED":
            return PeerUnreachable(f"the peer at {self.target} did not answer in time: {details}")
        return PeerUnreachable(f"no control plane answers at {self.target} ({code}: {details})")

    def close(self) -> None:
        """End the connection and what runs over it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
