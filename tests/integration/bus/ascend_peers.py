"""A client and a server that speak as Ascend's TaskD does, straight on the generated stubs.

The server has the habits that matter to a peer: it knows no `taskd.v1.Link`, its stream takes
any next Ack for the answer to its last message, and it looks up next hops by the exact position.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from taskd.model.ids import Position
from taskd.wire._pb import tasknet_pb2 as pb
from taskd.wire._pb.tasknet_pb2_grpc import (
    TaskNetServicer,
    TaskNetStub,
    add_TaskNetServicer_to_server,
)
from taskd.wire.bus_frames import position_from_pb, position_to_pb

Context = grpc.aio.ServicerContext[Any, Any]


def envelope(msg_type: str, code: int, message: str = "") -> str:
    text = message.replace('"', '\\"')
    return f'{{"msg_type":"{msg_type}","code":{code},"message":"{text}","extension":null}}'


def message(
    src: Position, dst: Position, body: str, *, uuid: str = "u1", sync: bool = True
) -> pb.Message:
    header = pb.MessageHeader(
        uuid=uuid, mtype="DEFAULT", sync=sync, src=position_to_pb(src), dst=position_to_pb(dst)
    )
    return pb.Message(header=header, body=body)


class AscendServer(TaskNetServicer):
    def __init__(self, me: Position) -> None:
        self.me = me
        self.port = 0
        self.registered: list[Position] = []
        self.routes: dict[Position, Position] = {}
        self.streams: dict[Position, Context] = {}
        self.got: asyncio.Queue[pb.Message] = asyncio.Queue()
        self.opened = asyncio.Event()
        self.refuse: grpc.StatusCode | None = None

    async def Register(self, request: pb.RegisterReq, context: Context) -> pb.Ack:
        self.registered.append(position_from_pb(request.pos))
        return self._ack(request.uuid)

    async def PathDiscovery(self, request: pb.PathDiscoveryReq, context: Context) -> pb.Ack:
        for position in request.path:
            self.routes[position_from_pb(position)] = position_from_pb(request.proxyPos)
        return self._ack(request.uuid)

    async def TransferMessage(self, request: pb.Message, context: Context) -> pb.Ack:
        if self.refuse is not None:
            await context.abort(self.refuse, "broadcast error")
        self.got.put_nowait(request)
        return self._ack(request.header.uuid)

    async def InitServerDownStream(self, request_iterator: object, context: Context) -> None:
        shown = {key: str(value) for key, value in context.invocation_metadata() or ()}
        child = Position(shown["role"], shown["serverrank"], shown["processrank"])
        if child not in self.registered:
            await context.abort(grpc.StatusCode.UNKNOWN, "un registry error")
        self.streams[child] = context
        self.opened.set()
        await asyncio.Event().wait()

    async def send(self, request: pb.Message) -> pb.Ack | None:
        """Down the stream of the next hop; for a sync message, whatever Ack comes next."""
        stream = self.streams[self.routes[position_from_pb(request.header.dst)]]
        await stream.write(request)
        if not request.header.sync:
            return None
        async with asyncio.timeout(3.0):
            ack = await stream.read()
        assert isinstance(ack, pb.Ack)
        return ack

    def _ack(self, uuid: str) -> pb.Ack:
        return pb.Ack(uuid=uuid, code=0, src=position_to_pb(self.me))


@asynccontextmanager
async def ascend_server(me: Position, port: int = 0) -> AsyncIterator[AscendServer]:
    servicer = AscendServer(me)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_TaskNetServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    servicer.port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(None)


class AscendClient:
    """An agent or worker. It registers, announces itself, and then opens its stream."""

    def __init__(self, me: Position, channel: grpc.aio.Channel) -> None:
        self.me = me
        self.stub = TaskNetStub(channel)  # type: ignore[no-untyped-call]
        self.stream: Any = None

    async def join(self, *, stream: bool = True) -> None:
        pos = position_to_pb(self.me)
        ack = await self.stub.Register(pb.RegisterReq(uuid="r", pos=pos))
        assert (ack.code, ack.uuid) == (0, "r")
        found = pb.PathDiscoveryReq(uuid="p", proxyPos=pos, path=[pos])
        ack = await self.stub.PathDiscovery(found)
        assert ack.code == 0
        if stream:
            self.open()

    def open(self) -> None:
        metadata = (
            ("role", self.me.role),
            ("serverrank", self.me.server_rank),
            ("processrank", self.me.process_rank),
        )
        self.stream = self.stub.InitServerDownStream(metadata=metadata)

    async def send(self, request: pb.Message) -> pb.Ack:
        ack: pb.Ack = await self.stub.TransferMessage(request)
        return ack

    async def receive(self) -> pb.Message:
        async with asyncio.timeout(30.0):
            got = await self.stream.read()
        assert isinstance(got, pb.Message), got
        return got

    async def acknowledge(self, got: pb.Message, code: int = 0) -> None:
        ack = pb.Ack(uuid=got.header.uuid, code=code, src=position_to_pb(self.me))
        await self.stream.write(ack)


@asynccontextmanager
async def ascend_client(me: Position, port: int) -> AsyncIterator[AscendClient]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield AscendClient(me, channel)
