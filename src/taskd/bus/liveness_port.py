"""Tells a dead agent from a broken connection, by a port that the agent listens on.

An agent opens a liveness port on the address by which the manager reaches it. When the bus
connection breaks, the manager probes the port. If the kernel refuses, the process has ended for
certain. If the port accepts, the agent is alive: the manager keeps the connection open, and its end
means another probe. No answer proves nothing. Used by `agent/node.py` and
`manager/node_liveness.py`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
from collections import deque
from contextlib import suppress
from typing import Any

from taskd.errors import SettingsError
from taskd.runtime.address import Address

MAX_CONNECTIONS, MAX_ADDRESSES = 8, 64
"""Connections kept open at once from one address, and addresses. The next one replaces the oldest
of its own address: strangers elsewhere cannot disconnect the manager."""
Held = dict[str, deque[asyncio.StreamWriter]]
"""The open connections of each address."""
TRIES = 3
"""A port that accepts and disconnects this often belongs to another process."""


class LivenessPort:
    """Accepts connections and keeps them open. Nothing is sent: the kernel's answer is enough."""

    def __init__(self, server: asyncio.Server, held: Held) -> None:
        self._server, self._held = server, held
        self.address = str(Address(*server.sockets[0].getsockname()[:2]))

    @classmethod
    async def open(cls, towards: str, limit: int = MAX_CONNECTIONS) -> LivenessPort | None:
        """Listen on the address by which we reach `towards` (host:port). None: no route to it.

        `limit`: how many connections of one address are kept.
        """
        held: Held = {}

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            address = writer.get_extra_info("peername", ("",))[0]
            if address not in held and len(held) == max(MAX_ADDRESSES, limit):
                writer.close()
                return
            same = held.setdefault(address, deque())
            same.append(writer)
            if len(same) > limit:
                same[0].close()
            # Cancelled: this process ends. asyncio would log that as an error of this function.
            with suppress(OSError, asyncio.CancelledError):
                await reader.read(1)  # until the peer leaves; no peer of ours sends anything
            writer.close()
            same.remove(writer)
            if not same:
                del held[address]

        try:
            host = own_address(Address.parse(towards))
            return cls(await asyncio.start_server(hold, host, 0), held)
        except (OSError, SettingsError):
            return None

    def close(self) -> None:
        self._server.close()
        for writer in [one for same in self._held.values() for one in same]:
            writer.close()


async def is_open(address: str, timeout_s: float) -> bool | None:
    """False: it refuses, so no process listens there. None: no answer, which proves nothing."""
    try:
        connection = await _connect(address, timeout_s)
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError):
        return None
    connection.close()
    return True


async def is_reachable(address: str, timeout_s: float) -> bool:
    """Whether the port accepts now. If it never did, a refusal later proves nothing."""
    return await is_open(address, timeout_s) is True


async def wait_for_exit(address: str, timeout_s: float) -> bool:
    """Wait as long as the process lives. True: it has ended; False: that cannot be known."""
    for _ in range(TRIES):
        try:
            connection = await _connect(address, timeout_s)
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            with suppress(OSError):
                await reader.read()
        finally:
            writer.close()
        # Disconnected. Only a refusal tells a dead process from a dead connection.
    return False


async def _connect(address: str, timeout_s: float) -> socket.socket:
    """Raises TimeoutError only if the kernel has no answer when the time is over: this process may
    have been too slow to see it."""
    family, kind, protocol, _, there = await _resolve(Address.parse(address))
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    try:
        error = connection.connect_ex(there)
        if error == errno.EINPROGRESS:
            await _wait_until_decided(connection, timeout_s)
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
    except BaseException:
        connection.close()
        raise
    return connection


async def _wait_until_decided(connection: socket.socket, timeout_s: float) -> None:
    loop, decided = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(connection, decided.set)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await decided.wait()
    finally:
        loop.remove_writer(connection)
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    if not poll.poll(0):
        raise TimeoutError


async def _resolve(address: Address) -> tuple[Any, ...]:
    kind = socket.SOCK_STREAM
    try:
        numeric = socket.AI_NUMERICHOST
        return socket.getaddrinfo(address.host, address.port, type=kind, flags=numeric)[0]
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        return (await loop.getaddrinfo(address.host, address.port, type=kind))[0]


def own_address(peer: Address) -> str:
    """This machine's address on the way to the peer."""
    found = socket.getaddrinfo(peer.host, peer.port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, there = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # sends nothing: the kernel only chooses the route
        return str(probe.getsockname()[0])
