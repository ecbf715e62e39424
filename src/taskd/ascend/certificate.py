"""Whether a certificate is good enough to trust a server by, and what that server is called.

The rules are those that MindCluster's clients apply. All that is wrong is said at once.
`ascend/recover_client.py` asks here before it opens a secure channel.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509

RSA_BITS, EC_BITS = 3072, 256
SIGNATURES = {
    "1.2.840.113549.1.1.11": "sha256WithRSAEncryption",
    "1.2.840.113549.1.1.13": "sha512WithRSAEncryption",
    "1.2.840.10045.4.3.2": "ecdsa-with-SHA256",
}


def common_name(pem: bytes, now: float) -> str:
    """The name in the certificate. Raises ValueError with the reasons if it is not acceptable."""
    try:
        from cryptography import x509
    except ImportError as error:
        raise ValueError(
            "certificates cannot be checked without the package `cryptography`: "
            "pip install 'taskd[secure]'"
        ) from error
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise ValueError(f"it is no PEM certificate: {error}") from error
    problems = [
        *_date_problems(certificate, datetime.fromtimestamp(now, UTC)),
        *_strength_problems(certificate),
        *_purpose_problems(certificate),
    ]
    name = _name(certificate)
    if not name:
        problems.append("its subject has no common name")
    if problems:
        raise ValueError("; ".join(problems))
    return name


def _date_problems(certificate: x509.Certificate, now: datetime) -> list[str]:
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now <= since:
        return [f"it is not valid before {since:%Y-%m-%d %H:%M:%S} UTC"]
    if now >= until:
        return [f"it expired at {until:%Y-%m-%d %H:%M:%S} UTC"]
    return []


def _strength_problems(certificate: x509.Certificate) -> list[str]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    problems = []
    if certificate.version is not x509.Version.v3:
        problems.append("it is not an X.509 version 3 certificate")
    match certificate.public_key():
        case rsa.RSAPublicKey(key_size=bits) if bits < RSA_BITS:
            problems.append(f"its RSA key has {bits} bits, {RSA_BITS} are needed")
        case ec.EllipticCurvePublicKey(key_size=bits) if bits < EC_BITS:
            problems.append(f"its EC key has {bits} bits, {EC_BITS} are needed")
        case rsa.RSAPublicKey() | ec.EllipticCurvePublicKey():
            pass
        case _:
            problems.append("its key is neither RSA nor EC")
    signature = certificate.signature_algorithm_oid.dotted_string
    if signature not in SIGNATURES:
        known = ", ".join(SIGNATURES.values())
        problems.append(f"its signature algorithm {signature} is none of {known}")
    return problems


def _purpose_problems(certificate: x509.Certificate) -> list[str]:
    from cryptography import x509

    problems = []
    try:
        certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        problems.append("it does not say whether it is a CA (basicConstraints)")
    try:
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        problems.append("it does not say what its key is for (keyUsage)")
    else:
        if not usage.digital_signature:
            problems.append("its key is not for digital signatures (keyUsage)")
    return problems


def _name(certificate: x509.Certificate) -> str:
    from cryptography.x509.oid import NameOID

    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""
