"""The bus as the rest of the program sees it: start, send, receive, and what has changed.

`core/bus/relay.py` decides, `bus/relay_loop.py` runs it, `bus/client.py` and `bus/server.py`
connect it, `wire/bus_bodies.py` reads what arrives.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field, replace
from random import Random

import grpc

from taskd.bus.admission import MAX_CALLS_PER_S, Gate
from taskd.bus.client import MAX_MESSAGE, Uplink, UplinkConfig
from taskd.bus.relay_loop import Switch, Watcher
from taskd.bus.security import BADGE, Tls, channel_credentials, server_credentials
from taskd.bus.server import Downlinks
from taskd.bus.tcp_info import Wires
from taskd.core.bus.relay import Relay, RelayConfig
from taskd.core.bus.routing import Side, as_destination, as_member
from taskd.errors import SettingsError
from taskd.model.bus import (
    Change,
    Joined,
    Left,
    Parcel,
    PeerJoined,
    PeerLeft,
    Received,
    Sent,
    Wire,
)
from taskd.model.codes import NetCode, net_code
from taskd.model.ids import Position, Role
from taskd.model.messages import Body
from taskd.runtime.address import Address
from taskd.runtime.clock import monotonic
from taskd.wire.bus_bodies import NotABody, decode, encode

__all__ = [
    "Bus",
    "BusConfig",
    "Change",
    "Joined",
    "Left",
    "PeerJoined",
    "PeerLeft",
    "Received",
    "Sent",
    "Tls",
]

log = logging.getLogger(__name__)

BURST = 64
"""Sends without a wait after which other tasks get their turn."""
SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    # Who connects and says nothing is not waited for.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Two servers must never share a port by accident.
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BusConfig:
    me: Position
    listen: str | None = None
    """host:port to serve children on; port 0 takes a free one. None: this place has no children."""
    upstream: str | None = None
    """host:port of the server above. None: this place is the top."""
    job: str = ""
    token: str = ""
    """The job's secret, or a badge made of it for this place. Empty: peers are not checked."""
    tls: Tls | None = None
    tls_below: bool = True
    """Whether children need it, too. A proxy has its own node below it, on the loopback."""
    mtype: str = "default"
    relay: RelayConfig = field(default_factory=RelayConfig)
    max_calls_per_s: int = MAX_CALLS_PER_S
    first_backoff_s: float = 0.05
    max_backoff_s: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        fault = as_member(self.me)
        if isinstance(fault, NetCode):
            problems.append(f"{self.me} is no position on the bus: {fault.sentence}")
        if self.me.role == Role.MANAGER and self.upstream is not None:
            problems.append("nothing is above a manager, so it has no upstream")
        if self.listen is None and self.upstream is None:
            problems.append("a bus node needs a place to listen, an upstream, or both")
        for address in filter(None, (self.listen, self.upstream)):
            try:
                Address.parse(address)
            except SettingsError as error:
                problems += error.problems
        if self.listen is not None and self.token.startswith(BADGE):
            problems.append("a place that serves children needs the job's secret, not a badge")
        if problems:
            raise SettingsError(problems)


class Bus:
    """One place on the bus. Made, started, used and closed in one asyncio loop."""

    def __init__(self, config: BusConfig) -> None:
        self._config = config
        life = secrets.token_hex(8)
        self._switch = Switch(
            Relay(
                config.me,
                config.upstream is None,
                _read,
                new_life=lambda: secrets.token_hex(8),
                config=replace(
                    config.relay,
                    # Whoever had to prove his place must also speak for it alone.
                    check_sources=config.relay.check_sources or bool(config.token or config.tls),
                ),
            ),
            life,
        )
        self._server: grpc.aio.Server | None = None
        self._downlinks: Downlinks | None = None
        self._wires = Wires()
        self._uplink: Uplink | None = None
        self._burst = 0
        self._closed = False
        self.port = 0
        """Where children reach this place, once started."""

    @property
    def me(self) -> Position:
        return self._config.me

    @property
    def trouble(self) -> str:
        """Why the way up is closed, in one sentence; empty while it is open."""
        if self._uplink is None or self.joined:
            return ""
        return self._uplink.trouble

    @property
    def joined(self) -> bool:
        lane = self._switch.relay.lanes.get(Side.UP)
        return lane is not None and lane.connected

    def below(self) -> tuple[Position, ...]:
        """Every position that can be reached downwards."""
        return self._switch.relay.routes.below()

    def wire_to(self, below: Position) -> Wire | None:
        """How the connection downwards to it is doing; None: nobody here can tell."""
        hop = self._switch.relay.routes.hop_to(below)
        if hop is None or hop.server_rank != below.server_rank or self._downlinks is None:
            return None  # what is between may have ended where the kernel's knowledge begins
        peer = self._downlinks.peer_of(hop)
        return None if peer is None else self._wires.look(peer)

    async def start(self) -> None:
        """Bind the port, or raise; then join the server above, in the background."""
        config = self._config
        if config.upstream is not None:
            self._uplink = Uplink(
                self._switch,
                UplinkConfig(
                    target=str(Address.parse(config.upstream)),
                    me=config.me,
                    job=config.job,
                    token=config.token,
                    tls=config.tls,
                    first_backoff_s=config.first_backoff_s,
                    max_backoff_s=config.max_backoff_s,
                ),
                Random(),
            )
        if config.tls is not None and config.upstream is not None:
            channel_credentials(config.tls)  # Files that cannot be read are told now.
        if config.listen is not None:
            await self._serve(Address.parse(config.listen))
        if self._uplink is not None:
            self._uplink.start()

    async def _serve(self, address: Address) -> None:
        config = self._config
        tls = config.tls if config.tls_below else None
        server = grpc.aio.server(options=SERVER_OPTIONS)
        gate = Gate(
            job=config.job,
            secret=config.token,
            tls=tls is not None,
            max_calls_per_s=config.max_calls_per_s,
        )
        announce_up = self._uplink.announce if self._uplink is not None else None
        self._downlinks = Downlinks(self._switch, gate, announce_up)
        self._downlinks.serve_on(server)
        try:
            if tls is None:
                self.port = server.add_insecure_port(str(address))
            else:
                self.port = server.add_secure_port(str(address), server_credentials(tls))
        except RuntimeError:
            self.port = 0
        if not self.port:
            reason = address.why_not()
            raise SettingsError([f"{config.me} cannot listen on {address}: {reason}"])
        if tls is None and not address.is_loopback:
            log.warning(
                "%s listens on %s without TLS: anyone there can read along", config.me, address
            )
        await server.start()
        self._server = server

    async def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the way up is open. False when it is not in time; `trouble` says why."""
        if self._config.upstream is None or self.joined:
            return True
        watcher = self._switch.watch()
        try:
            async with asyncio.timeout(timeout_s):
                async for change in watcher:
                    if isinstance(change, Joined):
                        return True
        except TimeoutError:
            pass
        finally:
            watcher.end()
        return self.joined

    async def send(
        self,
        dst: Position,
        body: Body,
        *,
        sync: bool = True,
        uuid: str | None = None,
        timeout_s: float = 3.0,
    ) -> Sent:
        """Send, and with `sync` wait until the destination has it. A failure is a result."""
        if self._closed:
            return Sent(NetCode.ServerErr, self.me)
        dst_or_code = as_destination(dst)
        if isinstance(dst_or_code, NetCode):
            return Sent(dst_or_code, self.me)
        parcel = Parcel(
            uuid or self._switch.new_uuid(),
            self._config.mtype,
            sync,
            self.me,
            dst_or_code,
            encode(body),
            timeout_s,
        )
        if not _fits_the_wire(parcel):
            return Sent(NetCode.ClientErr, self.me)
        deadline = monotonic() + timeout_s
        while True:
            ticket, answered = self._switch.ticket()
            self._switch.relay.send(parcel, ticket, monotonic())
            self._switch.settle()
            at_once = answered.done()
            answer = await answered
            is_full = at_once and answer.code == NetCode.NetworkSendLost
            # Somebody who sends faster than the link carries waits for it; a repeated broadcast is
            # dropped by those who have it already.
            if not is_full or not await self._switch.progress(deadline):
                if at_once:
                    await self._breathe()
                return Sent(net_code(answer.code), answer.source)

    async def _breathe(self) -> None:
        """A loop that only sends must not keep its links from writing."""
        self._burst += 1
        if self._burst % BURST == 0:
            await asyncio.sleep(0)

    async def receive(self) -> Received:
        """The next message for this place."""
        return await self._switch.receive()

    def changes(self) -> Watcher:
        """What joins and leaves, beginning with what has joined already."""
        return self._switch.watch()

    async def close(self, flush_s: float = 0.5) -> None:
        """Deliver what is on its way as far as that takes no longer than this, then end."""
        if self._closed:
            return
        self._closed = True
        await self._switch.flush(monotonic() + flush_s)
        if self._uplink is not None:
            await self._uplink.close()
        if self._server is not None:
            await self._server.stop(None)
        self._switch.close()


def _read(parcel: Parcel) -> Received | None:
    try:
        body = decode(parcel.body, parcel.src.role)
    except NotABody as problem:
        log.warning("a message of %s cannot be read: %s", parcel.src, problem)
        return None
    return Received(parcel.src, parcel.dst, parcel.uuid, parcel.mtype, body)


def _fits_the_wire(parcel: Parcel) -> bool:
    """Text with lone surrogates has no UTF-8."""
    try:
        (parcel.uuid + parcel.body).encode()
    except UnicodeEncodeError:
        return False
    return True
