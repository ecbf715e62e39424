"""Who may use the page: sessions, and the checks and headers of every request.

The page listens on the loopback by default. Nothing is shown without a session; a session holds a
token of clusterd, and clusterd decides what that token may see and do. The cookie is not readable
by scripts and is not sent from other sites; a request that changes something must also name the
session's key in a header and come from our own origin. Host names that are not ours are refused, so
that a foreign page cannot reach us under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from secrets import token_urlsafe

from taskd.runtime.clock import Clock, monotonic
from taskd.runtime.tokens import ClientToken

COOKIE = "taskd_session"
"""With our port behind it: a browser sends the cookies of all ports of a host."""
CSRF_HEADER = "x-taskd-key"
IDLE_S = 12 * 3600.0
MOST_SESSIONS = 1_000
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = (
    ("content-security-policy", CSP),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "same-origin"),  # with no-referrer, our own form would have no origin
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), microphone=(), geolocation=()"),
)


@dataclass
class Session:
    credential: ClientToken
    who: str
    scope: str
    csrf: str
    used_at: float

    @property
    def token(self) -> str:
        return self.credential.now()

    @property
    def operator(self) -> bool:
        return self.scope == "operator"


class Sessions:
    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._open: OrderedDict[str, Session] = OrderedDict()

    def begin(self, credential: ClientToken, who: str, scope: str) -> tuple[str, Session]:
        key = token_urlsafe(32)
        session = Session(credential, who, scope, token_urlsafe(32), self._clock())
        self._open[key] = session
        while len(self._open) > MOST_SESSIONS:
            self._open.popitem(last=False)
        return key, session

    def get(self, key: str) -> Session | None:
        session = self._open.get(key)
        if session is None:
            return None
        if self._clock() - session.used_at > IDLE_S:
            del self._open[key]
            return None
        session.used_at = self._clock()
        return session

    def end(self, key: str) -> None:
        self._open.pop(key, None)

    def end_token(self, token: str) -> None:
        """All sessions with a token that is not valid any more."""
        for key in [key for key, session in self._open.items() if session.token == token]:
            del self._open[key]

    def is_open(self, key: str) -> bool:
        return key in self._open


def cookie_of(host: str) -> str:
    """The name of our cookie, from the Host header."""
    port = host.rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isdecimal() else COOKIE


def same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


class HostNames:
    """The names under which this page may be requested."""

    def __init__(self, listen_host: str, more: Iterable[str] = ()) -> None:
        own = {"localhost", listen_host, socket.gethostname(), socket.getfqdn(), *more}
        self._names = {name.lower().rstrip(".") for name in own if name}

    def allows(self, host: str) -> bool:
        """`host` is the Host header, perhaps with a port. A literal IP address cannot be faked."""
        name = _without_port(host)
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True


def same_origin(origin: str, host: str) -> bool:
    """Browsers send Origin with every request that changes something. Other programs may not."""
    return not origin or origin.partition("://")[2].lower() == host.lower()


def _without_port(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return (host.rpartition(":")[0] if ":" in host else host).rstrip(".")
