"""Node 0's side of the choice whether the job starts an etcd of its own (`choice_messages.py`)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from ipaddress import IPv6Address, ip_address
from secrets import token_hex
from typing import Any

from taskd.agent.etcd_member.choice_messages import (
    FAILED,
    HELLO,
    LINE_BYTES,
    SILENT_S,
    TICK_S,
    Answer,
    heard_in,
    read_signed,
    signed,
)
from taskd.bus.liveness_port import own_address
from taskd.core.etcd_choice import (
    Choice,
    DoWithout,
    End,
    Heard,
    JoinRunning,
    Offer,
    Runs,
    Stopped,
    UseEtcd,
    Wait,
)
from taskd.runtime.address import Address
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every

log = logging.getLogger(__name__)

LOOK_S, RESOLVE_S = 0.2, 30.0
"""How often and how long node 0 tries to resolve its own name."""
ANSWER_S = 0.5
"""How long sending the choice may take, at the end."""
MOST_CONNECTIONS = 8192


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, *, serves: bool
) -> None:
    """Answer a peer that has said HELLO, in a job that uses etcd. Closes nothing."""
    with suppress(*FAILED):
        body = await _listen(reader, writer, key)
        writer.write(signed(key, str(body["nonce"]), asdict(Answer(uses=True, serves=serves))))
        await writer.drain()


async def _listen(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str
) -> dict[str, Any]:
    nonce = token_hex(16)
    writer.write(f"{nonce}\n".encode())
    async with asyncio.timeout(SILENT_S):
        await writer.drain()
        return read_signed(key, nonce, await reader.readline())


@dataclass
class ChoiceServer:
    """Node 0: hears the other nodes until it has chosen, and answers them."""

    home: Address
    key: str
    choose: Callable[[Sequence[Heard]], Choice]
    choice: Choice
    """The first one, without what others say: often it is only to wait."""
    chosen: asyncio.Event = field(default_factory=asyncio.Event)
    members: tuple[str, ...] = ()
    """Where a running job keeps its state, as it has said, be it after the choice."""
    runs: asyncio.Event = field(default_factory=asyncio.Event)
    """Such a job has been heard."""
    _heard: dict[str, tuple[str, Heard]] = field(default_factory=dict)
    """By the name that the peer gives itself: its connection, and what it has said."""
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _here: asyncio.Task[str] | None = None

    @asynccontextmanager
    async def serve(self, *listeners: socket.socket) -> AsyncIterator[None]:
        """At the end all peers that wait get the choice. Does not close the listeners."""
        if not isinstance(self.choice, Wait):
            self.chosen.set()
        self._here = asyncio.create_task(_own_address(self.home))
        servers = [
            await asyncio.start_server(self._accept, sock=one.dup(), limit=LINE_BYTES)
            for one in listeners
        ]
        try:
            yield
        finally:
            for server in servers:
                server.close()
            if self._running and self.chosen.is_set():
                await asyncio.wait(self._running, timeout=ANSWER_S)
            for task in (*self._running, self._here):
                task.cancel()
            await asyncio.gather(*self._running, self._here, return_exceptions=True)

    def stop(self, because: str) -> None:
        self._hear("", "", Stopped(because))

    @property
    def names(self) -> list[str]:
        """Of the nodes that wait for the choice."""
        offers = [heard for _, heard in self._heard.values() if isinstance(heard, Offer)]
        return sorted(one.name for one in offers if one.regular)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._running) >= MOST_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(self._converse(reader, writer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(SILENT_S):
                if await reader.readline() != HELLO:
                    return
            body = await _listen(reader, writer, self.key)
            heard, name, me = heard_in(body), str(body["name"]), token_hex(8)
            if isinstance(heard, Offer) and not self.chosen.is_set():
                heard = await self._reachable(heard, str(body["address"]), writer)
            self._hear(name, me, heard)
            try:
                await self._wait_with(reader, writer)
            finally:
                if name in self._heard and self._heard[name][0] == me:
                    del self._heard[name]
            writer.write(signed(self.key, str(body["nonce"]), asdict(_answer_of(self.choice))))
            await writer.drain()
        except FAILED as error:
            log.debug("choice of etcd: %r", error)
        finally:
            writer.close()

    async def _reachable(self, offer: Offer, address: str, writer: asyncio.StreamWriter) -> Offer:
        """Any node may lead: all must reach each other where they think that they are."""
        assert self._here is not None
        here = _plain(await asyncio.shield(self._here))
        reached = _plain(str(writer.get_extra_info("sockname")[0]))
        seen, address = _plain(str(writer.get_extra_info("peername")[0])), _plain(address)
        problem = ""
        if not here:
            problem = f"node 0 cannot resolve {self.home.host}, its own name"
        elif reached != here:
            problem = (
                f"it reaches node 0 at {reached}, but {self.home.host} means {here} there. Give "
                "--master-addr a name or an address that means the same on every node"
            )
        elif seen != address:
            problem = f"node 0 sees it at {seen}, but its own address is {address}"
        return replace(offer, cannot_use=offer.cannot_use or problem)

    async def _wait_with(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the choice is made. Raises EOFError if the peer ends before."""
        ends = asyncio.create_task(reader.read(1))
        chosen = asyncio.create_task(self.chosen.wait())
        try:
            while not chosen.done():
                done, _ = await asyncio.wait(
                    {ends, chosen}, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED
                )
                if ends in done and chosen not in done:
                    raise EOFError("the peer has ended")
                writer.write(b"\n")
                await writer.drain()
        finally:
            for task in (ends, chosen):
                task.cancel()
            await asyncio.gather(ends, chosen, return_exceptions=True)

    def _hear(self, name: str, connection: str, heard: Heard) -> None:
        if isinstance(heard, Runs) and heard.members:
            self.members = heard.members
            self.runs.set()
        if self.chosen.is_set():
            return
        self._heard[name] = connection, heard
        self.choice = self.choose([said for _, said in self._heard.values()])
        if not isinstance(self.choice, Wait):
            self.chosen.set()


def _answer_of(choice: Choice) -> Answer:
    match choice:
        case UseEtcd() | JoinRunning():
            return Answer(uses=True)
        case End(because):
            return Answer(uses=False, ended=because)
        case DoWithout() | Wait():
            return Answer(uses=False)


async def _own_address(home: Address) -> str:
    """As the other nodes should know this machine. Empty: its name cannot be resolved."""
    async for _ in Tries(every(LOOK_S), deadline=monotonic() + RESOLVE_S):
        with suppress(OSError):
            return await asyncio.to_thread(own_address, home)
    return ""


def _plain(address: str) -> str:
    """An IPv4 address is the same one when it reaches an IPv6 socket."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)
