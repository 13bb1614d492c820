"""Certificates for the tests of TLS: an authority, and who it vouches for."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey


def pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@dataclass
class Authority:
    """Signs certificates; its own is `certificate`."""

    name: str

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        self.certificate = self._sign(self._subject, self._key, is_authority=True)

    def vouch(self, name: str) -> tuple[bytes, bytes]:
        """A certificate for 127.0.0.1 and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        return self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, is_authority=False), pem(key)

    def _sign(self, subject: x509.Name, key: Key, *, is_authority: bool) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if not is_authority:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def write(folder: Path, **contents: bytes) -> dict[str, str]:
    """Files of these contents, by the names given; returns their paths."""
    paths = {name: folder / f"{name}.pem" for name in contents}
    for name, path in paths.items():
        path.write_bytes(contents[name])
    return {name: str(path) for name, path in paths.items()}
