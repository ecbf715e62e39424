"""One node of the bus as a separate process, to be killed. `python -m tests.chaos.bus_process`.

It prints its port, then a line for every message it receives; a manager or agent also answers each
with the same message. Lines on its standard input are destinations to send a number to.
"""

from __future__ import annotations

import asyncio
import json
import sys

from taskd.bus.endpoint import Bus, BusConfig
from taskd.model.ids import Position
from taskd.model.messages import RestartsLeft


async def main(settings: dict[str, str]) -> None:
    me = Position(*settings.pop("me").split("/"))
    bus = Bus(BusConfig(me=me, **settings))  # type: ignore[arg-type]
    await bus.start()
    say(port=bus.port)
    async with asyncio.TaskGroup() as group:
        group.create_task(tell_changes(bus))
        while True:
            got = await bus.receive()
            body = got.body
            assert isinstance(body, RestartsLeft)
            say(src=str(got.src), number=body.remaining)


async def tell_changes(bus: Bus) -> None:
    async for change in bus.changes():
        say(change=type(change).__name__)


def say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
