"""Places of a bus for tests: real gRPC on loopback, ports chosen by the system."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from taskd.bus.endpoint import Bus, BusConfig, Change, Received, Sent
from taskd.model.codes import NetCode
from taskd.model.ids import Position, Role, agent, manager, worker
from taskd.model.messages import Body

PATIENCE_S = 20.0


def proxy(node: int) -> Position:
    return Position(Role.PROXY, str(node), "1700000000")


@asynccontextmanager
async def running_bus(
    me: Position, above: Bus | None, *, serves: bool = False, **settings: Any
) -> AsyncIterator[Bus]:
    settings.setdefault("listen", "127.0.0.1:0" if serves else None)
    settings.setdefault("upstream", None if above is None else f"127.0.0.1:{above.port}")
    bus = Bus(BusConfig(me=me, **settings))
    await bus.start()
    try:
        assert await bus.join(PATIENCE_S), bus.disconnect_reason
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def whole_job(
    nodes: int = 2, ranks: int = 2, **settings: Any
) -> AsyncIterator[dict[Position, Bus]]:
    """A manager and, on each node, a proxy, an agent and some workers."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        top = await enter(running_bus(manager(), None, serves=True, **settings))
        buses = {manager(): top}
        for node in range(nodes):
            prx = await enter(running_bus(proxy(node), top, serves=True, **settings))
            leaves = [agent(node)]
            leaves += [worker(node, node * ranks + local) for local in range(ranks)]
            joined = [await enter(running_bus(leaf, prx, **settings)) for leaf in leaves]
            buses |= {proxy(node): prx, **dict(zip(leaves, joined, strict=True))}
        yield buses


async def next_of(bus: Bus) -> Received:
    async with asyncio.timeout(PATIENCE_S):
        return await bus.receive()


async def bodies_of(buses: Iterable[Bus], count: int = 1) -> list[list[Body]]:
    return [[(await next_of(bus)).body for _ in range(count)] for bus in buses]


async def until_delivered(send: Callable[[], Awaitable[Sent]]) -> Sent:
    """Send until it arrives, as an application would after a break."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            sent = await send()
            if sent.code == NetCode.OK:
                return sent
            await asyncio.sleep(0.01)


async def until_change(bus: Bus, wanted: Change) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async for change in bus.changes():
            if change == wanted:
                return
