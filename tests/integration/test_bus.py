"""The bus over real gRPC: every kind of message between every kind of role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from taskd.edge.bus import Bus, BusConfig, Received
from taskd.model.codes import NetCode
from taskd.model.ids import Position, Role, agent, manager, worker
from taskd.model.messages import Park, RestartsLeft, StartWorkers

PATIENCE_S = 20.0


def proxy(node: int) -> Position:
    return Position(Role.PROXY, str(node), "1700000000")


@asynccontextmanager
async def place(me: Position, above: Bus | None, *, serves: bool = False) -> AsyncIterator[Bus]:
    bus = Bus(
        BusConfig(
            me=me,
            listen="127.0.0.1:0" if serves else None,
            upstream=None if above is None else f"127.0.0.1:{above.port}",
        )
    )
    await bus.start()
    try:
        assert await bus.join(PATIENCE_S), bus.trouble
        yield bus
    finally:
        await bus.close()


async def next_of(bus: Bus) -> Received:
    async with asyncio.timeout(PATIENCE_S):
        return await bus.receive()


def test_a_message_goes_down_through_a_proxy_and_its_answer_comes_back_up() -> None:
    async def scenario() -> None:
        async with (
            place(manager(), None, serves=True) as mgr,
            place(proxy(1), mgr, serves=True) as prx,
            place(worker(1, 9), prx) as wrk,
        ):
            sent = await mgr.send(worker(1, 9), StartWorkers(3))
            assert (sent.code, sent.source) == (NetCode.OK, worker(1, 9))
            got = await next_of(wrk)
            assert (got.src, got.body) == (manager(), StartWorkers(3))

            sent = await wrk.send(manager(), RestartsLeft(2))
            assert (sent.code, sent.source) == (NetCode.OK, manager())
            assert (await next_of(mgr)).body == RestartsLeft(2)

            nobody = await mgr.send(agent(7), StartWorkers(1))
            assert (nobody.code, nobody.source) == (NetCode.NoRoute, manager())

    asyncio.run(scenario())
