"""How a dead process is told from a broken link: by knocking at its own door.

An agent keeps a door: a port of its own on the address by which the manager reaches it. When its
link breaks, the manager knocks. A kernel that refuses has no such process any more, and that is
certain. A door that opens belongs to an agent that lives: the line is then held, and its end means
another knock. No answer proves nothing. Used by `agent/node.py` and `manager/node_probes.py`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from contextlib import suppress

from taskd.errors import SettingsError
from taskd.runtime.address import Address

MOST_GUESTS = 8
"""So many lines are held at once; the oldest is let go for the next."""
TRIES = 3
"""A door that opens and closes this often is somebody else's."""


class Door:
    """Holds the line of whoever knocks. Nothing is said: that the kernel answers is the answer."""

    def __init__(self, server: asyncio.Server, guests: deque[asyncio.StreamWriter]) -> None:
        self._server, self._guests = server, guests
        self.address = str(Address(*server.sockets[0].getsockname()[:2]))

    @classmethod
    async def open(cls, towards: str) -> Door | None:
        """On the address by which we reach that host:port. None: there is no way to it."""
        guests: deque[asyncio.StreamWriter] = deque(maxlen=MOST_GUESTS)

        async def hold(_: asyncio.StreamReader, guest: asyncio.StreamWriter) -> None:
            if len(guests) == MOST_GUESTS:
                guests[0].close()
            guests.append(guest)

        try:
            host = _own_address(Address.parse(towards))
            return cls(await asyncio.start_server(hold, host, 0), guests)
        except (OSError, SettingsError):
            return None

    def close(self) -> None:
        self._server.close()
        for guest in self._guests:
            guest.close()


async def opens(address: str, patience_s: float) -> bool:
    """Whether we can reach this door at all: one that never opened proves nothing by refusing."""
    try:
        async with asyncio.timeout(patience_s):
            _, line = await _knock(address)
    except (OSError, TimeoutError):
        return False
    line.close()
    return True


async def outlasts(address: str, patience_s: float) -> bool:
    """Stay for as long as somebody is in. True: nobody is any more; False: it cannot be known."""
    for _ in range(TRIES):
        try:
            async with asyncio.timeout(patience_s):
                heard, line = await _knock(address)
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        try:
            with suppress(OSError):
                await heard.read()
        finally:
            line.close()
        # The line is cut. Only a refusal tells a dead process from a dead connection.
    return False


async def _knock(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = Address.parse(address)
    return await asyncio.open_connection(place.host, place.port)


def _own_address(peer: Address) -> str:
    found = socket.getaddrinfo(peer.host, peer.port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, there = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # sends nothing: the kernel only looks for the way
        return str(probe.getsockname()[0])
