"""The server side of the bus: children register, announce their paths and open their streams.

Ours open `taskd.v1.Link`; Ascend's send by TransferMessage and receive by InitServerDownStream. Any
bytes may come in here, so nothing is trusted: what is wrong gets its code or a gRPC status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn

import grpc

from taskd.bus.admission import Gate
from taskd.bus.client import ANEW, CALL_KEY, CALL_TIMEOUT_S
from taskd.bus.relay_loop import Switch
from taskd.bus.stream import EOF, carry
from taskd.bus.tasknet_client import CODE_KEY
from taskd.core.bus.delivery import Confused, Queue
from taskd.core.bus.relay import NO_CALL, Call
from taskd.core.bus.routing import place
from taskd.model.codes import NetCode, net_code
from taskd.model.ids import Position
from taskd.runtime.clock import monotonic
from taskd.wire._pb import link_pb2_grpc, tasknet_pb2, tasknet_pb2_grpc
from taskd.wire.bus_frames import (
    message_from_pb,
    message_to_pb,
    position_from_pb,
    position_to_pb,
    receipt_from_pb,
)

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
Announce = Callable[[Sequence[Position], float], Awaitable[None]]


class Downlinks(tasknet_pb2_grpc.TaskNetServicer, link_pb2_grpc.LinkServicer):
    def __init__(self, switch: Switch, gate: Gate, announce_up: Announce | None) -> None:
        self._switch = switch
        self._relay = switch.relay
        self._gate = gate
        self._announce_up = announce_up
        self._streams: dict[Position, asyncio.Task[str]] = {}
        self._peers: dict[str, Position] = {}
        """Whose stream runs on which connection."""

    def serve_on(self, server: grpc.aio.Server) -> None:
        tasknet_pb2_grpc.add_TaskNetServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        link_pb2_grpc.add_LinkServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    def peer_of(self, hop: Position) -> str | None:
        """The address that this child's stream comes from."""
        return next((peer for peer, child in self._peers.items() if child == hop), None)

    # Joining

    async def Register(self, request: tasknet_pb2.RegisterReq, context: Context) -> tasknet_pb2.Ack:
        child = _position(request, "pos")
        await self._gate.admit(context, child)
        if child is None:
            return self._ack(request.uuid, NetCode.NilPosition)
        code = self._relay.register(child, monotonic(), _call(context))
        if code == NetCode.OK:
            # Whoever held this place before has to give way.
            if (stream := self._streams.get(place(child))) is not None:
                stream.cancel()
        else:
            log.warning("%s was not registered: %s", child, code.sentence)
        self._switch.settle()
        return self._ack(request.uuid, code)

    async def PathDiscovery(
        self, request: tasknet_pb2.PathDiscoveryReq, context: Context
    ) -> tasknet_pb2.Ack:
        through = _position(request, "proxyPos")
        await self._gate.admit(context, through)
        if through is None:
            return self._ack(request.uuid, NetCode.NilPosition)
        path = [position_from_pb(pb) for pb in request.path]
        anew = ANEW in _metadata(context).items()
        code = self._relay.announce(through, path, anew=anew, call=_call(context))
        if code == NetCode.OK and self._announce_up is not None:
            # Before the answer: once a child may speak, it can be answered from above. But a server
            # above that stands still must not keep the node from working by itself.
            left_s = context.time_remaining() or CALL_TIMEOUT_S
            await self._announce_up(path, min(left_s, CALL_TIMEOUT_S) / 2)
        return self._ack(request.uuid, code)

    # Streams

    async def Open(self, request_iterator: object, context: Context) -> None:
        hop = await self._child(context)
        await self._hold(hop, lambda: carry(self._switch, hop, context), context)

    async def InitServerDownStream(self, request_iterator: object, context: Context) -> None:
        hop = await self._child(context)
        await self._hold(hop, lambda: self._stream_down(hop, context), context)

    async def _child(self, context: Context) -> Position:
        """Who opens this stream: its metadata must name a registered position exactly."""
        shown = _metadata(context)
        claimed = Position(
            shown.get("role", ""), shown.get("serverrank", ""), shown.get("processrank", "")
        )
        await self._gate.admit(context, claimed)
        hop = place(claimed)
        if self._relay.routes.children.get(hop) != claimed:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"{claimed} has not registered"
            )
        return hop

    async def _hold(
        self, hop: Position, streaming: Callable[[], Coroutine[Any, Any, str]], context: Context
    ) -> None:
        """Run the stream until it ends, or until a newer one of the same child takes its place."""
        while (before := self._streams.get(hop)) is not None and not before.done():
            before.cancel()
            await asyncio.wait({before})
        stream = self._streams[hop] = asyncio.create_task(streaming())
        self._peers[context.peer()] = hop
        try:
            await asyncio.wait({stream})
        finally:
            stream.cancel()
            await asyncio.wait({stream})
            self._peers.pop(context.peer(), None)
            if self._streams.get(hop) is stream:
                del self._streams[hop]
        if stream.cancelled():
            await context.abort(grpc.StatusCode.ABORTED, "a newer stream has taken this place")
        error = stream.exception()
        if isinstance(error, Confused | TimeoutError):
            log.warning("%s at %s: %s", hop, context.peer(), error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error) or "no hello in time")
        if error is not None and not isinstance(error, grpc.RpcError):
            raise error

    # Peers of Ascend's

    async def TransferMessage(
        self, request: tasknet_pb2.Message, context: Context
    ) -> tasknet_pb2.Ack:
        parcel = message_from_pb(request)
        if isinstance(parcel, NetCode):
            await self._gate.admit(context, None)
            return self._ack(request.header.uuid, parcel)
        hop = self._hop_of(parcel.src, context)
        await self._gate.admit(context, self._relay.routes.children.get(hop, parcel.src))
        ticket, answered = self._switch.ticket()
        self._relay.arrived(hop, parcel, ticket, monotonic())
        self._switch.settle()
        answer = await answered
        if answer.code >= NetCode.RecvBufNil:
            # Its caller looks at the status alone, and takes any Ack for a success.
            await self._fail(context, answer.code)
        return self._ack(parcel.uuid, answer.code, answer.source)

    def _hop_of(self, source: Position, context: Context) -> Position:
        """The child that this call comes from. It does not say so itself."""
        routes = self._relay.routes
        known = routes.hop_to(source)
        if known is not None or place(source) in routes.children:
            return known or place(source)
        # A proxy of Ascend's does not announce its children again after a break. But their
        # messages come by the connection that its stream runs on, and so tell where they are.
        relaying = self._peers.get(context.peer())
        if relaying is None:
            return place(source)
        self._relay.announce(routes.children[relaying], [source])
        return relaying

    async def _fail(self, context: Context, code: int) -> NoReturn:
        text = net_code(code).sentence
        await context.abort(grpc.StatusCode.UNKNOWN, f"{code}: {text}", ((CODE_KEY, str(code)),))

    async def _stream_down(self, hop: Position, context: Context) -> str:
        relay = self._relay
        queue = relay.queue(hop)
        relay.streaming(hop)
        wake = self._switch.wake_for(hop)
        self._switch.settle()
        wake.set()
        reader = asyncio.create_task(self._read_acks(hop, context))
        writer = asyncio.create_task(_write_messages(queue, context, wake))
        try:
            done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            reader.cancel()
            writer.cancel()
            await asyncio.wait({reader, writer})
            relay.broken(hop, monotonic())
            self._switch.settle()

    async def _read_acks(self, hop: Position, context: Context) -> str:
        while True:
            ack = await context.read()
            if ack is EOF:
                return "the peer ended the stream"
            self._relay.acked(hop, receipt_from_pb(ack))
            self._switch.settle()

    def _ack(self, uuid: str, code: int, source: Position | None = None) -> tasknet_pb2.Ack:
        return tasknet_pb2.Ack(uuid=uuid, code=code, src=position_to_pb(source or self._relay.me))


async def _write_messages(queue: Queue, context: Context, wake: asyncio.Event) -> str:
    while True:
        await wake.wait()
        wake.clear()
        while (parcel := queue.next_parcel()) is not None:
            await context.write(message_to_pb(parcel))


def _metadata(context: Context) -> dict[str, str]:
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _call(context: Context) -> Call:
    life, _, number = _metadata(context).get(CALL_KEY, "").rpartition("/")
    return (life, int(number)) if life and number.isdigit() and len(number) < 10 else NO_CALL


def _position(
    request: tasknet_pb2.RegisterReq | tasknet_pb2.PathDiscoveryReq, name: str
) -> Position | None:
    if not request.HasField(name):
        return None
    return position_from_pb(getattr(request, name))
