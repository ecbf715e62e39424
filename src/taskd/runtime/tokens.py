"""Tokens for clusterd: a job's token gives access to that job, the operator's to everything.

They are made from the server's secret by the program that starts jobs, sent by clients as
`authorization: Bearer …` and checked by `clusterd/auth.py`.
"""

from __future__ import annotations

import hmac
import logging
import re
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

log = logging.getLogger(__name__)

OPERATOR = "operator"
JOB = "job:"
HEADER = "authorization"
BEARER = "Bearer "


def job_scope(job: str) -> str:
    return f"{JOB}{job}"


def token_for(secret: str, scope: str) -> str:
    """With the secret every token can be made; from a token, no other one."""
    digest = hmac.new(secret.encode(), f"taskd clusterd {scope}".encode(), sha256).digest()
    return f"{scope}.{urlsafe_b64encode(digest).decode().rstrip('=')}"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The gRPC metadata with this token."""
    return ((HEADER, BEARER + token),) if token else ()


class ClientToken:
    """The token of a client of clusterd: given, or in a file that may be renewed at any time."""

    def __init__(self, given: str = "", file: str = "") -> None:
        self._token, self._file, self._problem = given, file, ""

    def now(self) -> str:
        """For one call. While the file cannot be read, the last token stays in use."""
        if self._file:
            try:
                self._token = Path(self._file).read_text().strip() or self._token
            except (OSError, UnicodeDecodeError) as error:
                problem = str(error)
                if problem != self._problem:  # once: calls are made every second
                    log.warning("the token file of clusterd is not used: %s", problem)
                self._problem = problem
        return self._token


def without_comment(line: str) -> str:
    """Of a file with secrets. A `#` inside of a word belongs to it: a secret may contain one."""
    return re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip()
