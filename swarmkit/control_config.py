"""Settings of the control plane, and from settings to where it listens."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarmkit.errors import ConfigError
from swarmkit.network_config import host_port
from swarmkit.peers.settings import ControlSettings, Tls, is_loopback

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes


@dataclass(kw_only=True, slots=True)
class ControlConfig:
    """Where each peer's control plane listens, and who may call it."""

    listen: str = "127.0.0.1:0"  # host:port; port 0 picks a free one; beyond loopback TLS is needed
    cert: str | None = None  # PEM file with this peer's certificate and its chain
    key: str | None = None  # PEM file with its private key, without a password
    client_ca: str | None = None  # PEM file; only who has a certificate signed by one of these may call

    def __post_init__(self) -> None:
        host, _ = host_port("control.listen", self.listen)
        if (self.cert is None) != (self.key is None):
            raise ValueError("control.cert and control.key belong together: set both or none")
        if self.client_ca is not None and self.cert is None:
            raise ValueError("control.client_ca: works with TLS only; set control.cert and control.key too")
        if not is_loopback(host) and self.client_ca is None:
            raise ValueError(
                f"control.listen={self.listen}: whoever can reach it could drain this peer; listen on 127.0.0.1, or "
                "set control.cert, control.key and control.client_ca, so that only those with a certificate may call"
            )

    def settings(self) -> ControlSettings:
        """What a ControlServer takes; raises ConfigError for a file that cannot be used."""
        host, port = host_port("control.listen", self.listen)
        tls = None
        if self.cert is not None and self.key is not None:
            tls = load_tls(self.cert, self.key, self.client_ca, section="control.")
        return ControlSettings(host=host, port=port, tls=tls)


def load_tls(cert: str, key: str, ca: str | None, *, section: str = "") -> Tls:
    """Read and check PEM files: gRPC would only say that it cannot listen; raises ConfigError naming the file."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificate

    certificate, private = _read(f"{section}cert", cert), _read(f"{section}key", key)
    try:
        public = load_pem_x509_certificate(certificate).public_key()
    except ValueError as error:
        raise ConfigError(f"{section}cert={cert}: holds no PEM certificate ({error})") from error
    try:
        own = load_pem_private_key(private, password=None).public_key()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{section}key={key}: holds no PEM key without a password ({error})") from error
    if _raw(own) != _raw(public):
        raise ConfigError(f"{section}key={key}: is not the key of the certificate in {cert}")
    return Tls(certificate, private, None if ca is None else load_ca(ca, name=f"{section}client_ca"))


def load_ca(path: str, *, name: str) -> bytes:
    """Read certificates that are believed; raises ConfigError naming the file."""
    from cryptography.x509 import load_pem_x509_certificates

    data = _read(name, path)
    try:
        load_pem_x509_certificates(data)
    except ValueError as error:
        raise ConfigError(f"{name}={path}: holds no PEM certificate ({error})") from error
    return data


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}={path}: cannot be read ({error.strerror})") from error


def _raw(key: "PublicKeyTypes") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
