"""The interface of the bus: start, send, receive, and changes of connections.

`core/bus/relay.py` decides, `bus/relay_loop.py` runs it, `bus/client.py` and `bus/server.py`
connect it, `wire/bus_bodies.py` decodes what arrives.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field, replace
from random import Random

import grpc

from taskd.bus.admission import LOG_RATE, LOGGED_HOSTS, MAX_CALLS_PER_S, Admission
from taskd.bus.client import MAX_MESSAGE, UpstreamClient, UpstreamConfig
from taskd.bus.job_secrets import JobSecrets
from taskd.bus.late_reading import SMALL_BUFFERS
from taskd.bus.relay_loop import RelayLoop, Watcher
from taskd.bus.security import BADGE, Tls, channel_credentials, server_credentials
from taskd.bus.server import AdmitFirst, BusServer
from taskd.bus.tcp_info import TcpConnections
from taskd.core.bus.relay import Relay, RelayConfig
from taskd.core.bus.routing import Side, as_destination, as_member
from taskd.core.election import Fence
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
    TcpState,
)
from taskd.model.codes import NetCode, net_code
from taskd.model.ids import Position, Role, manager
from taskd.model.messages import Body
from taskd.runtime.address import Address
from taskd.runtime.clock import monotonic
from taskd.runtime.limits import connection_limit
from taskd.runtime.limits.rate_limit import Buckets
from taskd.wire.bus_bodies import InvalidBody, decode, encode, epoch_of

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
"""After this many sends without a wait, other tasks may run."""
RENEWAL_S = 1.0
"""How soon a removed secret ends the streams that were opened with it."""
SERVER_OPTIONS = (
    *SMALL_BUFFERS,
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    # Of a connection. Our own make a few; see also `late_reading.MOST_METADATA`.
    ("grpc.max_concurrent_streams", 128),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    # A peer that connects and sends nothing, or that makes no call, is disconnected.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
    # Two servers must never share a port by accident.
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BusConfig:
    me: Position
    listen: str | None = None
    """host:port for children; port 0 takes a free port. None: this process has no children."""
    upstream: str | None = None
    """host:port of the upstream server. None: this process is the top of the bus."""
    job: str = ""
    token: str = ""
    """The job's secret, or a badge made from it for `me`. Empty: peers are not checked."""
    token_file: str = ""
    """Secrets for the connections between proxies and their manager, instead of `token`: see
    `bus/job_secrets.py`."""
    tls: Tls | None = None
    tls_below: bool = True
    """Whether children need TLS, too. The children of a proxy connect over the loopback."""
    epoch: int = 0
    """Of the manager's term, in every message that it sends; 0: there is only one manager."""
    run: str = ""
    """Of the job: a server with one refuses a child with another one."""
    mtype: str = "default"
    relay: RelayConfig = field(default_factory=RelayConfig)
    max_calls_per_s: int = MAX_CALLS_PER_S
    first_backoff_s: float = 0.05
    max_backoff_s: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        fault = as_member(self.me)
        if isinstance(fault, NetCode):
            problems.append(f"invalid position {self.me}: {fault.sentence}")
        if self.me.role == Role.MANAGER and self.upstream is not None:
            problems.append("a manager has no upstream: it is the top of the bus")
        if self.listen is None and self.upstream is None:
            problems.append("a bus process needs an address to listen on, an upstream, or both")
        for address in filter(None, (self.listen, self.upstream)):
            try:
                Address.parse(address)
            except SettingsError as error:
                problems += error.problems
        if self.listen is not None and self.token.startswith(BADGE):
            problems.append("a process that serves children needs the job's secret, not a badge")
        if self.token_file and not self.token:
            problems.append("a file of secrets for the bus also needs the job's token")
        if problems:
            raise SettingsError(problems)


class Bus:
    """One process on the bus. Created, started, used and closed in one asyncio loop."""

    def __init__(self, config: BusConfig) -> None:
        self._config = config
        incarnation = secrets.token_hex(8)
        self._relay_loop = RelayLoop(
            Relay(
                config.me,
                config.upstream is None,
                _read,
                new_incarnation=lambda: secrets.token_hex(8),
                config=replace(
                    config.relay,
                    # A peer that had to prove its position may send only from that position.
                    check_sources=config.relay.check_sources or bool(config.token or config.tls),
                ),
            ),
            incarnation,
        )
        self._server: grpc.aio.Server | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._bus_server: BusServer | None = None
        self._tcp_connections = TcpConnections()
        self._upstream: UpstreamClient | None = None
        self._burst = 0
        self.fence = Fence()
        self._refused_orders = Buckets(LOG_RATE, LOGGED_HOSTS, monotonic)
        self._closed = False
        self.port = 0
        """The port for children, once started."""

    @property
    def me(self) -> Position:
        return self._config.me

    @property
    def disconnect_reason(self) -> str:
        """Why there is no upstream connection, in one sentence; empty while there is one."""
        if self._upstream is None or self.joined:
            return ""
        return self._upstream.disconnect_reason

    @property
    def joined(self) -> bool:
        link = self._relay_loop.link(Side.UP)
        return link is not None and link.connected

    def below(self) -> tuple[Position, ...]:
        """All downstream positions that can be reached."""
        return self._relay_loop.routes.below()

    def tcp_state_of(self, below: Position) -> TcpState | None:
        """The kernel's view of the downstream connection to it; None: not known here."""
        hop = self._relay_loop.routes.hop_to(below)
        if hop is None or hop.server_rank != below.server_rank or self._bus_server is None:
            return None  # our kernel only knows the connection to the first process on the way
        peer = self._bus_server.peer_of(hop)
        return None if peer is None else self._tcp_connections.look(peer)

    async def start(self) -> None:
        """Bind the port, or raise; then connect to the upstream server in the background."""
        config = self._config
        if config.upstream is not None:
            self._upstream = UpstreamClient(
                self._relay_loop,
                UpstreamConfig(
                    target=str(Address.parse(config.upstream)),
                    me=config.me,
                    job=config.job,
                    secrets=self._secrets(between_machines=config.me.role == Role.PROXY),
                    tls=config.tls,
                    first_backoff_s=config.first_backoff_s,
                    max_backoff_s=config.max_backoff_s,
                ),
                Random(),
            )
        if config.tls is not None and config.upstream is not None:
            channel_credentials(config.tls)  # report unreadable files now
        if config.listen is not None:
            await self._serve(Address.parse(config.listen))
        if self._upstream is not None:
            self._upstream.start()

    async def _serve(self, address: Address) -> None:
        config = self._config
        tls = config.tls if config.tls_below else None
        job_secrets = self._secrets(between_machines=config.upstream is None)
        admission = Admission(
            job=config.job,
            secrets=job_secrets,
            tls=tls is not None,
            run=config.run,
            max_calls_per_s=config.max_calls_per_s,
        )
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[AdmitFirst(admission)])
        announce_up = self._upstream.announce if self._upstream is not None else None
        self._bus_server = BusServer(self._relay_loop, admission, announce_up)
        self._bus_server.serve_on(server)
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
                "%s listens on %s without TLS: its traffic can be read there", config.me, address
            )
        await server.start()
        self._server = server
        self._watches.append(asyncio.create_task(connection_limit.watch()))
        self._watches.append(asyncio.create_task(admission.refused.watch(self.port)))
        if config.token_file:
            self._watches.append(asyncio.create_task(self._end_revoked_streams(job_secrets)))

    def _secrets(self, *, between_machines: bool) -> JobSecrets:
        return JobSecrets(self._config.token, self._config.token_file if between_machines else "")

    async def _end_revoked_streams(self, job_secrets: JobSecrets) -> None:
        """Soon after a secret was removed from the file. Their peers join again."""
        while self._bus_server is not None:
            await asyncio.sleep(RENEWAL_S)
            job_secrets.renew()
            self._bus_server.end_revoked()

    async def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the upstream connection. False: timeout, and `disconnect_reason` says why."""
        if self._config.upstream is None or self.joined:
            return True
        watcher = self._relay_loop.watch()
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
        """Send, and with `sync` wait until the destination has it. Failures are returned."""
        if self._closed:
            return Sent(NetCode.ServerErr, self.me)
        dst_or_code = as_destination(dst)
        if isinstance(dst_or_code, NetCode):
            return Sent(dst_or_code, self.me)
        parcel = Parcel(
            uuid or self._relay_loop.new_uuid(),
            self._config.mtype,
            sync,
            self.me,
            dst_or_code,
            encode(body, self._config.epoch),
            timeout_s,
        )
        if not _fits_the_wire(parcel):
            return Sent(NetCode.ClientErr, self.me)
        deadline = monotonic() + timeout_s
        while True:
            ticket, answered = self._relay_loop.ticket()
            with self._relay_loop.relay() as relay:
                relay.send(parcel, ticket, monotonic())
            at_once = answered.done()
            answer = await answered
            is_full = at_once and answer.code == NetCode.NetworkSendLost
            # A caller that sends faster than the link delivers waits for room and sends again.
            # Receivers that have a broadcast already drop its repetition.
            if not is_full or not await self._relay_loop.progress(deadline):
                if at_once:
                    await self._yield_after_burst()
                return Sent(net_code(answer.code), answer.source)

    async def _yield_after_burst(self) -> None:
        """A loop that only sends must not keep the links from writing."""
        self._burst += 1
        if self._burst % BURST == 0:
            await asyncio.sleep(0)

    async def receive(self) -> Received:
        """The next message for this process."""
        return await self._relay_loop.receive()

    async def receive_order(self) -> Received:
        """The next message from the manager that leads. No other process gives orders."""
        while True:
            received = await self.receive()
            why = "only the manager gives orders"
            if received.src == manager():
                if self.fence.admits(received.epoch):
                    return received
                why = f"epoch {received.epoch} is over, and epoch {self.fence.epoch} has begun"
            if self._refused_orders.take(str(received.src)):
                kind = type(received.body).__name__
                log.warning("%s from %s is ignored: %s", kind, received.src, why)

    async def redirect(self, upstream: str, run: str = "") -> None:
        """Leave the upstream server, if it is another one, and join this one.

        `run`: of the job, as this process knows it from now on.
        """
        if self._upstream is not None:
            await self._upstream.redirect(str(Address.parse(upstream)), run)

    def changes(self) -> Watcher:
        """Changes of connections, after one `Joined` or `PeerJoined` for each that is open."""
        return self._relay_loop.watch()

    async def close(self, flush_s: float = 0.5) -> None:
        """Deliver what is queued, for at most `flush_s`, then close."""
        if self._closed:
            return
        self._closed = True
        await self._relay_loop.flush(monotonic() + flush_s)
        if self._upstream is not None:
            await self._upstream.close()
        for watch in self._watches:
            watch.cancel()
        if self._server is not None:
            await self._server.stop(None)
        self._relay_loop.close()


def _read(parcel: Parcel) -> Received | None:
    try:
        body = decode(parcel.body, parcel.src.role)
        epoch = epoch_of(parcel.body) if parcel.src.role == Role.MANAGER else 0
    except InvalidBody as problem:
        log.warning("message from %s dropped: its body is invalid: %s", parcel.src, problem)
        return None
    return Received(parcel.src, parcel.dst, parcel.uuid, parcel.mtype, body, epoch)


def _fits_the_wire(parcel: Parcel) -> bool:
    """Text with lone surrogates cannot be encoded as UTF-8."""
    try:
        (parcel.uuid + parcel.body).encode()
    except UnicodeEncodeError:
        return False
    return True
