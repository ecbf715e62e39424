"""The server side of the bus: children register, announce their paths and open their streams.

Our processes open `taskd.v1.Link`; Ascend's send by TransferMessage and receive from
InitServerDownStream. Input is not trusted: invalid calls get an error code or a gRPC status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn

import grpc

from taskd.bus.admission import Admission, claimed_position
from taskd.bus.client import CALL_KEY, CALL_TIMEOUT_S, MAX_MESSAGE, REPLACE_ALL_PATHS
from taskd.bus.late_reading import (
    ReadingSlots,
    has_too_much_metadata,
    reading_late,
    refusing,
)
from taskd.bus.relay_loop import RelayLoop
from taskd.bus.stream import EOF, run_stream
from taskd.bus.tasknet_client import CODE_KEY
from taskd.core.bus.delivery import ProtocolError, Queue
from taskd.core.bus.relay import NO_CALL, Call
from taskd.core.bus.routing import routing_key
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


OPEN = "/taskd.v1.Link/Open"
"""Its frames are parsed by `bus/stream.py`, which counts their parts first."""
LIMIT_BYTES = {"Register": 64 << 10, "PathDiscovery": 512 << 10}
"""The largest request of a method; of the others: `MAX_MESSAGE`."""


class AdmitFirst(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """A request is read and parsed only after its caller has proved its position."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._slots = ReadingSlots(_caller)
        refused, code = admission.refused, grpc.StatusCode
        self._flood = refusing(refused.note_flood, code.RESOURCE_EXHAUSTED, "too much metadata")
        unknown = "this server has no such method"
        self._unknown = refusing(refused.note, code.UNIMPLEMENTED, unknown)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if has_too_much_metadata(details):
            return self._flood
        handler = await continuation(details)
        if handler is None:
            return self._unknown
        if details.method == OPEN:  # streams look at their caller before they read
            open_stream = handler.stream_stream
            return grpc.stream_stream_rpc_method_handler(
                open_stream, None, handler.response_serializer
            )
        if handler.request_streaming:
            return handler
        limit = LIMIT_BYTES.get(details.method.rpartition("/")[2], MAX_MESSAGE)
        return reading_late(handler, self._admission.admit_caller, limit, self._slots)


class BusServer(tasknet_pb2_grpc.TaskNetServicer, link_pb2_grpc.LinkServicer):
    def __init__(
        self, relay_loop: RelayLoop, admission: Admission, announce_up: Announce | None
    ) -> None:
        self._relay_loop = relay_loop
        self._admission = admission
        self._announce_up = announce_up
        self._streams: dict[Position, asyncio.Task[str]] = {}
        self._contexts: dict[Position, tuple[Position, Context]] = {}
        """For each stream: who has opened it, by which call."""
        self._peers: dict[str, Position] = {}
        """gRPC's peer address -> the child whose stream uses that connection."""

    def serve_on(self, server: grpc.aio.Server) -> None:
        tasknet_pb2_grpc.add_TaskNetServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        link_pb2_grpc.add_LinkServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    def peer_of(self, hop: Position) -> str | None:
        """The address from which this child's stream comes."""
        return next((peer for peer, child in self._peers.items() if child == hop), None)

    def end_revoked(self) -> None:
        """End the streams whose peers would not be admitted any more."""
        for hop, (claimed, context) in list(self._contexts.items()):
            if not self._admission.is_admitted(context, claimed):
                log.warning("the stream of %s ends: its token is no longer valid", claimed)
                self._streams[hop].cancel()

    # Joining

    async def Register(self, request: tasknet_pb2.RegisterReq, context: Context) -> tasknet_pb2.Ack:
        child = _position(request, "pos")
        await self._admission.admit(context, child)
        if child is None:
            return self._ack(request.uuid, NetCode.NilPosition)
        with self._relay_loop.relay() as relay:
            code = relay.register(child, monotonic(), _call(context))
        if code == NetCode.OK:
            # A new registration replaces the process that had this position.
            if (stream := self._streams.get(routing_key(child))) is not None:
                stream.cancel()
        else:
            log.warning("%s was not registered: %s", child, code.sentence)
        return self._ack(request.uuid, code)

    async def PathDiscovery(
        self, request: tasknet_pb2.PathDiscoveryReq, context: Context
    ) -> tasknet_pb2.Ack:
        through = _position(request, "proxyPos")
        await self._admission.admit(context, through)
        if through is None:
            return self._ack(request.uuid, NetCode.NilPosition)
        path = [position_from_pb(pb) for pb in request.path]
        replace_all = REPLACE_ALL_PATHS in _metadata(context).items()
        with self._relay_loop.relay() as relay:
            code = relay.announce(through, path, replace_all=replace_all, call=_call(context))
        if code == NetCode.OK and self._announce_up is not None:
            # Before the answer: once a child may send, upstream must be able to answer it. But an
            # upstream server that hangs must not stop the children of this node from joining.
            left_s = context.time_remaining() or CALL_TIMEOUT_S
            await self._announce_up(path, min(left_s, CALL_TIMEOUT_S) / 2)
        return self._ack(request.uuid, code)

    # Streams

    async def Open(self, request_iterator: object, context: Context) -> None:
        hop = await self._child(context)
        await self._hold(hop, lambda: run_stream(self._relay_loop, hop, context), context)

    async def InitServerDownStream(self, request_iterator: object, context: Context) -> None:
        hop = await self._child(context)
        await self._hold(hop, lambda: self._stream_down(hop, context), context)

    async def _child(self, context: Context) -> Position:
        """The child that opens this stream: its metadata must name a registered position."""
        metadata = _metadata(context)
        claimed = claimed_position(metadata) or Position("", "", "")
        await self._admission.admit(context, claimed)
        hop = routing_key(claimed)
        if self._relay_loop.routes.children.get(hop) != claimed:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"{claimed} has not registered"
            )
        return hop

    async def _hold(
        self, hop: Position, run_stream: Callable[[], Coroutine[Any, Any, str]], context: Context
    ) -> None:
        """Run the stream until it ends, or until a newer stream of the same child replaces it."""
        while (before := self._streams.get(hop)) is not None and not before.done():
            before.cancel()
            await asyncio.wait({before})
        stream = self._streams[hop] = asyncio.create_task(run_stream())
        self._peers[context.peer()] = hop
        claimed = claimed_position(_metadata(context))
        if claimed is not None:
            self._contexts[hop] = claimed, context
        try:
            await asyncio.wait({stream})
        finally:
            stream.cancel()
            await asyncio.wait({stream})
            self._peers.pop(context.peer(), None)
            if self._streams.get(hop) is stream:
                del self._streams[hop]
                self._contexts.pop(hop, None)
        if stream.cancelled():
            await context.abort(
                grpc.StatusCode.ABORTED,
                "a newer stream of this position has replaced this one, or its token was revoked",
            )
        error = stream.exception()
        if isinstance(error, ProtocolError | TimeoutError):
            log.warning("stream of %s failed: peer=%s: %s", hop, context.peer(), error)
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, str(error) or "no hello within the time limit"
            )
        if error is not None and not isinstance(error, grpc.RpcError):
            raise error

    # Ascend's peers

    async def TransferMessage(
        self, request: tasknet_pb2.Message, context: Context
    ) -> tasknet_pb2.Ack:
        parcel = message_from_pb(request)
        if isinstance(parcel, NetCode):
            await self._admission.admit(context, None)
            return self._ack(request.header.uuid, parcel)
        hop = self._hop_of(parcel.src, context)
        await self._admission.admit(context, self._relay_loop.routes.children.get(hop, parcel.src))
        ticket, answered = self._relay_loop.ticket()
        with self._relay_loop.relay() as relay:
            relay.message_received(hop, parcel, ticket, monotonic())
        answer = await answered
        if answer.code >= NetCode.RecvBufNil:
            # The caller reads only the status, and takes any Ack for success.
            await self._fail(context, answer.code)
        return self._ack(parcel.uuid, answer.code, answer.source)

    def _hop_of(self, source: Position, context: Context) -> Position:
        """The child that sent this message, which the call does not name."""
        routes = self._relay_loop.routes
        known = routes.hop_to(source)
        if known is not None or routing_key(source) in routes.children:
            return known or routing_key(source)
        # An Ascend proxy does not announce its children again after it was disconnected. But their
        # messages use the same connection as its stream, which shows where they are.
        relaying = self._peers.get(context.peer())
        if relaying is None:
            return routing_key(source)
        with self._relay_loop.relay() as relay:
            relay.announce(routes.children[relaying], [source])
        return relaying

    async def _fail(self, context: Context, code: int) -> NoReturn:
        text = net_code(code).sentence
        await context.abort(grpc.StatusCode.UNKNOWN, f"{code}: {text}", ((CODE_KEY, str(code)),))

    async def _stream_down(self, hop: Position, context: Context) -> str:
        wake = self._relay_loop.wake_for(hop)
        with self._relay_loop.relay() as relay:
            queue = relay.queue(hop)
            relay.stream_opened(hop)
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
            with self._relay_loop.relay() as relay:
                relay.disconnected(hop, monotonic())

    async def _read_acks(self, hop: Position, context: Context) -> str:
        while True:
            ack = await context.read()
            if ack is EOF:
                return "the peer ended the stream"
            with self._relay_loop.relay() as relay:
                relay.receipt_received(hop, receipt_from_pb(ack))

    def _ack(self, uuid: str, code: int, source: Position | None = None) -> tasknet_pb2.Ack:
        return tasknet_pb2.Ack(
            uuid=uuid, code=code, src=position_to_pb(source or self._relay_loop.me)
        )


async def _write_messages(queue: Queue, context: Context, wake: asyncio.Event) -> str:
    while True:
        await wake.wait()
        wake.clear()
        while (parcel := queue.next_parcel()) is not None:
            await context.write(message_to_pb(parcel))


def _metadata(context: Context) -> dict[str, str]:
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _caller(context: Context) -> str:
    """The position that has been admitted; on a bus without tokens, the connection."""
    claimed = claimed_position(_metadata(context))
    return str(context.peer() if claimed is None else claimed)


def _call(context: Context) -> Call:
    incarnation, _, number = _metadata(context).get(CALL_KEY, "").rpartition("/")
    return (
        (incarnation, int(number))
        if incarnation and number.isdigit() and len(number) < 10
        else NO_CALL
    )


def _position(
    request: tasknet_pb2.RegisterReq | tasknet_pb2.PathDiscoveryReq, name: str
) -> Position | None:
    if not request.HasField(name):
        return None
    return position_from_pb(getattr(request, name))
