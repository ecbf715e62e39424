"""The tokens that clusterd asks for: one opens one job, the operator's opens everything.

Made from the server's secret by whoever starts jobs; shown by clients as
`authorization: Bearer …`; checked by clusterd/auth.py.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from hashlib import sha256

OPERATOR = "operator"
JOB = "job:"
HEADER = "authorization"
BEARER = "Bearer "


def job_scope(job: str) -> str:
    return f"{JOB}{job}"


def token_for(secret: str, scope: str) -> str:
    """Whoever knows the secret can make every token; whoever has a token can make none."""
    made = hmac.new(secret.encode(), f"taskd clusterd {scope}".encode(), sha256).digest()
    return f"{scope}.{urlsafe_b64encode(made).decode().rstrip('=')}"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that a client sends along."""
    return ((HEADER, BEARER + token),) if token else ()
