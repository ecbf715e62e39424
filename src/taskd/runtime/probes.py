"""Answers the probes of Kubernetes over HTTP: /healthz and /readyz.

gRPC's health service on the main port is not enough: a replica that does not lead has no such port,
and must be seen as alive and ready to take over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from taskd.errors import SettingsError
from taskd.runtime.address import Address

TIMEOUT_S = 5.0
LONGEST = 4096
"""Bytes of a request's head."""


@asynccontextmanager
async def serve(address: str, ready: Callable[[], bool]) -> AsyncIterator[int]:
    """Yields the port. Raises SettingsError if it cannot listen there."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(
            OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
        ):
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(head, ready))
                await writer.drain()
        writer.close()

    where = Address.parse(address)
    try:
        server = await asyncio.start_server(answer, where.host, where.port, limit=LONGEST)
    except OSError as error:
        raise SettingsError([f"cannot serve probes on {address}: {error}"]) from error
    async with server:
        yield int(server.sockets[0].getsockname()[1])


def _response(head: bytes, ready: Callable[[], bool]) -> bytes:
    words = head.split(maxsplit=2)
    path = words[1].split(b"?")[0] if len(words) > 1 else b""
    if path == b"/healthz" or (path == b"/readyz" and ready()):
        status, body = "200 OK", "ok\n"
    elif path == b"/readyz":
        status, body = "503 Service Unavailable", "not in sync with the cluster\n"
    else:
        status, body = "404 Not Found", "unknown path (expected /healthz or /readyz)\n"
    head_sent = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    return f"{head_sent}Connection: close\r\n\r\n{body}".encode()
