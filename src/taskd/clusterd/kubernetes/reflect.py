"""Runs one reflector: does what the core decides, and passes the changes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import assert_never

from taskd.clusterd.kubernetes.api_client import ApiClient, ApiFailed, Resource
from taskd.core.clusterd.reflector import GONE, Change, Json, ListPage, OpenWatch, Pause, Reflector
from taskd.runtime.clock import Clock, monotonic

log = logging.getLogger(__name__)


async def reflect(
    api: ApiClient,
    resource: Resource,
    core: Reflector,
    apply: Callable[[list[Change]], None],
    shrink: Callable[[Json], Json],
    clock: Clock = monotonic,
) -> None:
    """Until it is cancelled. `shrink` leaves of an object what must be kept while it is listed."""
    problem = ""
    while True:
        try:
            match core.next_action(clock()):
                case Pause(until):
                    await asyncio.sleep(until - clock())
                case ListPage(token):
                    await _list(api, resource, core, apply, shrink, token, clock)
                case OpenWatch(version):
                    await _watch(api, resource, core, apply, version, clock)
                case action:
                    assert_never(action)
        except Exception as error:
            # Without this task, everything would for ever look as it does now. List again: the
            # changes that were being applied are lost.
            log.exception("resource=%s an object could not be processed", resource.plural)
            core.failed(GONE, f"internal error: {type(error).__name__} {error}", 0.0, clock())
        if core.problem and core.problem != problem:
            log.warning(
                "resource=%s cannot be watched, the last known objects stay in effect: %s",
                resource.plural,
                core.problem,
            )
        elif problem and not core.problem:
            log.info("resource=%s is watched again", resource.plural)
        problem = core.problem


async def _list(
    api: ApiClient,
    resource: Resource,
    core: Reflector,
    apply: Callable[[list[Change]], None],
    shrink: Callable[[Json], Json],
    token: str,
    clock: Clock,
) -> None:
    params = {"limit": str(resource.page)} | ({"continue": token} if token else {})
    try:
        body = await api.request("GET", resource.path(), None, **params)
    except ApiFailed as error:
        core.failed(error.code, str(error), error.retry_after_s, clock())
        apply([])  # a kind that the server does not know counts as synced
        return
    about = body.get("metadata") or {}
    items = [shrink(item) for item in body.get("items") or () if isinstance(item, dict)]
    version, more = str(about.get("resourceVersion", "")), str(about.get("continue") or "")
    apply(core.page(items, version, more, clock()))


async def _watch(
    api: ApiClient,
    resource: Resource,
    core: Reflector,
    apply: Callable[[list[Change]], None],
    version: str,
    clock: Clock,
) -> None:
    try:
        async with api.watch(resource.path(), version) as events:
            core.watch_opened()
            async for kind, body in events:
                apply(core.event(kind, body, clock()))
    except ApiFailed as error:
        core.failed(error.code, str(error), error.retry_after_s, clock())
    else:
        core.watch_ended(clock())
