"""The dashboard's web server: pages, JSON under stable URLs, server-sent events, actions.

    GET  /                                      all jobs, or the only one
    GET  /jobs/JOB  …/incidents/N  …/nodes      the pages; they load the JSON below
    GET  /api/v1/jobs                           what this session may see
    GET  /api/v1/jobs/JOB                       job; /incidents, /incidents/N, /nodes, /ranks
    GET  /api/v1/jobs/JOB/events                server-sent events: snapshot, job, carpet
    POST /api/v1/jobs/JOB/actions/ACTION        {"confirmed": true, …}

In a URL a job's name is percent-encoded twice if it contains a slash or other special characters.
"""

from __future__ import annotations

import asyncio
import html
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, cast
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.responses import StreamingResponse as Stream
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taskd.dashboard import actions, views
from taskd.dashboard import page_security as security
from taskd.dashboard.clusterd_link import ClusterdLink, NotAllowed, Unknown
from taskd.dashboard.job_feed import JobFeed
from taskd.dashboard.page_security import HostNames, Session, Sessions
from taskd.errors import PeerRefused, PeerUnreachable, SettingsError
from taskd.runtime import json_text
from taskd.runtime.clock import monotonic
from taskd.runtime.limits import connection_limit
from taskd.runtime.limits.rate_limit import Buckets, Rate
from taskd.runtime.plain_text import one_line
from taskd.runtime.tokens import ClientToken
from taskd.version import __version__
from taskd.wire._pb import control_pb2 as pb
from taskd.wire.json_reading import loads

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
MOST_BODY = 64 * 1024
MOST_FEEDS = 200
MOST_STREAMS = 100
"""Pages of one session that are open at the same time."""
BODY_S = 20.0
"""How long a browser may take to send the body of a request."""
LOGIN_RATE = Rate(0.5, 10)
OPERATION_S = 1_800.0
ALLOWED_S = 30.0
"""How long an answer of clusterd about a session's rights is remembered."""


@dataclass
class Dashboard:
    connect: Callable[[], ClusterdLink]
    """Called inside the event loop."""
    hosts: HostNames
    token: ClientToken = field(default_factory=ClientToken)
    """The token with which this process was started; the printed link signs in with it."""
    only_job: str = ""
    is_over: Callable[[str], bool] = lambda job: False
    secure: bool = False
    key: str = field(default_factory=lambda: token_urlsafe(24))
    sessions: Sessions = field(default_factory=Sessions)
    feeds: dict[str, JobFeed] = field(default_factory=dict)
    streams: Counter[str] = field(default_factory=Counter)
    """How many pages of each session are open."""
    running: dict[str, str] = field(default_factory=dict)
    """The last operation of each job, and how it ended."""

    def __post_init__(self) -> None:
        self.link: ClusterdLink = cast(Any, None)
        self._logins = Buckets(LOGIN_RATE, 1_000, monotonic)
        self._allowed: dict[tuple[str, str], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # Sessions

    async def sign_in(self, secret: str, who: str, address: str) -> str:
        """Returns the session's key. Raises NotAllowed, or PeerUnreachable."""
        own = security.same(secret, self.key)
        if not own and not self._logins.take(address):  # others may guess from the same machine
            raise NotAllowed("too many attempts: wait a few seconds")
        credential = self.token if own else ClientToken(secret)
        if not own and (not secret or await self._is_open_to_all()):
            raise NotAllowed("use the link that `taskd dashboard` printed")
        reply = await self.link.jobs(credential.now())
        key, _ = self.sessions.begin(credential, who or "unnamed", reply.scope or "operator")
        return key

    async def _is_open_to_all(self) -> bool:
        """Without tokens in clusterd every secret would be accepted."""
        try:
            await self.link.jobs(token_urlsafe(16))
        except NotAllowed:
            return False
        return True

    async def allow(self, session: Session, job: str) -> None:
        """Raises NotAllowed or Unknown unless clusterd lets this session see the job."""
        if self.only_job and job != self.only_job:
            raise Unknown(f"this page shows job {self.only_job} only")
        known = session.token, job
        if self._allowed.get(known, 0.0) > monotonic():
            return
        if not session.operator and session.scope != f"job:{job}":
            raise NotAllowed(f"{session.scope} may not see this job")
        feed = self.feeds.get(job)
        if feed is None or not feed.status.strategies:
            await self.link.status(job, session.token)
        else:
            await self._check_token(session)
        self._allowed[known] = monotonic() + ALLOWED_S
        if len(self._allowed) > 10 * security.MOST_SESSIONS:
            self._allowed.clear()

    async def _check_token(self, session: Session) -> None:
        """Its token may have been revoked. What was shown stays while clusterd is away."""
        with suppress(PeerUnreachable):
            try:
                scope = (await self.link.jobs(session.token)).scope or "operator"
            except NotAllowed:
                scope = ""
            if scope != session.scope:
                self.sessions.end_token(session.token)
                raise NotAllowed("the token of this session is not valid any more")

    async def feed(self, session: Session, job: str) -> JobFeed:
        await self.allow(session, job)
        feed = self.feeds.get(job)
        if feed is None or (feed.over and feed.contact == views.LOST):
            if len(self.feeds) >= MOST_FEEDS:
                await self._drop_oldest()
            feed = self._follow(job, self.token if self.token.now() else session.credential)
        await feed.ready()
        return feed

    def begin(self) -> None:
        """Follow the only job from now on: the first page shows what was before it, too."""
        if self.only_job:
            self._follow(self.only_job, self.token)

    def _follow(self, job: str, token: ClientToken) -> JobFeed:
        feed = JobFeed(self.link, job, token, lambda: self.is_over(job))
        self.feeds[job] = feed
        return feed

    async def _drop_oldest(self) -> None:
        await self.feeds.pop(next(iter(self.feeds))).close()

    def end_events(self) -> None:
        for feed in self.feeds.values():
            feed.end_events()

    async def close(self) -> None:
        for feed in self.feeds.values():
            await feed.close()
        for task in self._tasks:
            task.cancel()
        await self.link.close()

    # Actions

    async def act(
        self, session: Session, job: str, action: str, settings: dict[str, Any]
    ) -> dict[str, Any]:
        feed = await self.feed(session, job)
        order = actions.order_of(action, settings, feed.status, session.who)
        if settings.get("confirmed") is not True:
            return {"confirm": order.sentence}
        await self._record(session, job, order.sentence)
        try:
            text = await self.link.order(order.method, order.request, session.token)
        except PeerRefused as error:
            await self._record(session, job, f"{order.sentence}: refused: {error}")
            raise
        if order.result:
            self.running[job] = f"{order.sentence}: running"
            task = asyncio.create_task(self._await_result(session.token, job, order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return {"done": order.sentence, "answer": text}

    async def _record(self, session: Session, job: str, sentence: str) -> None:
        """In the journal, with the name of the person. It is not acted without that."""
        record = pb.OperatorAction(job=job, who=session.who, action=sentence)
        await self.link.order("RecordAction", record, session.token)
        log.info("job %s: %s: %s", job, session.who, sentence)

    async def _await_result(self, token: str, job: str, order: actions.Order) -> None:
        try:
            text = await self.link.result(order.result, order.result_request, token, OPERATION_S)
        except (PeerRefused, PeerUnreachable) as error:
            text = str(error)
        self.running[job] = f"{order.sentence}: {text}"


# Requests


def _dashboard(request: Request) -> Dashboard:
    dashboard: Dashboard = request.app.state.dashboard
    return dashboard


def _cookie_name(request: Request) -> str:
    return security.cookie_of(request.headers.get("host", ""))


def _cookie(request: Request) -> str:
    return request.cookies.get(_cookie_name(request), "")


def _session(request: Request) -> Session:
    session = _dashboard(request).sessions.get(_cookie(request))
    if session is None:
        raise HTTPException(401, "sign in first")
    return session


def _job(request: Request) -> str:
    return unquote(request.path_params["job"])


async def _feed(request: Request) -> JobFeed:
    return await _dashboard(request).feed(_session(request), _job(request))


async def page(request: Request) -> Response:
    if _dashboard(request).sessions.get(_cookie(request)) is None:
        return RedirectResponse("/login", 303)
    text = (STATIC / "index.html").read_text()
    return Response(text, media_type="text/html", headers={"cache-control": "no-store"})


async def login_form(request: Request) -> Response:
    """The printed link signs in. A token does not: another site could sign a person in with it."""
    key = request.query_params.get("key", "")
    if not key:
        return _login_page("")
    if not security.same(key, _dashboard(request).key):
        return _login_page("This link is not valid any more. Sign in with a token.", 403)
    return await _begin(request, key, request.query_params.get("name", ""))


async def login(request: Request) -> Response:
    form = await _form(request)
    return await _begin(request, form.get("token", ""), form.get("name", ""))


async def _begin(request: Request, secret: str, name: str) -> Response:
    dashboard = _dashboard(request)
    address = request.client.host if request.client else ""
    who = one_line(name.strip()[:80]) or f"someone at {address}"
    try:
        key = await dashboard.sign_in(secret.strip(), who, address)
    except NotAllowed as error:
        return _login_page(_why_not(error, security.same(secret, dashboard.key)), 403)
    except PeerUnreachable as error:
        return _login_page(str(error), 503)
    response = RedirectResponse("/", 303)
    response.set_cookie(
        _cookie_name(request),
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
    _check_key(request, _session(request))
    _dashboard(request).sessions.end(_cookie(request))
    response = JSONResponse({"done": "signed out"})
    response.delete_cookie(_cookie_name(request), path="/")
    return response


async def who(request: Request) -> Response:
    session = _session(request)
    answer = {
        "who": session.who,
        "scope": session.scope,
        "operator": session.operator,
        "key": session.csrf,
        "version": __version__,
        "onlyJob": _dashboard(request).only_job,
    }
    return _json(answer)


async def jobs(request: Request) -> Response:
    dashboard, session = _dashboard(request), _session(request)
    reply = await dashboard.link.jobs(session.token)
    rows = [
        {
            "job": line.job,
            "name": line.name,
            "state": line.state,
            "because": line.because,
            "incident": line.incident,
            "world": line.world,
            "step": line.step,
            "stepsPerS": line.steps_per_s,
            "changedUnixMs": line.changed_unix_ms,
            "health": views.health_of(pb.JobStatus(line=line), views.LIVE)[0],
        }
        for line in reply.jobs
        if dashboard.only_job in ("", line.job)
    ]
    return _json({"jobs": rows})


async def job(request: Request) -> Response:
    feed = await _feed(request)
    operation = _dashboard(request).running.get(feed.job, "")
    return _json({**feed.view(), "lastOperation": operation})


async def incident_list(request: Request) -> Response:
    return _json({"incidents": views.incident_list((await _feed(request)).found)})


async def incident(request: Request) -> Response:
    number = request.path_params["number"]
    feed = await _feed(request)
    found = views.incident(feed.found, int(number)) if _is_number(number) else None
    if found is None:
        raise HTTPException(404, "the history has no such incident")
    return _json(found)


async def nodes(request: Request) -> Response:
    feed = await _feed(request)
    return _json(views.nodes(feed.status, feed.found, feed.notes))


async def ranks(request: Request) -> Response:
    feed = await _feed(request)
    node = request.query_params.get("node", "")
    chosen = int(node) if _is_number(node) else None
    return _json({"ranks": views.ranks(feed.status, chosen)})


def _is_number(text: str) -> bool:
    """Python refuses to read very long ones."""
    return text.isascii() and text.isdecimal() and len(text) < 10


async def carpet(request: Request) -> Response:
    return _json((await _feed(request)).whole_carpet())


async def events(request: Request) -> Response:
    feed = await _feed(request)
    dashboard, key = _dashboard(request), _cookie(request)
    if dashboard.streams[key] >= MOST_STREAMS:
        raise HTTPException(429, f"this session has {MOST_STREAMS} open pages: close one first")
    stream = _while_allowed(dashboard, _session(request), key, feed)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return Stream(stream, media_type="text/event-stream", headers=headers)


async def _while_allowed(
    dashboard: Dashboard, session: Session, key: str, feed: JobFeed
) -> AsyncIterator[bytes]:
    dashboard.streams[key] += 1
    try:
        async for event in feed.events(lambda: dashboard.sessions.is_open(key)):
            try:
                await dashboard.allow(session, feed.job)
            except NotAllowed:
                return
            yield event
    finally:
        dashboard.streams[key] -= 1
        if not dashboard.streams[key]:
            del dashboard.streams[key]


async def action(request: Request) -> Response:
    session = _session(request)
    _check_key(request, session)
    settings = await _body(request)
    if not session.operator:
        raise HTTPException(403, "only the operator's token may do this")
    name = request.path_params["action"]
    answer = await _dashboard(request).act(session, _job(request), name, settings)
    return _json(answer)


def _check_key(request: Request, session: Session) -> None:
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


async def _body(request: Request) -> dict[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "expected application/json")
    try:
        value = loads(await _read(request))
    except ValueError as error:
        raise HTTPException(400, "the body is not valid JSON") from error
    if not isinstance(value, dict):
        raise HTTPException(400, "expected a JSON object")
    return value


async def _form(request: Request) -> dict[str, str]:
    from urllib.parse import parse_qsl

    try:
        return dict(parse_qsl((await _read(request)).decode(), max_num_fields=10))
    except ValueError as error:
        raise HTTPException(400, "the form is not valid") from error


def _json(value: object) -> Response:
    text = json_text.dumps(value).encode(errors="replace")
    headers = {"cache-control": "no-store"}
    return Response(text, media_type="application/json", headers=headers)


# Errors and headers


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
        Route("/", page),
        Route("/jobs/{job}", page),
        Route("/jobs/{job}/nodes", page),
        Route("/jobs/{job}/incidents/{number}", page),
        Route("/login", login_form, methods=["GET"]),
        Route("/login", login, methods=["POST"]),
        Route("/api/v1/session", who, methods=["GET"]),
        Route("/api/v1/session", logout, methods=["DELETE"]),
        Route("/api/v1/jobs", jobs),
        Route(at, job),
        Route(f"{at}/incidents", incident_list),
        Route(f"{at}/incidents/{{number}}", incident),
        Route(f"{at}/nodes", nodes),
        Route(f"{at}/ranks", ranks),
        Route(f"{at}/carpet", carpet),
        Route(f"{at}/events", events),
        Route(f"{at}/actions/{{action}}", action, methods=["POST"]),
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
