"""The pages that a session begins and ends with; every other page is loaded by the same file."""

from __future__ import annotations

import html
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from taskd.dashboard import page_security as security
from taskd.dashboard.clusterd_link import NotAllowed
from taskd.dashboard.http_requests import (
    check_key,
    cookie_name,
    cookie_of,
    dashboard_of,
    form_of,
    session_of,
)
from taskd.errors import PeerUnreachable
from taskd.runtime.plain_text import one_line

STATIC = Path(__file__).parent / "static"


async def page(request: Request) -> Response:
    if dashboard_of(request).sessions.get(cookie_of(request)) is None:
        return RedirectResponse("/login", 303)
    text = (STATIC / "index.html").read_text()
    return Response(text, media_type="text/html", headers={"cache-control": "no-store"})


async def login_form(request: Request) -> Response:
    """The printed link signs in. A token does not: another site could sign a person in with it."""
    key = request.query_params.get("key", "")
    if not key:
        return _login_page("")
    if not security.same(key, dashboard_of(request).key):
        return _login_page("This link is not valid any more. Sign in with a token.", 403)
    return await _begin(request, key, request.query_params.get("name", ""))


async def login(request: Request) -> Response:
    form = await form_of(request)
    return await _begin(request, form.get("token", ""), form.get("name", ""))


async def _begin(request: Request, secret: str, name: str) -> Response:
    dashboard = dashboard_of(request)
    address = request.client.host if request.client else ""
    owner = dashboard.owner if security.same(secret, dashboard.key) else ""
    who = one_line(name.strip()[:80]) or f"{owner or 'unnamed'} at {address}"
    try:
        key = await dashboard.sign_in(secret.strip(), who, address)
    except NotAllowed as error:
        return _login_page(_why_not(error, security.same(secret, dashboard.key)), 403)
    except PeerUnreachable as error:
        return _login_page(str(error), 503)
    response = RedirectResponse("/", 303)
    response.set_cookie(
        cookie_name(request),
        key,
        httponly=True,
        samesite="strict",
        secure=dashboard.secure,
        path="/",
    )
    return response


def _why_not(error: NotAllowed, by_link: bool) -> str:
    if "clusterd" not in str(error):
        return str(error)
    if by_link:
        return (
            "This link gives no access, because the dashboard was started without a valid token "
            "of clusterd. Sign in with a token, or start it again with TASKD_CLUSTERD_TOKEN."
        )
    return "This token is not valid."


def _login_page(problem: str, code: int = 200) -> Response:
    text = (STATIC / "login.html").read_text()
    note = f'<p class="problem" role="alert">{html.escape(problem)}</p>' if problem else ""
    text = text.replace("<!-- problem -->", note)
    return Response(text, code, media_type="text/html", headers={"cache-control": "no-store"})


async def logout(request: Request) -> Response:
    check_key(request, session_of(request))
    dashboard_of(request).sessions.end(cookie_of(request))
    response = JSONResponse({"done": "signed out"})
    response.delete_cookie(cookie_name(request), path="/")
    return response
