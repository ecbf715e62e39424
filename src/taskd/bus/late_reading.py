"""gRPC methods that look at the caller before they read its request.

gRPC's own servers receive and parse a request before any code of ours runs: a stranger can make
them hold gigabytes of empty sub-messages. Here a method is served as a stream of raw bytes. Until
its caller is admitted nothing is read, and flow control keeps the rest on the caller's machine;
then the request is read, its size is checked, and only then it is parsed. On the wire nothing
differs. Used by the bus (`bus/server.py`) and by clusterd (`clusterd/interceptors.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
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

Admit = Callable[[Any], Awaitable[None]]
"""Gets the context; returns, or ends the call."""
Charge = Callable[[Any, int], Awaitable[None]]
"""Gets the context and the size of the request; returns, or ends the call."""
Serve = Callable[[Any, Any], Awaitable[Any]]
"""Gets the request and the context. Returns the response; or None where it has written them."""


def reading_late(
    handler: Any,
    admit: Admit,
    limit_bytes: int,
    serve: Serve | None = None,
    charge: Charge | None = None,
) -> grpc.RpcMethodHandler[Any, Any]:
    """The same method with one request: it is read after `admit`, and parsed after `charge`.

    `serve` replaces the handler's own function.
    """
    own: Serve = handler.unary_stream if handler.response_streaming else handler.unary_unary
    parse = handler.request_deserializer

    async def read_and_serve(_: object, context: Any) -> None:
        await admit(context)
        raw = await context.read()
        if raw is EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is missing")
        if len(raw) > limit_bytes:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the request has {len(raw)} bytes, at most {limit_bytes} are accepted",
            )
        if charge is not None:
            await charge(context, len(raw))
        try:
            request = parse(raw)
        except (DecodeError, ValueError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be parsed")
        response = await (serve or own)(request, context)
        if response is not None:
            with suppress(aio.InternalError):  # the client has disconnected
                await context.write(response)

    def serialize(response: Any) -> bytes:
        """A response that many callers get may be encoded already."""
        encoded: bytes = (
            response if isinstance(response, bytes) else handler.response_serializer(response)
        )
        return encoded

    return grpc.stream_stream_rpc_method_handler(read_and_serve, None, serialize)
