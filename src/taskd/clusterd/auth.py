"""Who may call what: a job's token gives access to that job only, the operator's to everything.

A caller presents a token (`authorization: Bearer …`) or a client certificate whose common name is
its scope. If neither tokens nor client certificates are configured, every caller is the operator:
Ascend's clients send neither, and a server on the loopback needs neither.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from taskd.errors import SettingsError
from taskd.runtime.tokens import (
    BEARER,
    HEADER,
    JOB,
    OPERATOR,
    job_scope,
    token_for,
    without_comment,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    scope: str

    @property
    def operator(self) -> bool:
        return self.scope == OPERATOR

    def may(self, job: str) -> bool:
        return self.operator or self.scope == job_scope(job)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Read from a file: one `scope token` per line, or one `secret …` for all tokens."""

    given: Mapping[str, str]
    """The scope of each token."""
    secret: str = ""

    @classmethod
    def load(cls, path: Path) -> Tokens:
        try:
            lines = path.read_text().splitlines()
            mode = path.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise SettingsError([f"cannot read the token file {path}: {why}"]) from error
        if mode & 0o077:
            log.warning("token file %s can be read or written by others: run chmod 600", path)
        given, secret, problems = {}, "", []
        for number, line in enumerate(lines, 1):
            words = without_comment(line).split()
            if len(words) == 2 and words[0] == "secret":
                secret = words[1]
            elif len(words) == 2 and (words[0] == OPERATOR or words[0].startswith(JOB)):
                given[words[1]] = words[0]
            elif words:
                problems.append(
                    f"{path}:{number}: expected `operator TOKEN`, `job:ID TOKEN` or `secret S`"
                )
        if not given and not secret:
            problems.append(f"{path}: the file contains no token")
        if problems:
            raise SettingsError(problems)
        return cls(given, secret)

    def scope_of(self, token: str) -> str | None:
        for known, scope in self.given.items():
            if hmac.compare_digest(known.encode(), token.encode()):
                return scope
        scope = token.rpartition(".")[0]
        if not self.secret or not scope:
            return None
        right = token_for(self.secret, scope)
        return scope if hmac.compare_digest(token.encode(), right.encode()) else None


class TokenFile:
    """A token file that is read again when it has changed, so that tokens can be renewed."""

    def __init__(self, path: Path) -> None:
        """Raises SettingsError if the file cannot be used."""
        self._path = path
        self._seen = self._mark()
        self._tokens = Tokens.load(path)

    def scope_of(self, token: str) -> str | None:
        mark = self._mark()
        if mark != self._seen:
            self._seen = mark
            try:
                self._tokens = Tokens.load(self._path)
                log.info("token file %s was read again", self._path)
            except SettingsError as error:
                log.warning("the changed token file is not used: %s", error)
        return self._tokens.scope_of(token)

    def _mark(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


class Authority:
    def __init__(
        self, tokens: Tokens | TokenFile | None = None, *, certificates: bool = False
    ) -> None:
        self._tokens, self._certificates = tokens, certificates

    def caller(
        self, sent: Mapping[str, str], certificate: Mapping[str, Sequence[bytes]]
    ) -> Caller | None:
        """None: unknown caller. `certificate` is gRPC's description of the peer's certificate."""
        if self._tokens is None and not self._certificates:
            return Caller(OPERATOR)
        if self._tokens is not None and sent.get(HEADER, "").startswith(BEARER):
            scope = self._tokens.scope_of(sent[HEADER].removeprefix(BEARER))
            return None if scope is None else Caller(scope)
        if self._certificates:
            for name in certificate.get("x509_common_name", ()):
                scope = name.decode(errors="replace")
                if scope == OPERATOR or scope.startswith(JOB):
                    return Caller(scope)
        return None
