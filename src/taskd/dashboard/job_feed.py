"""One subscription per job, however many pages are open: the status, the history, the carpet.

A page is a reader with its own position. A slow reader skips to the newest status, and gets the
runs of the carpet that it has missed; nothing is queued for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from taskd.dashboard import incidents, views
from taskd.dashboard.carpet import NAMES, Carpet, Run
from taskd.dashboard.clusterd_link import ClusterdLink, NotAllowed, Unknown
from taskd.errors import PeerRefused, PeerUnreachable
from taskd.runtime import json_text
from taskd.runtime.clock import Clock, wait_until, wall
from taskd.runtime.retry import Tries, every
from taskd.runtime.tokens import ClientToken
from taskd.wire._pb import control_pb2 as pb

log = logging.getLogger(__name__)

SETTLE_S = 0.1
"""Updates that come this close together are shown as one."""
KEEP_ALIVE_S = 15.0
RETRY_S = 0.5
POINTS = 3_600
MOST_LINES = 4_000
"""Lines of history in memory; the oldest are dropped."""


class JobFeed:
    def __init__(
        self,
        link: ClusterdLink,
        job: str,
        token: ClientToken,
        is_over: Callable[[], bool] = lambda: False,
        clock: Clock = wall,
    ) -> None:
        self.job, self.contact = job, views.LIVE
        self.status = pb.JobStatus(line=pb.JobLine(job=job))
        self.found: list[incidents.Incident] = []
        self.notes: list[dict[str, Any]] = []
        self.carpet = Carpet()
        self.points: deque[tuple[int, int, float, float]] = deque(maxlen=POINTS)
        self.updates = 0
        """How many messages clusterd has sent for all readers together."""
        self._link, self._token, self._is_over, self._clock = link, token, is_over, clock
        self._lines: deque[pb.HistoryLine] = deque(maxlen=MOST_LINES)
        self._history: int | None = None
        self._log: deque[tuple[int, Run]] = deque(maxlen=5_000)
        self._runs = 0
        self._version = 0
        self._cached: dict[str, tuple[int, bytes]] = {}
        self._readers: set[asyncio.Event] = set()
        self._ready = asyncio.Event()
        self._closing = False
        self._task = asyncio.create_task(self._run(), name=f"feed of {job}")

    def end_events(self) -> None:
        """The server stops: each page gets the last state, and its stream ends."""
        self._closing = True
        self._changed()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._changed()

    @property
    def over(self) -> bool:
        return self._task.done()

    async def ready(self, within_s: float = 10.0) -> bool:
        """Wait for the first status. False: none has come."""
        return self._ready.is_set() or await wait_until(self._ready, within_s)

    # From clusterd

    async def _run(self) -> None:
        async for _ in Tries(every(RETRY_S)):
            token = self._token.now()
            try:
                async for status in self._link.watch(self.job, token):
                    await self._take(status)
                self._end(views.ENDED)
                return
            except Unknown:
                self._end(views.ENDED if self._ready.is_set() else views.LOST)
                return
            except NotAllowed:
                if token != self._token.now():
                    continue  # it has been renewed
                self._end(views.LOST)
                return
            except (PeerUnreachable, PeerRefused) as error:
                log.info("job %s: %s", self.job, error)
            if self._is_over():
                self._end(views.ENDED)
                return
            if self.contact != views.LOST:
                self.contact = views.LOST
                self._changed()

    def _end(self, contact: str) -> None:
        self.contact = contact
        self._ready.set()
        self._changed()

    async def _take(self, status: pb.JobStatus) -> None:
        self.updates += 1
        now_ms = round(self._clock() * 1000)
        self.contact, self.status = views.LIVE, status
        self._note(self.carpet.see(status.ranks, now_ms, status.started_unix_ms))
        line = status.line
        self.points.append((now_ms, line.step, views.pace_of(status), status.goodput))
        if status.history != self._history:
            with suppress(PeerRefused):
                await self._read_history(status.history)
        self._ready.set()
        self._changed()

    async def _read_history(self, number: int) -> None:
        if self._history is not None and number < self._history:
            self._lines.clear()  # clusterd has been restarted, perhaps with another journal
        after = self._lines[-1].number if self._lines else 0
        new = await self._link.history(self.job, self._token.now(), after)
        self._history = number
        self._lines.extend(new)
        self.found, self.notes = incidents.read(self._lines), incidents.notes(self._lines)
        for incident in self.found:
            for report in incident.reports:
                self._note(self.carpet.add_incident(report))

    def _note(self, runs: list[Run]) -> None:
        for run in runs:
            self._runs += 1
            self._log.append((self._runs, run))

    def _changed(self) -> None:
        self._version += 1
        for reader in self._readers:
            reader.set()

    # To the pages

    def view(self) -> dict[str, Any]:
        return views.job(self.status, self.found, self.contact)

    def whole_carpet(self) -> dict[str, Any]:
        return {
            "names": NAMES,
            "ranks": len(self.carpet.phases),
            "nodes": self.carpet.nodes,
            "runs": self.carpet.runs,
        }

    def snapshot(self) -> dict[str, Any]:
        return {"job": self.view(), "carpet": self.whole_carpet(), "points": list(self.points)}

    async def events(self, still_allowed: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Server-sent events for one page: a snapshot, then what changes."""
        changed = asyncio.Event()
        self._readers.add(changed)
        try:
            yield _event("snapshot", self._encoded("snapshot", self.snapshot))
            version, seen = self._version, self._runs
            while still_allowed():
                if self._version == version:
                    if self.over:
                        yield _event("end", b"{}")
                        return
                    if not await wait_until(changed, KEEP_ALIVE_S):
                        yield b": still here\n\n"
                        continue
                    await asyncio.sleep(SETTLE_S)
                changed.clear()
                version = self._version
                new = [run for number, run in self._log if number > seen]
                if len(new) < self._runs - seen:
                    yield _event("snapshot", self._encoded("snapshot", self.snapshot))
                else:
                    yield _event("job", self._encoded("job", self._change))
                    if new:
                        yield _event("carpet", _json({"runs": new, "nodes": self.carpet.nodes}))
                seen = self._runs
                if self._closing:
                    return
        finally:
            self._readers.discard(changed)

    def _change(self) -> dict[str, Any]:
        return {"job": self.view(), "point": self.points[-1] if self.points else None}

    def _encoded(self, name: str, build: Callable[[], Any]) -> bytes:
        """Built once per update, for all pages."""
        version, text = self._cached.get(name, (-1, b""))
        if version != self._version:
            text = _json(build())
            self._cached[name] = self._version, text
        return text


def _json(value: Any) -> bytes:
    return json_text.dumps(value).encode(errors="replace")


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
