"""Certificates for the members and clients of a job's etcd.

Every node derives the same certificate authority from the job's token and name, and issues its own
certificate: nothing is sent, and a process without the token can neither join nor read. A token of
another job gives another authority, so the two refuse each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from taskd.clusterd.etcd.etcd_settings import EtcdSettings
from taskd.runtime.files.private_files import write_private

if TYPE_CHECKING:
    from cryptography import x509

FROM, UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
"""Fixed, so that a wrong clock harms nothing. The certificates are worth as much as the token."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files in PEM form."""

    ca: str
    crt: str
    key: str

    @property
    def files(self) -> tuple[str, str, str]:
        return self.ca, self.crt, self.key

    def client_settings(self) -> EtcdSettings:
        return EtcdSettings(ca=self.ca, crt=self.crt, key=self.key)


def issue(token: str, job: str, hosts: Sequence[str], folder: Path) -> Certificate:
    """A certificate for a node with these names and addresses, and the authority's."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID

    authority_key = ec.derive_private_key(_secret(token, job), ec.SECP256R1())
    authority = _name(f"TaskD job {_tag(token, job)}")
    ca = _sign(
        _builder(authority, authority, authority_key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        ),
        authority_key,
    )
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    names = [_general_name(host) for host in dict.fromkeys(hosts)]
    crt = _sign(
        _builder(_name("member"), authority, key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False),
        authority_key,
    )
    files = Certificate(*(str(folder / name) for name in ("ca.pem", "member.pem", "member.key")))
    write_private(Path(files.ca), ca.public_bytes(Encoding.PEM).decode())
    write_private(Path(files.crt), crt.public_bytes(Encoding.PEM).decode())
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(Path(files.key), secret.decode())
    return files


@cache
def _digest(token: str, job: str) -> bytes:
    """Every process that connects sees a certificate of this authority, and can try tokens with
    it, on its own machine. So each try takes a while, and 32 MiB."""
    return hashlib.scrypt(
        token.encode(),
        salt=f"etcd of {job}".encode(),
        n=1 << 15,
        r=8,
        p=1,
        maxmem=64 << 20,
        dklen=80,
    )


def _secret(token: str, job: str) -> int:
    """A private key of P-256: from 512 bits, so that all keys are equally likely."""
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    return int.from_bytes(_digest(token, job)[:64], "big") % (order - 1) + 1


def _tag(token: str, job: str) -> str:
    """Authorities of different jobs have different names, too."""
    return _digest(token, job)[64:72].hex()


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: object) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    assert isinstance(key, ec.EllipticCurvePublicKey)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(FROM)
        .not_valid_after(UNTIL)
    )


def _sign(builder: x509.CertificateBuilder, key: object) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return builder.sign(key, hashes.SHA256())
