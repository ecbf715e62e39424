"""Keeps this process connected to its upstream server: join, keep the stream, join again.

Each join is the same, so that a restarted server learns all that it knew: Register, PathDiscovery
for this position and everything downstream of it, then the stream. Only then the bus reports
`Joined`. Ascend's servers do not have `taskd.v1.Link`; `bus/tasknet_client.py` uses their methods.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

import grpc

from taskd.bus import tasknet_client as tasknet_client
from taskd.bus.job_secrets import JobSecrets
from taskd.bus.relay_loop import RelayLoop
from taskd.bus.security import JOB_KEY, RUN_KEY, TOKEN_KEY, Tls, channel_credentials, make_token
from taskd.bus.stream import run_stream
from taskd.core.bus.delivery import ProtocolError
from taskd.core.bus.routing import Side
from taskd.errors import SettingsError
from taskd.model.codes import NetCode
from taskd.model.ids import Position
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, doubling
from taskd.wire._pb import link_pb2_grpc, tasknet_pb2, tasknet_pb2_grpc
from taskd.wire.bus_frames import position_to_pb

log = logging.getLogger(__name__)

NOT_TRIED = "no connection has been tried yet"
STABLE_S = 1.0
"""After a join that lasted this long, the pauses between tries start small again."""
REGISTER_TIMEOUT_S = 2.0
"""Also limits the wait for a host that does not answer at all."""
CALL_TIMEOUT_S = 5.0
MAX_MESSAGE = 8 << 20
CALL_KEY = "taskd-call"
"""Metadata with the incarnation and the number of a call, by which a server detects late calls."""
REPLACE_ALL_PATHS = ("taskd-paths", "all")
"""Metadata of an announcement that replaces all earlier ones. Ascend's servers ignore it."""
OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
)
"""For our own servers. Ascend's close a connection that is pinged more often than every 5 min."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpstreamConfig:
    target: str
    me: Position
    job: str = ""
    secrets: JobSecrets = field(default_factory=lambda: JobSecrets(""))
    """The one to present, at every call; or a badge."""
    tls: Tls | None = None
    first_backoff_s: float = 0.05
    max_backoff_s: float = 1.0


class JoinRefused(Exception):
    """The server answered Register or PathDiscovery with an error code."""


class _AscendServer(Exception):
    """The server is Ascend's: join again with its methods."""


class UpstreamClient:
    def __init__(self, relay_loop: RelayLoop, config: UpstreamConfig, random: Random) -> None:
        self._relay_loop = relay_loop
        self._config = config
        self._target = config.target
        self._run = ""
        self._random = random
        self._stub: tasknet_pb2_grpc.TaskNetStub | None = None
        self._calls = count(1)
        self._is_ascend = False
        self._announcing = asyncio.Lock()
        self._rejoin_because: asyncio.Future[str]
        """Set when the server may not know all paths although the stream is open."""
        self._task: asyncio.Task[None] | None = None
        self.disconnect_reason = NOT_TRIED
        """Why this process is not connected, or was not before the current connection."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_joined())
        self._task.add_done_callback(_log_end)

    async def redirect(self, target: str, run: str) -> None:
        """Join another server from now on, at once."""
        self._run = run
        if target == self._target:
            return
        self._target = target
        if self._task is not None:
            await self.close()
            self.start()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Identifies the caller; new for each call."""
        me, job, token = self._config.me, self._config.job, self._config.secrets.presented
        position = (
            ("role", me.role),
            ("serverrank", me.server_rank),
            ("processrank", me.process_rank),
            (CALL_KEY, f"{self._relay_loop.incarnation}/{next(self._calls)}"),
        )
        shown = ((TOKEN_KEY, make_token(token, job, me)),) if token else ()
        run = ((RUN_KEY, self._run),) if self._run else ()
        return (*position, *(((JOB_KEY, job),) if job else ()), *run, *shown)

    async def announce(self, path: Sequence[Position], timeout_s: float) -> None:
        """Announce new downstream positions. Without a connection, the next join announces them."""
        async with self._announcing:
            if self._stub is None or self._rejoin_because.done():
                return
            try:
                await self._discover(self._stub, path, timeout_s)
            except (grpc.RpcError, JoinRefused) as error:
                # The server may not know them, and nothing else would announce them: join again.
                self._rejoin_because.set_result(
                    f"announcing {len(path)} paths failed: {_why(error)}"
                )

    async def _keep_joined(self) -> None:
        config, logged = self._config, ""
        tries = Tries(doubling(config.first_backoff_s, config.max_backoff_s, self._random))
        async for _ in tries:
            joined_before, began = self._relay_loop.joins, monotonic()
            try:
                self.disconnect_reason = await self._join()
            except (
                grpc.RpcError,
                JoinRefused,
                ProtocolError,
                SettingsError,
                TimeoutError,
            ) as error:
                self.disconnect_reason = _why(error)
            except asyncio.InvalidStateError:  # from gRPC: the stream ended as it was written to
                self.disconnect_reason = "the stream had ended"
            if self._relay_loop.joins > joined_before:
                logged = ""
                # Two processes with one position would otherwise disconnect each other in a loop.
                if monotonic() - began > STABLE_S:
                    tries.reset()
            if self.disconnect_reason != logged:
                log.warning(
                    "disconnected from upstream %s: %s", self._target, self.disconnect_reason
                )
            logged = self.disconnect_reason

    async def _join(self) -> str:
        try:
            return await self._join_once()
        except _AscendServer:
            log.info("upstream %s is an Ascend server", self._target)
            return await self._join_once()

    async def _join_once(self) -> str:
        """Join and serve the stream. Returns or raises when the connection has ended."""
        config = self._config
        async with _channel(config, self._target, keepalive=not self._is_ascend) as channel:
            stub = tasknet_pb2_grpc.TaskNetStub(channel)  # type: ignore[no-untyped-call]
            ack = await stub.Register(
                tasknet_pb2.RegisterReq(
                    uuid=self._relay_loop.new_uuid(), pos=position_to_pb(config.me)
                ),
                metadata=self._metadata(),
                timeout=REGISTER_TIMEOUT_S,
            )
            _expect_ok(ack, "Register")
            async with self._announcing:
                downstream = self._relay_loop.routes.below()
                await self._discover(
                    stub, (config.me, *downstream), CALL_TIMEOUT_S, REPLACE_ALL_PATHS
                )
                self._stub = stub
                self._rejoin_because = asyncio.get_running_loop().create_future()
            streaming = asyncio.create_task(self._stay(channel, stub))
            try:
                await asyncio.wait(
                    {streaming, self._rejoin_because}, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                streaming.cancel()
                await asyncio.wait({streaming})
                self._stub = None
            return self._rejoin_because.result() if streaming.cancelled() else streaming.result()

    async def _stay(self, channel: grpc.aio.Channel, stub: tasknet_pb2_grpc.TaskNetStub) -> str:
        link = link_pb2_grpc.LinkStub(channel)  # type: ignore[no-untyped-call]
        was_ascend, self._is_ascend = self._is_ascend, False
        try:
            return await run_stream(self._relay_loop, Side.UP, link.Open(metadata=self._metadata()))
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNIMPLEMENTED:
                raise
        self._is_ascend = True
        if not was_ascend:
            raise _AscendServer
        return await tasknet_client.join(self._relay_loop, stub, self._metadata())

    async def _discover(
        self,
        stub: tasknet_pb2_grpc.TaskNetStub,
        path: Sequence[Position],
        timeout_s: float,
        *marks: tuple[str, str],
    ) -> None:
        ack = await stub.PathDiscovery(
            tasknet_pb2.PathDiscoveryReq(
                uuid=self._relay_loop.new_uuid(),
                proxyPos=position_to_pb(self._config.me),
                path=[position_to_pb(position) for position in path],
            ),
            metadata=(*self._metadata(), *marks),
            timeout=timeout_s,
        )
        _expect_ok(ack, "PathDiscovery")


def _channel(config: UpstreamConfig, target: str, *, keepalive: bool) -> grpc.aio.Channel:
    options: tuple[tuple[str, str | int], ...] = OPTIONS + (KEEPALIVE if keepalive else ())
    if config.tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    if config.tls.server_name:
        options = (*options, ("grpc.ssl_target_name_override", config.tls.server_name))
    return grpc.aio.secure_channel(target, channel_credentials(config.tls), options=options)


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        log.critical("upstream client failed", exc_info=task.exception())


def _expect_ok(ack: tasknet_pb2.Ack, call: str) -> None:
    if ack.code != NetCode.OK:
        raise JoinRefused(f"the server answered {call} with code {ack.code}")


def _why(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
