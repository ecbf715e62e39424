"""The task that keeps a copy of one kind of objects: nothing that it meets may end it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from taskd.clusterd.kubernetes.api_client import PODS, ApiClient
from taskd.clusterd.kubernetes.reflect import reflect
from taskd.core.clusterd.reflector import Change, Reflector, ReflectorConfig

PATIENCE_S = 20.0


class OnePod:
    """Stands in for the API server."""

    async def request(self, *what: object, **params: str) -> dict[str, Any]:
        pod = {"metadata": {"namespace": "team", "name": "pod", "uid": "u"}}
        return {"metadata": {"resourceVersion": "1"}, "items": [pod]}


def test_object_that_cannot_be_processed_does_not_end_the_watch() -> None:
    async def main() -> None:
        core = Reflector(ReflectorConfig(first_pause_s=0.001), lambda: 1.0)
        applied, problems = asyncio.Event(), list[str]()

        def apply(changes: list[Change]) -> None:
            if not problems:
                problems.append("once")
                raise KeyError("metadata")
            problems.append(core.problem)
            applied.set()

        api = cast("ApiClient", OnePod())
        task = asyncio.create_task(reflect(api, PODS, core, apply, lambda body: body))
        async with asyncio.timeout(PATIENCE_S):
            await applied.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
