"""Client of an Ascend server: sends by TransferMessage, receives from InitServerDownStream.

The server does not match Acks by uuid, so each sync message is answered exactly once, promptly, and
only on the stream that it came from. Messages of one source are sent one after the other, because
nothing else keeps their order; different sources do not wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc

from taskd.bus.relay_loop import RelayLoop
from taskd.bus.stream import EOF, Stream
from taskd.core.bus.routing import Side
from taskd.model.bus import Parcel, Receipt
from taskd.model.codes import NetCode, net_code
from taskd.model.ids import Position
from taskd.runtime.clock import monotonic
from taskd.wire._pb import tasknet_pb2_grpc
from taskd.wire.bus_frames import (
    DEFAULT_PATIENCE_S,
    message_from_pb,
    message_to_pb,
    receipt_from_pb,
    receipt_to_pb,
)

CODE_KEY = "taskd-code"
"""Trailing metadata of a failed TransferMessage: the code that its Ack would have."""

MAX_BACKLOG = 1024
"""Messages that have left the window and are not answered yet."""

Metadata = tuple[tuple[str, str], ...]


async def join(
    relay_loop: RelayLoop, stub: tasknet_pb2_grpc.TaskNetStub, metadata: Metadata
) -> str:
    """Serve one connection until it breaks."""
    stream = stub.InitServerDownStream(metadata=metadata)
    wake = relay_loop.wake_for(Side.UP)
    with relay_loop.relay() as relay:
        queue = relay.queue(Side.UP)
        relay.stream_opened(Side.UP)
    wake.set()
    reader = asyncio.create_task(_read(relay_loop, stream))
    sender = _Sender(relay_loop, stub, metadata, wake)
    try:
        while True:
            woken = asyncio.create_task(wake.wait())
            await asyncio.wait({woken, reader}, return_when=asyncio.FIRST_COMPLETED)
            woken.cancel()
            if reader.done():
                return reader.result()
            wake.clear()
            while (receipt := queue.next_receipt()) is not None:
                await stream.write(receipt_to_pb(receipt))
            while sender.backlog < MAX_BACKLOG and (parcel := queue.next_parcel()) is not None:
                sender.send(parcel)
    finally:
        reader.cancel()
        await sender.close()
        await asyncio.gather(reader, return_exceptions=True)
        with relay_loop.relay() as relay:
            relay.disconnected(Side.UP, monotonic())


async def _read(relay_loop: RelayLoop, stream: Stream) -> str:
    while True:
        read = await stream.read()
        if read is EOF:
            return "the server ended the stream"
        parcel = message_from_pb(read)
        with relay_loop.relay() as relay:
            if not isinstance(parcel, NetCode):
                asker = Side.UP if parcel.sync else None
                relay.message_received(Side.UP, parcel, asker, monotonic())
            elif read.header.sync:
                relay.refuse(Side.UP, read.header.uuid, parcel)


class _Sender:
    """Sends the messages of each source in order."""

    def __init__(
        self,
        relay_loop: RelayLoop,
        stub: tasknet_pb2_grpc.TaskNetStub,
        metadata: Metadata,
        drained: asyncio.Event,
    ) -> None:
        self.backlog = 0
        self._drained = drained
        self._relay_loop = relay_loop
        self._stub = stub
        self._metadata = metadata
        self._queues: dict[Position, deque[Parcel]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, parcel: Parcel) -> None:
        self.backlog += 1
        queue = self._queues.get(parcel.src)
        if queue is not None:
            queue.append(parcel)
            return
        self._queues[parcel.src] = deque([parcel])
        task = asyncio.create_task(self._drain(parcel.src))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, source: Position) -> None:
        queue = self._queues[source]
        try:
            while queue:
                await self._transfer(queue.popleft())
                self.backlog -= 1
                self._drained.set()
                self._relay_loop.progressed()
        finally:
            del self._queues[source]

    async def _transfer(self, parcel: Parcel) -> None:
        timeout_s = parcel.patience_s if parcel.sync else DEFAULT_PATIENCE_S
        try:
            ack = await self._stub.TransferMessage(
                message_to_pb(parcel), metadata=self._metadata, timeout=timeout_s
            )
            receipt = receipt_from_pb(ack)
        except grpc.aio.AioRpcError as error:
            receipt = Receipt(parcel.uuid, code_of(error), None)
        with self._relay_loop.relay() as relay:
            if parcel.sync:
                receipt = Receipt(parcel.uuid, receipt.code, receipt.src)
                relay.receipt_received(Side.UP, receipt)
            elif receipt.code:
                relay.count_lost(f"the upstream server answered with {receipt.code}")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def code_of(error: grpc.aio.AioRpcError) -> NetCode:
    """The code of a failed TransferMessage. Our server sends it; Ascend's only sends UNKNOWN."""
    trailing: Any = error.trailing_metadata() or ()
    code = str(dict(trailing).get(CODE_KEY, ""))
    if code.isdigit():
        return net_code(int(code))
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return NetCode.NetworkAckLost
        case grpc.StatusCode.UNAVAILABLE:
            return NetCode.NetworkSendLost
        case _:
            return NetCode.NetErr
