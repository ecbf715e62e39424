"""The way up to a server of Ascend's: messages go by TransferMessage, come by its stream.

Its Acks are not matched by uuid there, so each sync message is answered exactly once, promptly, and
only on the stream that it came by. Messages of one source are sent one after the other, because
nothing else keeps their order; different sources do not wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc

from taskd.bus.relay_loop import Switch
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
"""Trailing metadata of a TransferMessage that failed: the code that its Ack would carry."""

MAX_BACKLOG = 1024
"""Messages taken out of the window but not answered yet."""

Metadata = tuple[tuple[str, str], ...]


async def join(switch: Switch, stub: tasknet_pb2_grpc.TaskNetStub, metadata: Metadata) -> str:
    """Serve one connection until it breaks."""
    relay = switch.relay
    queue = relay.queue(Side.UP)
    stream = stub.InitServerDownStream(metadata=metadata)
    relay.streaming(Side.UP)
    wake = switch.wake_for(Side.UP)
    switch.settle()
    wake.set()
    reader = asyncio.create_task(_read(switch, stream))
    sender = _Sender(switch, stub, metadata, wake)
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
        relay.broken(Side.UP, monotonic())
        switch.settle()


async def _read(switch: Switch, stream: Stream) -> str:
    while True:
        read = await stream.read()
        if read is EOF:
            return "the server ended the stream"
        parcel = message_from_pb(read)
        if isinstance(parcel, NetCode):
            if read.header.sync:
                switch.relay.lanes[Side.UP].push_receipt(
                    Receipt(read.header.uuid, parcel, switch.relay.me)
                )
                switch.relay.ready.add(Side.UP)
        else:
            asker = Side.UP if parcel.sync else None
            switch.relay.arrived(Side.UP, parcel, asker, monotonic())
        switch.settle()


class _Sender:
    """One lane a source."""

    def __init__(
        self,
        switch: Switch,
        stub: tasknet_pb2_grpc.TaskNetStub,
        metadata: Metadata,
        drained: asyncio.Event,
    ) -> None:
        self.backlog = 0
        self._drained = drained
        self._switch = switch
        self._stub = stub
        self._metadata = metadata
        self._lanes: dict[Position, deque[Parcel]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, parcel: Parcel) -> None:
        self.backlog += 1
        lane = self._lanes.get(parcel.src)
        if lane is not None:
            lane.append(parcel)
            return
        self._lanes[parcel.src] = deque([parcel])
        task = asyncio.create_task(self._drain(parcel.src))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, source: Position) -> None:
        lane = self._lanes[source]
        try:
            while lane:
                await self._transfer(lane.popleft())
                self.backlog -= 1
                self._drained.set()
                self._switch.progressed()
        finally:
            del self._lanes[source]

    async def _transfer(self, parcel: Parcel) -> None:
        timeout_s = parcel.patience_s if parcel.sync else DEFAULT_PATIENCE_S
        try:
            ack = await self._stub.TransferMessage(
                message_to_pb(parcel), metadata=self._metadata, timeout=timeout_s
            )
            receipt = receipt_from_pb(ack)
        except grpc.aio.AioRpcError as error:
            receipt = Receipt(parcel.uuid, code_of(error), None)
        if parcel.sync:
            self._switch.relay.acked(Side.UP, Receipt(parcel.uuid, receipt.code, receipt.src))
        elif receipt.code:
            self._switch.relay.lose(f"the server above answered with {receipt.code}")
        self._switch.settle()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def code_of(error: grpc.aio.AioRpcError) -> NetCode:
    """What a failed TransferMessage means. Our own server tells; Ascend's only says UNKNOWN."""
    trailing: Any = error.trailing_metadata() or ()
    told = str(dict(trailing).get(CODE_KEY, ""))
    if told.isdigit():
        return net_code(int(told))
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return NetCode.NetworkAckLost
        case grpc.StatusCode.UNAVAILABLE:
            return NetCode.NetworkSendLost
        case _:
            return NetCode.NetErr
