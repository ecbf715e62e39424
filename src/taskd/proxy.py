"""The proxy of a node: forwards messages between the processes of the node and the manager.

`Proxy` is for programs with their own loop (the agent). `start` and `stop` are for user processes,
through `taskd.api.init_taskd_proxy`: one proxy per process, in its own thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

from taskd.bus.endpoint import Bus, BusConfig, Tls
from taskd.bus.security import membership, tls_from_environment, token_file_from_environment
from taskd.errors import SettingsError
from taskd.model.ids import Position, Role
from taskd.runtime.address import Address
from taskd.runtime.clock import wall
from taskd.runtime.loop_thread import LoopThread

log = logging.getLogger(__name__)

LISTEN, UPSTREAM = "127.0.0.1:9602", "127.0.0.1:9601"
START_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyConfig:
    server_rank: int = 0
    listen: str = LISTEN
    upstream: str = UPSTREAM
    job: str = ""
    token: str = ""
    token_file: str = field(default_factory=token_file_from_environment)
    """Secrets for the upstream connection, instead of `token`."""
    tls: Tls | None = field(default_factory=tls_from_environment)
    """For the upstream connection; downstream only if `listen` is not a loopback address."""

    @staticmethod
    def of(given: Mapping[str, object], environ: Mapping[str, str]) -> ProxyConfig:
        """From the documented keys; each is optional, and a port may be a number or text."""

        def text(key: str) -> str:
            value = given.get(key)
            return "" if value is None else str(value)

        def address(host_key: str, port_key: str, usual: str, host: str | None = None) -> str:
            default = Address.parse(usual)
            chosen = host or (text(host_key) or default.host).strip("[]")
            port = text(port_key) or str(default.port)
            if not port.isascii() or not port.isdigit() or int(port) > 65535:
                raise SettingsError([f"{port_key} must be a port number, got {port!r}"])
            parsed = Address.parse(str(Address(chosen, int(port))))
            if port_key == "UpstreamPort" and not parsed.port:
                raise SettingsError(["UpstreamPort must be between 1 and 65535, got 0"])
            if parsed.is_multicast:
                raise SettingsError([f"{host_key} must name one host, got {chosen!r}"])
            return str(parsed)

        rank = text("ServerRank") or environ.get("RANK") or environ.get("MS_NODE_RANK") or "0"
        if not rank.isascii() or not rank.isdigit():
            raise SettingsError([f"ServerRank must be a number, got {rank!r}"])
        local = environ.get("LOCAL_PROXY_ENABLE") == "on"
        job, token = membership(environ)
        return ProxyConfig(
            server_rank=int(rank),
            listen=address("ListenAddr", "ListenPort", LISTEN),
            upstream=address(
                "UpstreamAddr", "UpstreamPort", UPSTREAM, "127.0.0.1" if local else None
            ),
            job=job,
            token=token,
        )


class Proxy:
    """A proxy in the caller's asyncio loop."""

    def __init__(self, config: ProxyConfig) -> None:
        # Like Ascend's proxies, ours use the time of their start as process rank.
        me = Position(Role.PROXY, str(config.server_rank), str(int(wall())))
        self.bus = Bus(
            BusConfig(
                me=me,
                listen=config.listen,
                upstream=config.upstream,
                job=config.job,
                token=config.token,
                token_file=config.token_file,
                tls=config.tls,
                tls_below=not Address.parse(config.listen).is_loopback,
            )
        )
        self.upstream = config.upstream
        self._own: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return self.bus.port

    async def start(self) -> None:
        """Listen, or raise `SettingsError`; join the manager in the background."""
        await self.bus.start()
        self._own = asyncio.create_task(self._read_own())

    async def redirect(self, upstream: str, run: str = "") -> None:
        """Join another manager from now on, and none of another run of the job."""
        self.upstream = upstream
        await self.bus.redirect(upstream, run)

    async def _read_own(self) -> None:
        while True:
            got = await self.bus.receive()
            log.info("proxy received a message: src=%s body=%.300s", got.src, got.body)

    async def close(self) -> None:
        if self._own is not None:
            self._own.cancel()
        await self.bus.close()

    async def __aenter__(self) -> Proxy:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def started(config: Mapping[str, object], environ: Mapping[str, str]) -> Proxy:
    """A running proxy on the documented port, or on a free port if that one is in use."""
    proxy = Proxy(ProxyConfig.of(config, environ))
    try:
        await proxy.start()
    except SettingsError as error:
        log.warning("%s; using a free port instead", error)
        proxy = Proxy(ProxyConfig.of({**config, "ListenPort": "0"}, environ))
        await proxy.start()
    return proxy


class _ProxyThread:
    """The proxy of a user process, in its own thread."""

    def __init__(self, config: ProxyConfig) -> None:
        self._thread = LoopThread("taskd-proxy")
        try:
            self.proxy = self._thread.run(self._start(config)).result(START_TIMEOUT_S)
        except BaseException:
            self._thread.stop()
            raise

    async def _start(self, config: ProxyConfig) -> Proxy:
        self._closed = asyncio.Event()
        proxy = Proxy(config)
        await proxy.start()
        return proxy

    @property
    def is_ours(self) -> bool:
        """False in a process that was forked from the one that runs it."""
        return self._thread.is_ours

    def join(self, timeout_s: float | None) -> bool:
        return self._thread.run(self._joined(timeout_s)).result()

    async def _joined(self, timeout_s: float | None) -> bool:
        joining = asyncio.ensure_future(self.proxy.bus.join(timeout_s))
        closing = asyncio.ensure_future(self._closed.wait())
        await asyncio.wait({joining, closing}, return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        joining.cancel()
        await asyncio.wait({joining, closing})
        return not joining.cancelled() and joining.result()

    def close(self) -> None:
        self._thread.run(self._end()).result(START_TIMEOUT_S)
        self._thread.stop()

    async def _end(self) -> None:
        self._closed.set()
        await self.proxy.close()


_lock = threading.Lock()
_running: _ProxyThread | None = None


def start(config: ProxyConfig, *, timeout_s: float | None = None) -> bool:
    """Start the process's proxy and wait until it is connected. A second call only waits.

    Raises `SettingsError` when it cannot listen; then nothing is left running. False: it was
    stopped meanwhile, or the timeout passed; then it keeps trying to connect.
    """
    global _running
    with _lock:
        if _running is None or not _running.is_ours:
            _running = _ProxyThread(config)
        running = _running
    return running.join(timeout_s)


def stop() -> None:
    """Stop the process's proxy, also while it is connecting. Without one, do nothing."""
    global _running
    with _lock:
        running, _running = _running, None
    if running is not None and running.is_ours:
        running.close()
