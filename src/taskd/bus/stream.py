"""Moves frames over one open stream, in both directions, until it breaks.

The same code runs at both ends: `bus/client.py` opens the stream, `bus/server.py` answers it.
What a frame means is decided by `core/bus/delivery.py` and `core/bus/relay.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc

from taskd.bus.relay_loop import RelayLoop
from taskd.core.bus.delivery import Frame, Session
from taskd.core.bus.routing import Hop, Side
from taskd.runtime.clock import monotonic
from taskd.wire._pb import link_pb2
from taskd.wire.bus_frames import frame_from_bytes, frame_from_pb, frame_to_pb

HELLO_TIMEOUT_S = 10.0
CONFIRM_WITHIN_S = 0.02
"""How long a confirmation waits for a frame that can carry it."""

EOF: object = grpc.aio.EOF  # type: ignore[attr-defined]
"""What `read` returns at the end of a stream. The type stubs lack it."""


class Stream(Protocol):
    """What grpc.aio offers on both sides of a bidirectional call."""

    async def read(self) -> Any: ...

    async def write(self, message: Any) -> None: ...


ENDED = (asyncio.InvalidStateError, grpc.aio.UsageError)
"""What gRPC raises, at either end, for a write to a stream that has just ended."""


async def run_stream(relay_loop: RelayLoop, hop: Hop, stream: Stream) -> str:
    """Serve one connection. Returns why it ended; raises `grpc.RpcError` or `ProtocolError`."""
    try:
        return await _run_stream(relay_loop, hop, stream)
    except ENDED:
        return "the stream had ended"


async def _run_stream(relay_loop: RelayLoop, hop: Hop, stream: Stream) -> str:
    with relay_loop.relay() as relay:
        session = relay.session(hop)
    hello = frame_to_pb(session.open())
    if hop is Side.UP:
        await stream.write(hello)
    async with asyncio.timeout(HELLO_TIMEOUT_S):
        first = await stream.read()
    if first is EOF:
        return "the peer ended the stream before its hello"
    wake = relay_loop.wake_for(hop)
    with relay_loop.relay() as relay:
        relay.hello_received(hop, _frame(first))
    tasks: list[asyncio.Task[str]] = []
    try:
        if hop is not Side.UP:
            # The server answers last: a child that knows it has joined can be reached at once.
            await stream.write(hello)
        wake.set()
        tasks.append(asyncio.create_task(_read(relay_loop, hop, session, stream, wake)))
        tasks.append(asyncio.create_task(_write(session, stream, wake)))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with relay_loop.relay() as relay:
            relay.disconnected(hop, monotonic())


def _frame(read: link_pb2.Frame | bytes) -> Frame:
    """A server gets bytes, because its peers are not trusted; a client trusts its server."""
    return frame_from_bytes(read) if isinstance(read, bytes) else frame_from_pb(read)


async def _write(session: Session, stream: Stream, wake: asyncio.Event) -> str:
    while True:
        await wake.wait()
        wake.clear()
        while (frame := session.frame()) is not None:
            await stream.write(frame_to_pb(frame))


async def _read(
    relay_loop: RelayLoop, hop: Hop, session: Session, stream: Stream, wake: asyncio.Event
) -> str:
    loop = asyncio.get_running_loop()
    confirm: asyncio.TimerHandle | None = None
    try:
        while True:
            read: link_pb2.Frame | bytes = await stream.read()
            if read is EOF:
                return "the peer ended the stream"
            with relay_loop.relay() as relay:
                relay.frame_received(hop, _frame(read), monotonic())
            relay_loop.progressed()
            if session.owes_confirmation and (confirm is None or confirm.when() <= loop.time()):
                confirm = loop.call_later(CONFIRM_WITHIN_S, wake.set)
    finally:
        if confirm is not None:
            confirm.cancel()
