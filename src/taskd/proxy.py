"""The proxy of a node: it forwards between the node's own roles and the manager, nothing else.

`Proxy` is for programs that run their own loop (the agent). `start` and `stop` are for processes
that are not ours, which is what `taskd.api.init_taskd_proxy` serves: one proxy a process, in a
thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

from taskd.bus.endpoint import Bus, BusConfig, Tls
from taskd.bus.security import membership, tls_from_environment
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
    tls: Tls | None = field(default_factory=tls_from_environment)
    """For the way up, which leaves the node; below, only when that is not the loopback."""

    @staticmethod
    def of(given: Mapping[str, object], environ: Mapping[str, str]) -> ProxyConfig:
        """From the documented keys; each may be missing, and a port may be a number or text."""

        def told(key: str) -> str:
            value = given.get(key)
            return "" if value is None else str(value)

        def address(host_key: str, port_key: str, usual: str, host: str | None = None) -> str:
            default = Address.parse(usual)
            named = host or (told(host_key) or default.host).strip("[]")
            port = told(port_key) or str(default.port)
            if not port.isascii() or not port.isdigit() or int(port) > 65535:
                raise SettingsError([f"{port_key} must be a port, got {port!r}"])
            return str(Address.parse(str(Address(named, int(port)))))

        rank = told("ServerRank") or environ.get("RANK") or environ.get("MS_NODE_RANK") or "0"
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
        # Ascend's proxies take the time of their start for a process rank; so do ours.
        me = Position(Role.PROXY, str(config.server_rank), str(int(wall())))
        self.bus = Bus(
            BusConfig(
                me=me,
                listen=config.listen,
                upstream=config.upstream,
                job=config.job,
                token=config.token,
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

    async def _read_own(self) -> None:
        while True:
            got = await self.bus.receive()
            log.info("a message of %s for the proxy itself: %s", got.src, got.body)

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
    """For an agent that tells its workers the port: the documented one, or any that is free."""
    proxy = Proxy(ProxyConfig.of(config, environ))
    try:
        await proxy.start()
    except SettingsError as error:
        log.warning("%s; taking a free port", error)
        proxy = Proxy(ProxyConfig.of({**config, "ListenPort": "0"}, environ))
        await proxy.start()
    return proxy


class _Threaded:
    """The one proxy of a process that is not ours."""

    def __init__(self, config: ProxyConfig) -> None:
        self._thread = LoopThread("taskd-proxy")
        try:
            self.proxy = self._thread.run(self._made(config)).result(START_TIMEOUT_S)
        except BaseException:
            self._thread.stop()
            raise

    async def _made(self, config: ProxyConfig) -> Proxy:
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
_running: _Threaded | None = None


def start(config: ProxyConfig, *, timeout_s: float | None = None) -> bool:
    """Run the process's proxy and wait until it has joined the manager. A second call waits only.

    Raises `SettingsError` when it cannot listen; then nothing is left behind. False: it was
    stopped meanwhile, or has not joined in time; it goes on trying then.
    """
    global _running
    with _lock:
        if _running is None or not _running.is_ours:
            _running = _Threaded(config)
        running = _running
    return running.join(timeout_s)


def stop() -> None:
    """End the process's proxy, also one that is still joining. Without one, nothing happens."""
    global _running
    with _lock:
        running, _running = _running, None
    if running is not None and running.is_ours:
        running.close()
