"""What one dashboard process knows: sessions, the jobs that it follows, and its running actions."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import token_urlsafe
from typing import Any, cast

from taskd.dashboard import actions, views
from taskd.dashboard import page_security as security
from taskd.dashboard.clusterd_link import ClusterdLink, NotAllowed, Unknown
from taskd.dashboard.job_feed import JobFeed
from taskd.dashboard.page_security import HostNames, Session, Sessions
from taskd.errors import PeerRefused, PeerUnreachable
from taskd.runtime.clock import monotonic
from taskd.runtime.limits.rate_limit import Buckets, Rate
from taskd.runtime.tokens import ClientToken
from taskd.wire._pb import control_pb2 as pb

log = logging.getLogger(__name__)

MOST_FEEDS = 200
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
    owner: str = ""
    """The user who has started it, and to whom the link was printed."""
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
