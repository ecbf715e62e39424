from __future__ import annotations

import asyncio
import warnings

from taskd.agent.act import start_task


def test_nothing_is_started_while_the_process_ends() -> None:
    """Timers and exits of processes come until the last moment."""
    begun: list[str] = []

    async def work(name: str) -> None:
        begun.append(name)

    async def ends(tasks: asyncio.TaskGroup) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            start_task(tasks, work("late"))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            start_task(tasks, work("early"))
            last = tasks.create_task(ends(tasks))
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(last.cancel)
            raise KeyError

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            asyncio.run(main())
        except* KeyError:
            pass
    assert begun == ["early"]
