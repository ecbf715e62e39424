"""One stream between two processes, when it breaks."""

from __future__ import annotations

import asyncio

import grpc

from taskd.bus.stream import run_stream
from taskd.core.bus.routing import Side
from taskd.model.ids import agent, manager
from taskd.model.messages import KeptAlive
from taskd.wire._pb.link_pb2_grpc import LinkStub
from tests.integration.bus.bus_nodes import PATIENCE_S, proxy, running_bus


def test_stream_that_ends_before_a_write_is_not_an_error() -> None:
    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            running_bus(agent(1), mgr) as below,
            grpc.aio.insecure_channel(f"127.0.0.1:{mgr.port}") as channel,
            asyncio.timeout(PATIENCE_S),
        ):
            stream = LinkStub(channel).Open()  # type: ignore[no-untyped-call]
            assert await stream.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert await run_stream(below._relay_loop, Side.UP, stream) == "the stream had ended"

    asyncio.run(scenario())


def test_kernel_shows_the_state_of_a_connection() -> None:
    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            running_bus(proxy(1), mgr, serves=True) as between,
            running_bus(agent(1), between) as below,
            asyncio.timeout(PATIENCE_S),
        ):
            assert await mgr.send(agent(1), KeptAlive())
            wire = mgr.tcp_state_of(agent(1))
            assert wire is not None
            assert wire.usual_s >= 0.2
            assert mgr.tcp_state_of(agent(2)) is None, "no process has this position"
            assert below.tcp_state_of(manager()) is None, "that is not below"

    asyncio.run(scenario())
