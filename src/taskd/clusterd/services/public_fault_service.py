"""The PubFault service: NodeD and third parties report faults of nodes and devices.

A fault is in the journal before it is answered. The same content may come in a ConfigMap with the
label `mc-consumer-publicfault=true`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from math import inf
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from taskd.clusterd.cluster.interface import Changed, Cluster, Json, Kind
from taskd.clusterd.cluster.objects import PUBLIC_FAULT, is_public_fault, serial_of
from taskd.clusterd.faults.public_codes import PublicCodeFile
from taskd.clusterd.job_registry import JobRegistry
from taskd.core.clusterd.fault_centre.public_faults import (
    Entry,
    Key,
    PublicReport,
    problem_of,
    problem_of_fault,
)
from taskd.model.codes import RecoverCode
from taskd.runtime.clock import Clock
from taskd.runtime.journal.journal import Journal
from taskd.runtime.journal.journal_values import JournalFailed
from taskd.runtime.limits.rate_limit import Buckets, Rate
from taskd.wire import fault_codec
from taskd.wire._pb import pubfault_pb2 as pb
from taskd.wire._pb.pubfault_pb2_grpc import PubFaultServicer
from taskd.wire.json_reading import loads

log = logging.getLogger(__name__)

NOTES = "public/"
"""Notes of the journal: the public faults of one node each."""
RATE = Rate(1.0, 100.0)
"""Per resource."""
RESOURCES = 100
INVALID, TOO_OFTEN = RecoverCode.InvalidReqParam, RecoverCode.InvalidReqRate


class PublicFaultService(PubFaultServicer):
    def __init__(
        self,
        jobs: JobRegistry,
        cluster: Cluster,
        journal: Journal,
        codes: PublicCodeFile,
        clock: Clock,
    ) -> None:
        self._jobs, self._cluster, self._journal = jobs, cluster, journal
        self._codes, self._clock = codes, clock
        self._faults = jobs.faults.public
        self._rates = Buckets(RATE, RESOURCES, clock)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        jobs.on_change.append(self._changed)

    async def start(self) -> None:
        for name, text in (await self._journal.notes()).items():
            if name.startswith(NOTES):
                try:
                    self._faults.entries |= _entries(name.removeprefix(NOTES), loads(text))
                except (ValueError, TypeError) as error:
                    log.error("note %r of the journal cannot be read: %s", name, error)
        for body in self._cluster.all(Kind.CONFIG_MAP):
            if is_public_fault(body):
                await self._from_map(body)
        if self._faults.entries:
            self._jobs.views.public_faults_changed({node for node, _, _ in self._faults.entries})
        self._expire_later()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    async def SendPublicFault(self, request: pb.PublicFaultRequest, context: Any) -> pb.RespStatus:
        code, info = await self._take(request)
        return pb.RespStatus(code=code, info=info)

    async def _take(self, request: pb.PublicFaultRequest) -> tuple[RecoverCode, str]:
        codes = self._codes.codes()
        report = fault_codec.public_report(request, self._node_of)
        if problem := problem_of(report, codes):
            return INVALID, problem
        if not self._rates.take(report.resource):
            return TOO_OFTEN, TOO_OFTEN.sentence
        problems = [problem_of_fault(fault, codes) for fault in report.faults]
        wrong = "; ".join(sorted({problem for problem in problems if problem})[:4])
        if all(problems):
            return INVALID, f"{wrong}; {self._codes.missing}".removesuffix("; ")
        try:
            await self._apply(report)
        except JournalFailed as error:
            return RecoverCode.ServerInnerError, str(error)
        if wrong:
            return RecoverCode.OK, f"{sum(map(bool, problems))} faults are ignored: {wrong}"
        return RecoverCode.OK, RecoverCode.OK.sentence

    async def _apply(self, report: PublicReport) -> None:
        changed = self._faults.apply(report, self._codes.codes(), self._clock())
        await self._news(changed)

    async def _news(self, nodes: set[str]) -> None:
        if not nodes:
            return
        self._jobs.views.public_faults_changed(nodes)
        self._expire_later()
        for node in sorted(nodes):
            entries = self._faults.on(node)
            await self._journal.note(f"{NOTES}{node}", _text(entries) if entries else None)

    def _expire_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._faults.next_end
        if at < inf:
            delay = max(0.0, at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._run(self._news(self._faults.expire(self._clock())))
        self._expire_later()

    # ConfigMaps

    def _changed(self, change: Changed | None) -> None:
        if change is not None and change.after is not None and is_public_fault(change.after):
            self._run(self._from_map(change.after))

    async def _from_map(self, body: Json) -> None:
        name = body["metadata"].get("name")
        try:
            content = loads(body["data"][PUBLIC_FAULT])
            request = ParseDict(content, pb.PublicFaultRequest(), ignore_unknown_fields=True)
        except (ParseError, ValueError, TypeError, KeyError) as error:
            log.warning("ConfigMap %s is ignored: %s", name, str(error)[:200])
            return
        code, info = await self._take(request)
        if code != RecoverCode.OK:
            log.warning("ConfigMap %s is ignored: %s", name, info)

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("public faults: %s", error)

    def _node_of(self, serial: str) -> str:
        if not serial:
            return ""
        for body in self._cluster.all(Kind.NODE):
            if serial_of(body) == serial:
                return str(body["metadata"]["name"])
        return ""


def _text(entries: dict[Key, Entry]) -> str:
    return json.dumps(
        [
            [resource, fault, e.code, e.level, e.time_ms, e.devices, e.added_at, e.ends_at]
            for (_, resource, fault), e in entries.items()
        ]
    )


def _entries(node: str, rows: list[Any]) -> dict[Key, Entry]:
    return {
        (node, str(resource), str(fault)): Entry(
            str(code), str(level), int(time), tuple(map(int, devices)), float(added), float(ends)
        )
        for resource, fault, code, level, time, devices, added, ends in rows
    }
