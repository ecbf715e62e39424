"""gRPC methods that look at the caller before they read its request.

gRPC's own servers receive and parse a request before any code of ours runs: a stranger can make
them hold gigabytes of empty sub-messages. Here a method is served as a stream of raw bytes. Until
its caller is admitted nothing is read, and flow control keeps the rest on the caller's machine;
then the request is read, its size is checked, and only then it is parsed. Of each caller only a few
requests are read at the same time; the others wait on its machine. On the wire nothing differs.
Used by the bus (`bus/server.py`) and by clusterd (`clusterd/interceptors.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

EOF: object = aio.EOF  # type: ignore[attr-defined]

SMALL_BUFFERS = (
    # A fixed window of 64 KiB per call, instead of one that grows to megabytes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.experimental.tcp_max_read_chunk_size", 64 << 10),
)
"""Options of a server: what gRPC holds for a caller before anything of its request is read."""

MOST_METADATA, MOST_METADATA_BYTES = 64, 32 << 10
"""Of a call. Our own clients send five lines. gRPC enforces its limit only after a peer has
confirmed it: until then one byte on the wire can be a line that takes a hundred bytes."""

Admit = Callable[[Any], Awaitable[None]]
"""Gets the context; returns, or ends the call."""
Charge = Callable[[Any, int], Awaitable[None]]
"""Gets the context and the weight of the request; returns, or ends the call."""
Weigh = Callable[[bytes, int], int]
"""Gets the request and the limit; returns its size, or more if it has many parts."""
MOST_READ = 4
"""Requests of one caller that are read at the same time."""
READ_S = 30.0
"""How long a caller may take to send one."""
Slots = Callable[[Any], AbstractAsyncContextManager[None]]
"""Gets the context; waits until its request may be read."""
Serve = Callable[[Any, Any], Awaitable[Any]]
"""Gets the request and the context. Returns the response; or None where it has written them."""


@dataclass
class _Slot:
    free: asyncio.Semaphore
    users: int = 0


class ReadingSlots:
    """Bounds what the requests of one caller take before their size is known."""

    def __init__(self, caller_of: Callable[[Any], str], most: int = MOST_READ) -> None:
        self._caller_of, self._most = caller_of, most
        self._slots: dict[str, _Slot] = {}

    @asynccontextmanager
    async def __call__(self, context: Any) -> AsyncIterator[None]:
        caller = self._caller_of(context)
        slot = self._slots.setdefault(caller, _Slot(asyncio.Semaphore(self._most)))
        slot.users += 1
        try:
            async with slot.free:
                yield
        finally:
            slot.users -= 1
            if not slot.users:
                del self._slots[caller]


def host_of(context: Any) -> str:
    """The peer without its port, so that one machine counts as one caller."""
    return str(context.peer()).rpartition(":")[0]


def has_too_much_metadata(details: grpc.HandlerCallDetails) -> bool:
    metadata: Any = details.invocation_metadata or ()
    if len(metadata) > MOST_METADATA:
        return True
    return sum(len(key) + len(value) for key, value in metadata) > MOST_METADATA_BYTES


def refusing(
    note: Callable[[str], None], status: grpc.StatusCode, text: str
) -> grpc.RpcMethodHandler[Any, Any]:
    """A method that reads nothing. `note` gets the peer."""

    async def refuse(_: object, context: Any) -> None:
        note(context.peer())
        await context.abort(status, text)

    return grpc.stream_stream_rpc_method_handler(refuse, None, None)


def reading_late(
    handler: Any,
    admit: Admit,
    limit_bytes: int,
    slots: Slots,
    serve: Serve | None = None,
    charge: Charge | None = None,
    weigh: Weigh = lambda raw, most: len(raw),
) -> grpc.RpcMethodHandler[Any, Any]:
    """The same method with one request: it is read after `admit`, and parsed after `charge`.

    `serve` replaces the handler's own function.
    """
    own: Serve = handler.unary_stream if handler.response_streaming else handler.unary_unary
    parse = handler.request_deserializer

    async def read_and_serve(_: object, context: Any) -> None:
        await admit(context)
        async with slots(context):
            request = await read(context)
        response = await (serve or own)(request, context)
        if response is not None:
            with suppress(aio.InternalError):  # the client has disconnected
                await context.write(response)

    async def read(context: Any) -> Any:
        raw: Any = EOF
        try:
            async with asyncio.timeout(READ_S):
                raw = await context.read()
        except TimeoutError:
            text = f"the request did not arrive within {READ_S:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        if raw is EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is missing")
        if len(raw) > limit_bytes:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the request has {len(raw)} bytes, at most {limit_bytes} are accepted",
            )
        weight = weigh(raw, limit_bytes)
        if weight > limit_bytes:
            text = "the request has too many parts: they count more than their bytes"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        if charge is not None:
            await charge(context, weight)
        try:
            return parse(raw)
        except (DecodeError, ValueError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be parsed")

    def serialize(response: Any) -> bytes:
        """A response that many callers get may be encoded already."""
        encoded: bytes = (
            response if isinstance(response, bytes) else handler.response_serializer(response)
        )
        return encoded

    return grpc.stream_stream_rpc_method_handler(read_and_serve, None, serialize)
