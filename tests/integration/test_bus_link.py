"""One stream between two places, at the moment when it breaks."""

from __future__ import annotations

import asyncio

import grpc

from taskd.core.routing import Side
from taskd.edge.link import carry
from taskd.model.ids import agent, manager
from taskd.wire._pb.link_pb2_grpc import LinkStub
from tests.integration.bus_places import PATIENCE_S, placed


def test_a_stream_that_ends_before_it_is_written_to_is_no_reason_to_give_up() -> None:
    async def scenario() -> None:
        async with (
            placed(manager(), None, serves=True) as mgr,
            placed(agent(1), mgr) as below,
            grpc.aio.insecure_channel(f"127.0.0.1:{mgr.port}") as channel,
            asyncio.timeout(PATIENCE_S),
        ):
            stream = LinkStub(channel).Open()  # type: ignore[no-untyped-call]
            assert await stream.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert await carry(below._switch, Side.UP, stream) == "the stream had ended"

    asyncio.run(scenario())
