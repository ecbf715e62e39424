"""Serves metrics to Prometheus, by `prometheus_client` (the extra `metrics`, loaded when used).

The manager and clusterd describe what they know as `Metric` values (`job_metrics.py`,
`clusterd/cluster_metrics.py`), which are collected again for each scrape.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from socket import AF_INET6
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from taskd.errors import SettingsError
from taskd.runtime.limits.waiting_connections import WaitingConnections

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""How long a connection may be silent, and how long the collection of the metrics may take."""


@dataclass(frozen=True, slots=True)
class Sample:
    value: float
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    """The name of a counter ends with `_total`."""
    help: str
    samples: tuple[Sample, ...]
    kind: str = "gauge"
    """gauge or counter"""


Look = Callable[[], Iterable[Metric]]


def one(name: str, help: str, value: float, kind: str = "gauge", **labels: str) -> Metric:
    return Metric(name, help, (Sample(value, labels),), kind)


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def handle(self) -> None:
        with suppress(OSError):  # also a timeout: the client has gone or sends nothing
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection: slow ones do not keep others waiting."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        self._open = WaitingConnections()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.remove(request)
        super().shutdown_request(request)


class _Server6(_Server):
    address_family = AF_INET6


@asynccontextmanager
async def serve(address: str, look: Look) -> AsyncIterator[int]:
    """Yields the port. SettingsError: cannot listen there, or prometheus_client is missing."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise SettingsError([f"--metrics must be HOST:PORT, got {address!r}"])
    host = host.strip("[]") or "127.0.0.1"
    app = _application(look, asyncio.get_running_loop())
    try:
        server = (_Server6 if ":" in host else _Server)((host, int(port)), _Handler)
    except OSError as error:
        raise SettingsError([f"metrics cannot be served on {address}: {error}"]) from error
    server.set_app(app)
    serving = partial(server.serve_forever, poll_interval=0.1)
    thread = threading.Thread(target=serving, name="taskd-metrics", daemon=True)
    thread.start()
    try:
        log.info("metrics on port %d", server.server_port)
        yield int(server.server_port)
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()


def _application(look: Look, loop: asyncio.AbstractEventLoop) -> Any:
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
        from prometheus_client.core import Metric as Family
        from prometheus_client.registry import Collector
    except ImportError as error:
        missing = "--metrics needs prometheus_client: pip install 'taskd[metrics]'"
        raise SettingsError([missing]) from error

    async def snapshot() -> list[Metric]:
        return list(look())

    class FromLoop(Collector):
        """Reads the state in the loop that changes it, never in the server's thread."""

        def collect(self) -> Iterator[Family]:
            asked = asyncio.run_coroutine_threadsafe(snapshot(), loop)
            for metric in asked.result(TIMEOUT_S):
                family = Family(metric.name.removesuffix("_total"), metric.help, metric.kind)
                for sample in metric.samples:
                    family.add_sample(metric.name, dict(sample.labels), float(sample.value))
                yield family

    registry = CollectorRegistry()
    registry.register(FromLoop())
    return make_wsgi_app(registry)
