"""gRPC streams between peers that reach each other directly, over TLS pinned to a key that libp2p vouches for."""

import asyncio
import datetime
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarmkit.peers.engine import Multiaddr
from swarmkit.peers.errors import PeerUnreachable, ProtocolError
from swarmkit.peers.grpc_library import grpc
from swarmkit.peers.settings import NetworkSettings
from swarmkit.peers.wire import Message, field

SERVICE = "/swarmkit.Bulk/Stream"
# Every certificate carries this name; the pinned certificate, not the name, says who the server is.
NAME = "swarmkit"
_OPTIONS = [
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_frame_size", 1 << 20),
]

Serve = Callable[[str, AsyncIterator[bytes]], AsyncIterator[bytes]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a peer's gRPC server listens, the certificate it must show, and our ticket for it."""

    targets: tuple[str, ...]  # host:port, the best first
    certificate: bytes  # PEM
    token: str  # proves to the server which peer we are; it came over libp2p's authenticated channel

    @classmethod
    def from_message(cls, message: Message) -> "Endpoint":
        """Read an endpoint that a peer described; raises ProtocolError."""
        targets = field(message, "targets", list, lambda found: len(found) <= 16)
        if not all(isinstance(target, str) and len(target) < 256 for target in targets):
            raise ProtocolError("field 'targets' must be a list of host:port")
        return cls(
            targets=tuple(targets),
            certificate=field(message, "certificate", bytes, lambda pem: len(pem) < 8192),
            token=field(message, "token", str, lambda token: len(token) < 256),
        )


class DirectTransport:
    """One gRPC server and a channel per peer, all in the network's loop."""

    def __init__(self, serve: Serve, settings: NetworkSettings) -> None:
        self._serve = serve
        self._settings = settings
        self._key, self._certificate = _make_certificate()
        self._targets: list[str] = []
        self._callers: dict[str, str] = {}  # token -> peer id
        self._tokens: dict[str, str] = {}  # peer id -> token
        self._server: grpc.aio.Server | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}  # by token: a restarted peer has another one

    async def listen(self, visible: Sequence[Multiaddr]) -> None:
        """Start the server and derive the addresses to tell others from those that libp2p sees."""
        server = grpc.aio.server(options=_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._handle)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE.split("/")[1], {SERVICE.split("/")[2]: handler}),)
        )
        credentials = grpc.ssl_server_credentials([(self._key, self._certificate)])
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        port = server.add_secure_port(f"{host}:{self._settings.bulk_port}", credentials)
        await server.start()
        self._server = server
        hosts = [
            address[name] for address in visible for name in ("ip4", "ip6", "dns4", "dns6", "dns") if name in address
        ]
        self._targets = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in dict.fromkeys(hosts)]

    def describe(self, caller: str) -> Message:
        """Tell a caller, whom libp2p has authenticated, how to reach us; the token is for it alone."""
        token = self._tokens.get(caller)
        if token is None:
            token = self._tokens[caller] = secrets.token_hex(16)
            self._callers[token] = caller
        return {"targets": self._targets, "certificate": self._certificate, "token": token}

    async def connect(self, endpoint: Endpoint, *, timeout: float) -> Endpoint | None:
        """Try an endpoint's addresses; returns it with the one that answers, or None."""
        for target in endpoint.targets:
            credentials = grpc.ssl_channel_credentials(root_certificates=endpoint.certificate)
            options = [*_OPTIONS, ("grpc.ssl_target_name_override", NAME)]
            channel = grpc.aio.secure_channel(target, credentials, options=options)
            try:
                await asyncio.wait_for(channel.channel_ready(), timeout)
            except TimeoutError:
                await channel.close()
                continue
            old = self._channels.get(endpoint.token)
            self._channels[endpoint.token] = channel
            if old is not None:
                await old.close()
            return Endpoint((target,), endpoint.certificate, endpoint.token)
        return None

    def is_usable(self, endpoint: Endpoint) -> bool:
        """False once a peer's channel has broken."""
        channel = self._channels.get(endpoint.token)
        broken = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
        return channel is not None and channel.get_state() not in broken

    async def open(self, endpoint: Endpoint, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Run one two-way stream."""
        call = self._channels[endpoint.token].stream_stream(SERVICE)(messages, metadata=(("token", endpoint.token),))
        try:
            async for chunk in call:
                yield chunk
        except grpc.aio.AioRpcError as error:
            raise PeerUnreachable(f"gRPC stream to {endpoint.targets[0]} broke: {error.details()}") from error
        finally:
            call.cancel()

    async def _handle(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        token = dict(context.invocation_metadata() or ()).get("token", "")
        sender = self._callers.get(str(token), "")
        if not sender:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "ask for an endpoint over libp2p first")
        try:
            async for chunk in self._serve(sender, requests):
                yield chunk
        except (ProtocolError, PeerUnreachable) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error)[:500])

    async def close(self) -> None:
        """Close every channel and the server at once."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        if self._server is not None:
            await self._server.stop(grace=None)


def _make_certificate() -> tuple[bytes, bytes]:
    """Make a key and a self-signed certificate for this process, both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # A day of grace: peers' clocks disagree, and the pin, not the date, is what protects.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)
