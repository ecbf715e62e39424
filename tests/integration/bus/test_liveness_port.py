"""The liveness port tells a killed agent from a broken connection, with real sockets and kills."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

from taskd.bus import liveness_port
from taskd.bus.liveness_port import LivenessPort
from taskd.manager.node_liveness import NodeProbes
from taskd.model.ids import NodeRank
from taskd.model.manager import Event, NodeGone
from taskd.model.messages import AgentHello
from taskd.runtime.address import Address, free_port
from taskd.runtime.clock import monotonic

PATIENCE_S, TIMEOUT_S = 20.0, 0.1
NODE = NodeRank(1)
PROGRAM = """
import asyncio
from taskd.bus.liveness_port import LivenessPort

async def live():
    port = await LivenessPort.open("127.0.0.1:1")
    print(port.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(live())
"""


def start_agent() -> tuple[subprocess.Popen[str], str]:
    """A process that only keeps its liveness port open."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def hello(address: str) -> AgentHello:
    return AgentHello(NODE, "host", (), "", liveness_port=address)


def test_node_is_gone_when_its_agent_is_killed_and_not_before() -> None:
    process, address = start_agent()

    async def live() -> None:
        events: asyncio.Queue[Event] = asyncio.Queue()
        probes = NodeProbes(events.put_nowait)
        probes.agent_joined(hello(address))
        async with asyncio.timeout(PATIENCE_S):
            await probes.wait_for_probe(NODE)
        probes.node_disconnected(NODE)
        host, _, port = address.rpartition(":")
        others = [
            await asyncio.open_connection(host, int(port))
            for _ in range(liveness_port.MAX_CONNECTIONS)
        ]  # end the probe's connection
        assert events.empty()
        process.kill()
        async with asyncio.timeout(PATIENCE_S):
            gone = await events.get()
        assert isinstance(gone, NodeGone)
        assert gone.node == NODE
        for _, writer in others:
            writer.close()

    try:
        asyncio.run(live())
    finally:
        process.kill()
        process.communicate()


def test_strangers_do_not_disconnect_the_manager() -> None:
    async def live() -> None:
        port = await LivenessPort.open("127.0.0.1:1")
        assert port is not None
        host, _, number = port.address.rpartition(":")
        reader, manager = await asyncio.open_connection(host, int(number))
        strangers = []
        for _ in range(3 * liveness_port.MAX_CONNECTIONS):
            strangers.append(
                await asyncio.open_connection(host, int(number), local_addr=("127.0.0.2", 0))
            )
        async with asyncio.timeout(PATIENCE_S):
            for stranger, _ in strangers[: 2 * liveness_port.MAX_CONNECTIONS]:
                assert await stranger.read(1) == b""  # replaced by the next ones
        assert not reader.at_eof()
        leaving = asyncio.create_task(reader.read(1))
        await asyncio.sleep(0)
        assert not leaving.done()
        port.close()
        async with asyncio.timeout(PATIENCE_S):
            assert await leaving == b""
        for _, writer in (*strangers, (reader, manager)):
            writer.close()

    asyncio.run(live())


def test_refusal_of_a_port_that_never_accepted_proves_nothing() -> None:
    async def live() -> None:
        events: asyncio.Queue[Event] = asyncio.Queue()
        probes = NodeProbes(events.put_nowait)
        probes.agent_joined(hello(f"127.0.0.1:{free_port()}"))
        async with asyncio.timeout(PATIENCE_S):
            await probes.wait_for_probe(NODE)
        probes.node_disconnected(NODE)
        async with asyncio.timeout(PATIENCE_S):
            await probes.wait_for_probe(NODE)
        assert events.empty()

    asyncio.run(live())


def test_agent_that_has_reconnected_is_not_probed() -> None:
    async def live() -> None:
        mine = await LivenessPort.open("127.0.0.1:1")
        assert mine is not None
        events: asyncio.Queue[Event] = asyncio.Queue()
        probes = NodeProbes(events.put_nowait)
        probes.agent_joined(hello(mine.address))
        await probes.wait_for_probe(NODE)
        probes.node_disconnected(NODE)
        probes.node_connected(NODE)
        mine.close()
        assert not await liveness_port.is_reachable(mine.address, PATIENCE_S)
        assert events.empty()

    asyncio.run(live())


def test_process_that_ends_with_an_open_connection_logs_no_error() -> None:
    until_connected = "while len(asyncio.all_tasks()) < 2: await asyncio.sleep(0.01)"
    program = PROGRAM.replace("await asyncio.Event().wait()", until_connected)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    address = Address.parse(process.stdout.readline().strip())
    with socket.create_connection((address.host, address.port)):
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert errors == ""


def test_answer_counts_although_this_process_sees_it_too_late() -> None:
    """A manager that begins to lead is busy: nodes that answer must not count as silent."""

    async def look(address: str) -> bool | None:
        looking = asyncio.create_task(liveness_port.is_open(address, TIMEOUT_S))
        await asyncio.sleep(0)  # it has begun to connect
        until = monotonic() + 2 * TIMEOUT_S
        while monotonic() < until:
            pass
        return await looking

    with socket.create_server(("127.0.0.1", 0)) as server:
        assert asyncio.run(look(f"127.0.0.1:{server.getsockname()[1]}")) is True
    assert asyncio.run(look(f"127.0.0.1:{free_port()}")) is False
