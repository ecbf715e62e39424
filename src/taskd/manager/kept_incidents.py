"""The incidents of a job, kept where the next leader finds them.

Only the newest list matters: it is written until it is stored, and never after an older one.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

from taskd.clusterd.records.journal_records import PastRound
from taskd.clusterd.records.packed_text import pack
from taskd.core.agent.error_text import shortened
from taskd.core.record import StoreUnreachable
from taskd.runtime.retry import Tries, every

log = logging.getLogger(__name__)

RETRY_S = 0.3
FLUSH_S = 2.0
"""How long the end of a term waits for the last write."""
MOST_BYTES = 256 * 1024
"""Compressed. etcd keeps each version until it is compacted."""
SHORTER = ((4_000, 512), (400, 64), (100, 8))
"""Characters of each evidence and faults of each incident, tried in turn."""


class KeptIncidents:
    """Needs a running event loop."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """`write` stores the list. It may raise StoreUnreachable, and is then called again."""
        self._write = write
        self._newest: list[Any] | None = None
        """What is not stored yet."""
        self._writing: asyncio.Task[None] | None = None

    def keep(self, incidents: list[Any]) -> None:
        """Write this list, and none before it any more. Returns at once."""
        self._newest = incidents
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_newest())

    async def close(self) -> None:
        """Call it while this process still leads."""
        if self._writing is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._writing
        if self._newest is not None:
            log.warning("the next leader knows the last incidents only from clusterd's record")

    async def _write_newest(self) -> None:
        problem = ""
        async for _ in Tries(every(RETRY_S)):
            try:
                while (incidents := self._newest) is not None:
                    await self._write(packed(incidents))
                    if self._newest is incidents:
                        self._newest = None
            except StoreUnreachable as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("the incidents are not saved yet: %s; trying again", problem)
            else:
                return


def packed(incidents: list[Any]) -> bytes:
    """As one value of the store. If it is too long, evidence is shortened, and in the end the
    oldest incidents are left out."""
    value = pack(json.dumps(incidents))
    for chars, faults in SHORTER:
        if len(value) <= MOST_BYTES:
            return value
        incidents = [_shorter(one, chars, faults) for one in incidents]
        value = pack(json.dumps(incidents))
    while len(value) > MOST_BYTES:
        incidents = incidents[len(incidents) // 2 + 1 :]
        value = pack(json.dumps(incidents))
    return value


def _shorter(incident: dict[str, Any], chars: int, most: int) -> dict[str, Any]:
    faults = [
        {**fault, "evidence": shortened(fault["evidence"], chars)}
        for fault in incident["faults"][:most]
    ]
    return {**incident, "faults": faults, "because": incident["because"][:chars]}


def with_rounds(incidents: list[Any], rounds: Iterable[PastRound]) -> list[Any]:
    """The incidents, completed by what clusterd has decided.

    A leader can end before it has saved an incident, and the one that completes a repair may have
    begun after the fault: clusterd's record has both.
    """
    decided = {past.incident: past for past in rounds if past.faults}
    known = {one["incident"] for one in incidents}
    complete = [
        {**one, "faults": _faults(past)}
        if not one["faults"] and (past := decided.get(one["incident"])) is not None
        else one
        for one in incidents
    ]
    missing = [_incident(past) for number, past in decided.items() if number not in known]
    return sorted([*complete, *missing], key=lambda one: int(one["incident"]))


def _incident(past: PastRound) -> dict[str, Any]:
    return {
        "incident": past.incident,
        "strategy": past.strategy,
        "outcome": past.outcome,
        "because": "",
        "faults": _faults(past),
        "parts_ms": {"all": past.took_s * 1000.0},
    }


def _faults(past: PastRound) -> list[dict[str, Any]]:
    return [
        {"rank": fault.rank, "kind": fault.cause, "evidence": fault.evidence}
        for fault in past.faults
    ]
