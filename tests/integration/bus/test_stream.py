"""One stream between two places, at the moment when it breaks."""

from __future__ import annotations

import asyncio

import grpc

from taskd.bus.stream import run_stream
from taskd.core.bus.routing import Side
from taskd.model.ids import agent, manager
from taskd.model.messages import KeptAlive
from taskd.wire._pb.link_pb2_grpc import LinkStub
from tests.integration.bus.bus_places import PATIENCE_S, placed, proxy


def test_stream_that_ends_before_a_write_is_not_an_error() -> None:
    async def scenario() -> None:
        async with (
            placed(manager(), None, serves=True) as mgr,
            placed(agent(1), mgr) as below,
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
            placed(manager(), None, serves=True) as mgr,
            placed(proxy(1), mgr, serves=True) as between,
            placed(agent(1), between) as below,
            asyncio.timeout(PATIENCE_S),
        ):
            assert await mgr.send(agent(1), KeptAlive())
            wire = mgr.tcp_state_of(agent(1))
            assert wire is not None
            assert wire.usual_s >= 0.2
            assert mgr.tcp_state_of(agent(2)) is None, "nobody is there"
            assert below.tcp_state_of(manager()) is None, "that is not below"

    asyncio.run(scenario())
