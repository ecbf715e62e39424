"""A killed agent is told from a broken link, on real sockets and with a real kill."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from taskd.agent.run.plan import free_port
from taskd.bus import liveness_port as door
from taskd.bus.liveness_port import Door
from taskd.manager.node_probes import NodeProbes
from taskd.model.ids import NodeRank
from taskd.model.manager import Event, NodeGone
from taskd.model.messages import AgentHello

PATIENCE_S = 20.0
NODE = NodeRank(1)
HOUSE = """
import asyncio
from taskd.bus.liveness_port import Door

async def live():
    door = await Door.open("127.0.0.1:1")
    print(door.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(live())
"""


def house() -> tuple[subprocess.Popen[str], str]:
    """A process that does nothing but keep its door."""
    process = subprocess.Popen([sys.executable, "-c", HOUSE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def hello(address: str) -> AgentHello:
    return AgentHello(NODE, "host", (), "", door=address)


def test_a_node_counts_as_gone_when_its_agent_is_killed_and_not_before() -> None:
    process, address = house()

    async def live() -> None:
        events: asyncio.Queue[Event] = asyncio.Queue()
        knocking = NodeProbes(events.put_nowait)
        knocking.heard(hello(address))
        async with asyncio.timeout(PATIENCE_S):
            await knocking.tried(NODE)
        knocking.unlinked(NODE)
        for _ in range(door.MOST_GUESTS):
            assert await door.opens(address, PATIENCE_S)  # the line that is held is cut over it
        assert events.empty()
        process.kill()
        async with asyncio.timeout(PATIENCE_S):
            gone = await events.get()
        assert isinstance(gone, NodeGone)
        assert gone.node == NODE

    try:
        asyncio.run(live())
    finally:
        process.kill()
        process.communicate()


def test_a_door_that_never_opened_proves_nothing() -> None:
    async def live() -> None:
        events: asyncio.Queue[Event] = asyncio.Queue()
        knocking = NodeProbes(events.put_nowait)
        knocking.heard(hello(f"127.0.0.1:{free_port()}"))
        async with asyncio.timeout(PATIENCE_S):
            await knocking.tried(NODE)
        knocking.unlinked(NODE)
        async with asyncio.timeout(PATIENCE_S):
            await knocking.tried(NODE)
        assert events.empty()

    asyncio.run(live())


def test_an_agent_that_is_linked_again_is_left_alone() -> None:
    async def live() -> None:
        mine = await Door.open("127.0.0.1:1")
        assert mine is not None
        events: asyncio.Queue[Event] = asyncio.Queue()
        knocking = NodeProbes(events.put_nowait)
        knocking.heard(hello(mine.address))
        await knocking.tried(NODE)
        knocking.unlinked(NODE)
        knocking.linked(NODE)
        mine.close()
        assert not await door.opens(mine.address, PATIENCE_S)
        assert events.empty()

    asyncio.run(live())
