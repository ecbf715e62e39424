"""The JSON under `/api/v1`: what the pages show, events, and actions.

    GET  /api/v1/session                        who has signed in
    GET  /api/v1/jobs                           what this session may see
    GET  /api/v1/jobs/JOB                       job; /incidents, /incidents/N, /nodes, /ranks
    GET  /api/v1/jobs/JOB/events                server-sent events: snapshot, job, carpet
    POST /api/v1/jobs/JOB/actions/ACTION        {"confirmed": true, …}

In a URL a job's name is percent-encoded twice if it contains a slash or other special characters.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.responses import StreamingResponse as Stream

from taskd.dashboard import views
from taskd.dashboard.clusterd_link import NotAllowed
from taskd.dashboard.dashboard import Dashboard
from taskd.dashboard.http_requests import (
    as_json,
    body_of,
    check_key,
    cookie_of,
    dashboard_of,
    feed_of,
    job_of,
    session_of,
)
from taskd.dashboard.job_feed import JobFeed
from taskd.dashboard.page_security import Session
from taskd.version import __version__
from taskd.wire._pb import control_pb2 as pb

MOST_STREAMS = 100
"""Pages of one session that are open at the same time."""


async def who(request: Request) -> Response:
    session = session_of(request)
    answer = {
        "who": session.who,
        "scope": session.scope,
        "operator": session.operator,
        "key": session.csrf,
        "version": __version__,
        "onlyJob": dashboard_of(request).only_job,
    }
    return as_json(answer)


async def jobs(request: Request) -> Response:
    dashboard, session = dashboard_of(request), session_of(request)
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
    return as_json({"jobs": rows})


async def job(request: Request) -> Response:
    feed = await feed_of(request)
    operation = dashboard_of(request).running.get(feed.job, "")
    return as_json({**feed.view(), "lastOperation": operation})


async def incident_list(request: Request) -> Response:
    return as_json({"incidents": views.incident_list((await feed_of(request)).found)})


async def incident(request: Request) -> Response:
    number = request.path_params["number"]
    feed = await feed_of(request)
    found = views.incident(feed.found, int(number)) if is_number(number) else None
    if found is None:
        raise HTTPException(404, "the history has no such incident")
    return as_json(found)


async def nodes(request: Request) -> Response:
    feed = await feed_of(request)
    return as_json(views.nodes(feed.status, feed.found, feed.notes))


async def ranks(request: Request) -> Response:
    feed = await feed_of(request)
    node = request.query_params.get("node", "")
    chosen = int(node) if is_number(node) else None
    return as_json({"ranks": views.ranks(feed.status, chosen)})


def is_number(text: str) -> bool:
    """Python refuses to read very long ones."""
    return text.isascii() and text.isdecimal() and len(text) < 10


async def carpet(request: Request) -> Response:
    return as_json((await feed_of(request)).whole_carpet())


async def events(request: Request) -> Response:
    feed = await feed_of(request)
    dashboard, key = dashboard_of(request), cookie_of(request)
    if dashboard.streams[key] >= MOST_STREAMS:
        raise HTTPException(429, f"this session has {MOST_STREAMS} open pages: close one first")
    stream = _while_allowed(dashboard, session_of(request), key, feed)
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
    session = session_of(request)
    check_key(request, session)
    settings = await body_of(request)
    if not session.operator:
        raise HTTPException(403, "only the operator's token may do this")
    name = request.path_params["action"]
    answer = await dashboard_of(request).act(session, job_of(request), name, settings)
    return as_json(answer)
