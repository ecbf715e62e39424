"""One connection of a browser, which must send whole requests: uvicorn waits for them forever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 10.0
"""How long the head of a request may take. A connection is dropped at most as long after that."""


class HttpConnection(H11Protocol):
    _seen: Any = None
    """The request that was served last, when this connection was looked at."""
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look = self.loop.call_later(REQUEST_S, self._drop_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _drop_if_silent(self) -> None:
        is_served = self.cycle is not None and not self.cycle.response_complete
        if not is_served and self.cycle is self._seen:
            self.transport.abort()
            return
        self._seen = self.cycle
        self._look = self.loop.call_later(REQUEST_S, self._drop_if_silent)
