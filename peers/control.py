"""The control plane: a gRPC server in each peer that tells its status, streams its metrics and has it leave."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, Protocol

# First: these import grpc themselves.
from swarmkit.peers.grpc_library import grpc  # isort: skip
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from swarmkit.peers import control_pb2 as pb
from swarmkit.peers.loop import NetworkThread
from swarmkit.peers.settings import ControlSettings

logger = logging.getLogger(__name__)
SERVICE = pb.DESCRIPTOR.services_by_name["Control"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
MAX_REQUEST_BYTES = 16 << 10  # every request is a few words
MAX_CALLS = 64  # at the same time, watchers included
MAX_WATCHERS = 16
MAX_WAITING = 256  # messages for a watcher that is behind; then the oldest are dropped
CHECKPOINT_S = 300.0  # for a caller that sets no deadline
# For watchers to read the last words.
GRACE_S = 1.0
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.max_concurrent_streams", MAX_CALLS),
    ("grpc.keepalive_time_ms", 30_000),  # finds watchers that are gone without a word
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not shared
]


class Controlled(Protocol):
    """What the control plane tells of, and what it may ask for; called in the network's thread, so none may wait."""

    def status(self) -> pb.StatusReply:
        """Where this peer stands."""
        ...

    def drain(self, reason: str) -> pb.DrainReply:
        """Begin to leave in order; nothing happens when that is under way."""
        ...

    def checkpoint(self) -> "Future[pb.CheckpointReply] | None":
        """Have a checkpoint written soon; None for a peer that has none to write."""
        ...


class ControlServer:
    """Serves `Controlled`, the standard health service and reflection, in the network's loop."""

    def __init__(self, thread: NetworkThread, controlled: Controlled, settings: ControlSettings) -> None:
        self.target = ""  # host:port at which it listens
        self._thread = thread
        self._controlled = controlled
        self._settings = settings
        self._watchers: dict[asyncio.Queue[pb.Metrics | None], int] = {}  # and how many messages each has missed
        self._health = health.aio.HealthServicer()
        self._server: Any = None  # grpc.aio.Server
        self._closed = False

    async def start(self) -> None:
        """Listen; raises OSError when the port cannot be had."""
        server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._handlers()),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), server)
        settings = self._settings
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            if settings.tls is None:
                port = server.add_insecure_port(f"{host}:{settings.port}")
            else:
                credentials = grpc.ssl_server_credentials(
                    [(settings.tls.key, settings.tls.certificate)],
                    root_certificates=settings.tls.ca,
                    require_client_auth=settings.tls.ca is not None,
                )
                port = server.add_secure_port(f"{host}:{settings.port}", credentials)
        except RuntimeError as error:
            raise OSError("cannot listen: is the port taken, or the address not this machine's?") from error
        await server.start()
        self._server = server
        self.target = f"{host}:{port}"
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def visible_target(self, address: str) -> str:
        """Where others reach it; a listener on all interfaces at the host of this peer's own `address`."""
        host, _, port = self.target.rpartition(":")
        if host in ("0.0.0.0", "[::]"):
            host = address.split("/")[2]
            host = f"[{host}]" if ":" in host else host
        return f"{host}:{port}"

    async def close(self) -> None:
        """Let watchers read what is left and stop."""
        self._closed = True
        for queue in self._watchers:
            self._put(queue, None)
        if self._server is not None:
            await self._server.stop(grace=GRACE_S)

    def leaving(self) -> None:
        """Tell whoever probes this peer's health that it goes; from any thread."""
        self._call(lambda: asyncio.ensure_future(self._health.enter_graceful_shutdown()))

    def publish(self, metrics: pb.Metrics) -> None:
        """Send a message to all that watch; from any thread, without waiting for anybody."""
        self._call(lambda: self._spread(metrics))

    def _call(self, work: Callable[[], object]) -> None:
        # What is still said while the network closes has nobody left to hear it.
        if not self._closed and not self._thread.loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._thread.loop.call_soon_threadsafe(work)

    def _spread(self, metrics: pb.Metrics) -> None:
        for queue in self._watchers:
            self._put(queue, metrics)

    def _put(self, queue: "asyncio.Queue[pb.Metrics | None]", metrics: pb.Metrics | None) -> None:
        if queue.full():
            queue.get_nowait()
            self._watchers[queue] += 1
        queue.put_nowait(metrics)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Any]:
        unary: dict[str, tuple[Any, Any]] = {
            "Status": (self._status, pb.StatusRequest),
            "Drain": (self._drain, pb.DrainRequest),
            "Checkpoint": (self._checkpoint, pb.CheckpointRequest),
        }

        def reading(handler: Any, request: Any) -> Any:  # noqa: ANN401 - of any of these
            # Read here, because gRPC would log a traceback for whatever a stranger sends.
            async def call(data: bytes, context: Any) -> Any:  # noqa: ANN401
                return await handler(await _read(data, request, context), context)

            return grpc.unary_unary_rpc_method_handler(call, response_serializer=_serialise)

        handlers = {name: reading(handler, request) for name, (handler, request) in unary.items()}
        handlers["WatchMetrics"] = grpc.unary_stream_rpc_method_handler(self._watch, response_serializer=_serialise)
        return handlers

    async def _status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: ANN401
        return self._controlled.status()

    async def _drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:  # noqa: ANN401
        reason = "".join(c for c in request.reason[:200] if c.isprintable())
        logger.info("asked to leave by %s: %s", context.peer(), reason)
        return self._controlled.drain(reason or "asked over the control plane")

    async def _checkpoint(self, request: pb.CheckpointRequest, context: Any) -> pb.CheckpointReply:  # noqa: ANN401
        future = self._controlled.checkpoint()
        if future is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this peer does not train")
        assert future is not None
        left = context.time_remaining()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), min(CHECKPOINT_S, left or CHECKPOINT_S))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no step ended in time, after which it is written")
        except asyncio.CancelledError:
            if not future.cancelled():
                raise
            await context.abort(grpc.StatusCode.ABORTED, "this peer has ended")
        except OSError as error:
            await context.abort(grpc.StatusCode.INTERNAL, f"it could not be written: {error}"[:500])
        raise AssertionError("abort returned")

    async def _watch(self, data: bytes, context: Any) -> AsyncIterator[pb.Metrics]:  # noqa: ANN401
        await _read(data, pb.WatchMetricsRequest, context)
        if len(self._watchers) >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} callers watch already")
        queue: asyncio.Queue[pb.Metrics | None] = asyncio.Queue(MAX_WAITING)
        self._watchers[queue] = 0
        try:
            # At once, so that a caller knows from when on it misses nothing.
            now = self._controlled.status()
            yield pb.Metrics(state=pb.State(state=now.state, reason=now.leaving))
            while (metrics := await queue.get()) is not None:
                if self._watchers[queue]:
                    counted = pb.Metrics(dropped=self._watchers[queue])
                    counted.MergeFrom(metrics)
                    metrics, self._watchers[queue] = counted, 0
                yield metrics
        finally:
            del self._watchers[queue]


async def _read(data: bytes, kind: Any, context: Any) -> Any:  # noqa: ANN401 - any message
    try:
        return kind.FromString(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a {kind.DESCRIPTOR.name}")


def _serialise(message: Any) -> bytes:  # noqa: ANN401 - any message
    data: bytes = message.SerializeToString()
    return data
