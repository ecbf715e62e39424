"""The dashboard's web server: what answers each URL, errors, and the checks of all requests.

GET  /                                      all jobs, or the only one
GET  /jobs/JOB  …/incidents/N  …/nodes      the pages; they load the JSON of `job_api.py`
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taskd.dashboard import job_api, sign_in
from taskd.dashboard import page_security as security
from taskd.dashboard.clusterd_link import NotAllowed, Unknown
from taskd.dashboard.dashboard import Dashboard
from taskd.dashboard.page_security import HostNames
from taskd.dashboard.sign_in import STATIC
from taskd.errors import PeerRefused, PeerUnreachable, SettingsError
from taskd.runtime.limits import connection_limit


def _refusal(code: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, code)

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": error.detail}, error.status_code)
    return PlainTextResponse(error.detail, error.status_code)


class Guard:
    """Before every request: the host and the origin. With every answer: the headers."""

    def __init__(self, app: ASGIApp, hosts: HostNames) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.encode(), value.encode()) for name, value in security.HEADERS]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        request = Request(scope)
        host, origin = request.headers.get("host", ""), request.headers.get("origin", "")
        if not self._hosts.allows(host):
            text = f"unknown host name {host[:100]!r}: start the dashboard with --host-name"
            return await PlainTextResponse(text, 421)(scope, receive, guarded)
        if scope["method"] not in ("GET", "HEAD") and not security.same_origin(origin, host):
            answer = PlainTextResponse("requests from other sites are refused", 403)
            return await answer(scope, receive, guarded)
        await self._app(scope, receive, guarded)


def application(dashboard: Dashboard) -> Starlette:
    at = "/api/v1/jobs/{job}"
    routes = [
        Route("/", sign_in.page),
        Route("/jobs/{job}", sign_in.page),
        Route("/jobs/{job}/nodes", sign_in.page),
        Route("/jobs/{job}/incidents/{number}", sign_in.page),
        Route("/login", sign_in.login_form, methods=["GET"]),
        Route("/login", sign_in.login, methods=["POST"]),
        Route("/api/v1/session", job_api.who, methods=["GET"]),
        Route("/api/v1/session", sign_in.logout, methods=["DELETE"]),
        Route("/api/v1/jobs", job_api.jobs),
        Route(at, job_api.job),
        Route(f"{at}/incidents", job_api.incident_list),
        Route(f"{at}/incidents/{{number}}", job_api.incident),
        Route(f"{at}/nodes", job_api.nodes),
        Route(f"{at}/ranks", job_api.ranks),
        Route(f"{at}/carpet", job_api.carpet),
        Route(f"{at}/events", job_api.events),
        Route(f"{at}/actions/{{action}}", job_api.action, methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        dashboard.link = dashboard.connect()
        dashboard.begin()
        limit = asyncio.create_task(connection_limit.watch())
        yield
        limit.cancel()
        await dashboard.close()

    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, hosts=dashboard.hosts)],
        exception_handlers={
            HTTPException: _http_error,
            NotAllowed: _refusal(403),
            Unknown: _refusal(404),
            PeerRefused: _refusal(409),
            SettingsError: _refusal(400),
            PeerUnreachable: _refusal(503),
        },
        lifespan=lifespan,
    )
    app.state.dashboard = dashboard
    return app
