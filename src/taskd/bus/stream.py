"""Moves frames over one open stream, in both directions, until it breaks.

The same code runs at both ends: `bus/client.py` opens the stream, `bus/server.py` answers it.
What a frame means is decided by `core/bus/delivery.py` and `core/bus/relay.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc

from taskd.bus.relay_loop import Switch
from taskd.core.bus.delivery import Session
from taskd.core.bus.routing import Hop, Side
from taskd.runtime.clock import monotonic
from taskd.wire._pb import link_pb2
from taskd.wire.bus_frames import frame_from_pb, frame_to_pb

HELLO_TIMEOUT_S = 10.0
CONFIRM_WITHIN_S = 0.02
"""A confirmation waits so long for a frame that it can ride on."""


EOF: object = grpc.aio.EOF  # type: ignore[attr-defined]
"""What `read` returns at the end of a stream. The stubs forget it."""


class Stream(Protocol):
    """What grpc.aio offers on both sides of a bidirectional call."""

    async def read(self) -> Any: ...

    async def write(self, message: Any) -> None: ...


ENDED = (asyncio.InvalidStateError, grpc.aio.UsageError)
"""What gRPC raises, at either end, for a write to a stream that has ended unnoticed."""


async def carry(switch: Switch, hop: Hop, stream: Stream) -> str:
    """Serve one connection. Returns why it ended; raises `grpc.RpcError` or `Confused`."""
    try:
        return await _carry(switch, hop, stream)
    except ENDED:
        return "the stream had ended"


async def _carry(switch: Switch, hop: Hop, stream: Stream) -> str:
    relay = switch.relay
    session = relay.session(hop)
    mine = frame_to_pb(session.open())
    if hop is Side.UP:
        await stream.write(mine)
    async with asyncio.timeout(HELLO_TIMEOUT_S):
        first = await stream.read()
    if first is EOF:
        return "the peer said no hello"
    relay.greeted(hop, frame_from_pb(first))
    wake = switch.wake_for(hop)
    switch.settle()
    tasks: list[asyncio.Task[str]] = []
    try:
        if hop is not Side.UP:
            # The server answers last: a child that knows it has joined can be reached at once.
            await stream.write(mine)
        wake.set()
        tasks.append(asyncio.create_task(_read(switch, hop, session, stream, wake)))
        tasks.append(asyncio.create_task(_write(session, stream, wake)))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        relay.broken(hop, monotonic())
        switch.settle()


async def _write(session: Session, stream: Stream, wake: asyncio.Event) -> str:
    while True:
        await wake.wait()
        wake.clear()
        while (frame := session.frame()) is not None:
            await stream.write(frame_to_pb(frame))


async def _read(
    switch: Switch, hop: Hop, session: Session, stream: Stream, wake: asyncio.Event
) -> str:
    loop = asyncio.get_running_loop()
    confirm: asyncio.TimerHandle | None = None
    try:
        while True:
            read: link_pb2.Frame = await stream.read()
            if read is EOF:
                return "the peer ended the stream"
            switch.relay.took(hop, frame_from_pb(read), monotonic())
            switch.settle()
            switch.progressed()
            if session.owes_confirmation and (confirm is None or confirm.when() <= loop.time()):
                confirm = loop.call_later(CONFIRM_WITHIN_S, wake.set)
    finally:
        if confirm is not None:
            confirm.cancel()
