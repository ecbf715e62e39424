"""The way up: join the server above, keep the stream, join again whenever it breaks.

Joining is the same every time, so that a restarted server learns all it had known: Register,
PathDiscovery for this place and everything below it, then the stream. Only then is `Joined` told.
A server of Ascend's knows no `taskd.v1.Link`; `bus/tasknet_client.py` serves it by the older
methods.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

import grpc

from taskd.bus import tasknet_client as foreign
from taskd.bus.relay_loop import Switch
from taskd.bus.security import JOB_KEY, TOKEN_KEY, Tls, channel_credentials, make_token
from taskd.bus.stream import carry
from taskd.core.bus.delivery import Confused
from taskd.core.bus.routing import Side
from taskd.errors import SettingsError
from taskd.model.codes import NetCode
from taskd.model.ids import Position
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, doubling
from taskd.wire._pb import link_pb2_grpc, tasknet_pb2, tasknet_pb2_grpc
from taskd.wire.bus_frames import position_to_pb

log = logging.getLogger(__name__)

NOT_TRIED = "it has not been tried yet"
STABLE_S = 1.0
"""A join that lasted for so long was a good one: the next backoff starts small again."""
REGISTER_TIMEOUT_S = 2.0
"""Also the wait for a host that does not answer at all."""
CALL_TIMEOUT_S = 5.0
MAX_MESSAGE = 8 << 20
CALL_KEY = "taskd-call"
"""Names and numbers the calls of one process, so that a late one can be told from a new."""
ANEW = ("taskd-paths", "all")
"""Marks an announcement that replaces the ones before it. Ascend's servers do not look at it."""
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
"""For servers of our own. Ascend's end a connection that is pinged more often than every 5 min."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UplinkConfig:
    target: str
    me: Position
    job: str = ""
    token: str = ""
    tls: Tls | None = None
    first_backoff_s: float = 0.05
    max_backoff_s: float = 1.0


class NotAdmitted(Exception):
    """The server has answered, but not with a yes."""


class _IsForeign(Exception):
    """The server is one of Ascend's: join it again, in its own way."""


class Uplink:
    def __init__(self, switch: Switch, config: UplinkConfig, random: Random) -> None:
        self._switch = switch
        self._config = config
        self._random = random
        self._stub: tasknet_pb2_grpc.TaskNetStub | None = None
        self._calls = count(1)
        self._is_foreign = False
        self._announcing = asyncio.Lock()
        self._doubt: asyncio.Future[str]
        """Set when the server may not know all paths although the stream is running."""
        self._task: asyncio.Task[None] | None = None
        self.trouble = NOT_TRIED
        """Why the way up is closed at present, or was last."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_joined())
        self._task.add_done_callback(_tell_how_it_ended)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Who calls. Taken anew for every call."""
        me, job, token = self._config.me, self._config.job, self._config.token
        place = (
            ("role", me.role),
            ("serverrank", me.server_rank),
            ("processrank", me.process_rank),
            (CALL_KEY, f"{self._switch.life}/{next(self._calls)}"),
        )
        shown = ((TOKEN_KEY, make_token(token, job, me)),) if token else ()
        return (*place, *(((JOB_KEY, job),) if job else ()), *shown)

    async def announce(self, path: Sequence[Position], timeout_s: float) -> None:
        """Tell the server above of new positions below. If it is away, the next join tells it."""
        async with self._announcing:
            if self._stub is None or self._doubt.done():
                return
            try:
                await self._discover(self._stub, path, timeout_s)
            except (grpc.RpcError, NotAdmitted) as error:
                # It may not know of them, and nothing else would tell it: join anew.
                self._doubt.set_result(f"it could not be told of {len(path)} paths: {_why(error)}")

    async def _keep_joined(self) -> None:
        config, told = self._config, ""
        tries = Tries(doubling(config.first_backoff_s, config.max_backoff_s, self._random))
        async for _ in tries:
            joined_before, began = self._switch.joins, monotonic()
            try:
                self.trouble = await self._join()
            except (grpc.RpcError, NotAdmitted, Confused, SettingsError, TimeoutError) as error:
                self.trouble = _why(error)
            except asyncio.InvalidStateError:  # from gRPC: the stream ended as it was written to
                self.trouble = "the stream had ended"
            if self._switch.joins > joined_before:
                told = ""
                # Two processes at one place would otherwise push each other out without a pause.
                if monotonic() - began > STABLE_S:
                    tries.reset()
            if self.trouble != told:
                log.warning("the way up to %s is closed: %s", config.target, self.trouble)
            told = self.trouble

    async def _join(self) -> str:
        try:
            return await self._join_once()
        except _IsForeign:
            log.info("%s is a server of Ascend's", self._config.target)
            return await self._join_once()

    async def _join_once(self) -> str:
        """Join and stay. Returns or raises once the way up has closed again."""
        config = self._config
        async with _channel(config, keepalive=not self._is_foreign) as channel:
            stub = tasknet_pb2_grpc.TaskNetStub(channel)  # type: ignore[no-untyped-call]
            ack = await stub.Register(
                tasknet_pb2.RegisterReq(
                    uuid=self._switch.new_uuid(), pos=position_to_pb(config.me)
                ),
                metadata=self._metadata(),
                timeout=REGISTER_TIMEOUT_S,
            )
            _expect_ok(ack, "Register")
            async with self._announcing:
                below = self._switch.relay.routes.below()
                await self._discover(stub, (config.me, *below), CALL_TIMEOUT_S, ANEW)
                self._stub = stub
                self._doubt = asyncio.get_running_loop().create_future()
            streaming = asyncio.create_task(self._stay(channel, stub))
            try:
                await asyncio.wait({streaming, self._doubt}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                streaming.cancel()
                await asyncio.wait({streaming})
                self._stub = None
            return self._doubt.result() if streaming.cancelled() else streaming.result()

    async def _stay(self, channel: grpc.aio.Channel, stub: tasknet_pb2_grpc.TaskNetStub) -> str:
        link = link_pb2_grpc.LinkStub(channel)  # type: ignore[no-untyped-call]
        was_foreign, self._is_foreign = self._is_foreign, False
        try:
            return await carry(self._switch, Side.UP, link.Open(metadata=self._metadata()))
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNIMPLEMENTED:
                raise
        self._is_foreign = True
        if not was_foreign:
            raise _IsForeign
        return await foreign.join(self._switch, stub, self._metadata())

    async def _discover(
        self,
        stub: tasknet_pb2_grpc.TaskNetStub,
        path: Sequence[Position],
        timeout_s: float,
        *marks: tuple[str, str],
    ) -> None:
        ack = await stub.PathDiscovery(
            tasknet_pb2.PathDiscoveryReq(
                uuid=self._switch.new_uuid(),
                proxyPos=position_to_pb(self._config.me),
                path=[position_to_pb(position) for position in path],
            ),
            metadata=(*self._metadata(), *marks),
            timeout=timeout_s,
        )
        _expect_ok(ack, "PathDiscovery")


def _channel(config: UplinkConfig, *, keepalive: bool) -> grpc.aio.Channel:
    options: tuple[tuple[str, str | int], ...] = OPTIONS + (KEEPALIVE if keepalive else ())
    if config.tls is None:
        return grpc.aio.insecure_channel(config.target, options=options)
    if config.tls.server_name:
        options = (*options, ("grpc.ssl_target_name_override", config.tls.server_name))
    return grpc.aio.secure_channel(config.target, channel_credentials(config.tls), options=options)


def _tell_how_it_ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        log.critical("the way up is given up", exc_info=task.exception())


def _expect_ok(ack: tasknet_pb2.Ack, call: str) -> None:
    if ack.code != NetCode.OK:
        raise NotAdmitted(f"{call} was answered with {ack.code}")


def _why(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
