"""What a browser sends: whole requests, in time and of limited length, with a session's cookie.

uvicorn itself waits forever for the rest of a request.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qsl, unquote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from taskd.dashboard import page_security as security
from taskd.dashboard.dashboard import Dashboard
from taskd.dashboard.job_feed import JobFeed
from taskd.dashboard.page_security import Session
from taskd.runtime import json_text
from taskd.wire.json_reading import loads

REQUEST_S = 10.0
"""How long the head of a request may take. A connection is dropped at most as long after that."""
MOST_BODY = 64 * 1024
BODY_S = 20.0
"""How long a browser may take to send the body of a request."""


class HttpConnection(H11Protocol):
    _seen: Any = None
    """The request that was served last, when this connection was looked at."""
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look = self.loop.call_later(REQUEST_S, self._drop_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _drop_if_silent(self) -> None:
        is_served = self.cycle is not None and not self.cycle.response_complete
        if not is_served and self.cycle is self._seen:
            self.transport.abort()
            return
        self._seen = self.cycle
        self._look = self.loop.call_later(REQUEST_S, self._drop_if_silent)


def dashboard_of(request: Request) -> Dashboard:
    dashboard: Dashboard = request.app.state.dashboard
    return dashboard


def cookie_name(request: Request) -> str:
    return security.cookie_of(request.headers.get("host", ""))


def cookie_of(request: Request) -> str:
    return request.cookies.get(cookie_name(request), "")


def session_of(request: Request) -> Session:
    session = dashboard_of(request).sessions.get(cookie_of(request))
    if session is None:
        raise HTTPException(401, "sign in first")
    return session


def job_of(request: Request) -> str:
    return unquote(request.path_params["job"])


async def feed_of(request: Request) -> JobFeed:
    return await dashboard_of(request).feed(session_of(request), job_of(request))


def check_key(request: Request, session: Session) -> None:
    if not security.same(request.headers.get(security.CSRF_HEADER, ""), session.csrf):
        raise HTTPException(403, f"the header {security.CSRF_HEADER} is missing or not valid")


async def _read(request: Request) -> bytes:
    text = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                text += part
                if len(text) > MOST_BODY:
                    raise HTTPException(413, "the request is too long")
    except TimeoutError as error:
        raise HTTPException(408, f"the request did not arrive within {BODY_S:g} s") from error
    return text


async def body_of(request: Request) -> dict[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "expected application/json")
    try:
        value = loads(await _read(request))
    except ValueError as error:
        raise HTTPException(400, "the body is not valid JSON") from error
    if not isinstance(value, dict):
        raise HTTPException(400, "expected a JSON object")
    return value


async def form_of(request: Request) -> dict[str, str]:
    try:
        return dict(parse_qsl((await _read(request)).decode(), max_num_fields=10))
    except ValueError as error:
        raise HTTPException(400, "the form is not valid") from error


def as_json(value: object) -> Response:
    text = json_text.dumps(value).encode(errors="replace")
    headers = {"cache-control": "no-store"}
    return Response(text, media_type="application/json", headers=headers)
