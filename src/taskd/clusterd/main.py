"""clusterd as a whole: journal, cluster, jobs and services on one port.

`serve` is the server inside another process, `taskd clusterd` (command.py) a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from taskd.bus.security import Tls, read_pem, server_credentials
from taskd.clusterd import cluster_metrics as metering
from taskd.clusterd.auth import Authority, Tokens
from taskd.clusterd.cluster.in_memory import InMemoryCluster
from taskd.clusterd.cluster.interface import Cluster
from taskd.clusterd.interceptors import JOB_RATE, STRANGER_RATE, AdmissionInterceptor, Rate
from taskd.clusterd.job_registry import JobRegistry, RegistryConfig
from taskd.clusterd.services.control_service import Control
from taskd.clusterd.services.profiling_service import Trace
from taskd.clusterd.services.recover_service import Recover
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.errors import SettingsError
from taskd.model.strategies import LADDER, Strategy
from taskd.runtime import metrics
from taskd.runtime.address import Address
from taskd.runtime.clock import Clock, monotonic, wall
from taskd.runtime.journal import Journal, JournalConfig
from taskd.wire._pb.control_pb2_grpc import add_ControlServicer_to_server
from taskd.wire._pb.profiling_pb2_grpc import add_TrainingDataTraceServicer_to_server
from taskd.wire._pb.recover_pb2_grpc import add_RecoverServicer_to_server

log = logging.getLogger(__name__)

OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.max_send_message_length", 8 * 1024 * 1024),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Known clients ping every 3 s, with and without calls.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 2_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Who connects and says nothing is not waited for.
    ("grpc.server_handshake_timeout_ms", 10_000),
)
GRACE_S = 1.0
ADD = (
    add_RecoverServicer_to_server,
    add_TrainingDataTraceServicer_to_server,
    add_ControlServicer_to_server,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    listen: str = "127.0.0.1:0"
    """host:port; port 0 takes a free one."""
    journal: Path | None = None
    """None: nothing outlives the process."""
    cluster_dir: Path | None = None
    """A directory of cluster objects; None: there is no cluster, jobs are declared."""
    tls: Tls | None = None
    tokens: Tokens | None = None
    """None: everybody who reaches the port may do everything."""
    strategies: tuple[Strategy, ...] | None = LADDER
    """For a job that nobody has declared, where there is no cluster; None: it is refused."""
    health: bool = False
    """Serve gRPC's standard health service, too."""
    metrics: str = ""
    """host:port where metrics are served for Prometheus; empty: nowhere."""
    max_jobs: int = 10_000
    inbox: int = 64
    signals: int = 64
    job_rate: Rate = JOB_RATE
    stranger_rate: Rate = STRANGER_RATE
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    history: JournalConfig = field(default_factory=JournalConfig)


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    jobs: JobRegistry
    journal: Journal
    grpc: aio.Server

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def steady_wall(
    wall_clock: Clock = wall, ticking: Clock = monotonic, not_before: float = 0.0
) -> Clock:
    """The time of day at the start, plus what has passed since.

    Deadlines in the journal must mean something to the next process, and must not jump when
    somebody sets the clock. `not_before` is the newest time in the journal: had the clock been set
    back while nobody ran, every wait would be longer by as much.
    """
    today = wall_clock()
    if today < not_before:
        log.warning(
            "the clock was set back by %.0f s; it is taken from the journal", not_before - today
        )
    offset = max(today, not_before) - ticking()
    return lambda: offset + ticking()


@asynccontextmanager
async def serve(config: ServerConfig) -> AsyncIterator[Server]:
    """Raises before anything is served if the journal, the cluster or the port cannot be had."""
    async with AsyncExitStack() as stack:
        journal = Journal(config.journal, config.history)
        stack.push_async_callback(journal.aclose)
        clock = steady_wall(not_before=await journal.newest())
        cluster = _cluster(config)
        await cluster.start()
        stack.push_async_callback(cluster.close)
        strategies = config.strategies if config.cluster_dir is None else None
        limits = RegistryConfig(
            max_jobs=config.max_jobs,
            strategies=strategies,
            inbox=config.inbox,
            signals=config.signals,
        )
        jobs = JobRegistry(journal, cluster, clock, limits, config.recovery)
        stack.push_async_callback(jobs.close)
        await jobs.start()
        trace = Trace(jobs, cluster, journal)
        await trace.start()
        authority = Authority(
            config.tokens, certificates=config.tls is not None and bool(config.tls.ca)
        )
        guard = AdmissionInterceptor(
            authority, jobs.is_served, clock, config.job_rate, config.stranger_rate
        )
        server = aio.server(interceptors=[guard], options=OPTIONS)
        _add_services(server, Recover(jobs), trace, Control(jobs, journal, authority))
        if config.health:
            await _add_health(server)
        port = _bind(server, config)
        await server.start()
        stack.push_async_callback(_stop, server, jobs, trace)
        if config.metrics:
            look = partial(metering.metrics, jobs)
            await stack.enter_async_context(metrics.serve(config.metrics, look))
        log.info("clusterd listens on port %d, %d jobs taken up", port, len(jobs.served))
        yield Server(port, jobs, journal, server)


async def _stop(server: aio.Server, jobs: JobRegistry, trace: Trace) -> None:
    """Take no new calls, end the streams, let the calls that run be answered."""
    stopping = asyncio.ensure_future(server.stop(GRACE_S))
    trace.close()
    await jobs.close()
    await stopping


def _add_services(server: aio.Server, *services: object) -> None:
    add: Any
    for service, add in zip(services, ADD, strict=True):
        add(service, server)


def _cluster(config: ServerConfig) -> Cluster:
    if config.cluster_dir is None:
        return InMemoryCluster()
    from taskd.clusterd.cluster.yaml_directory import YamlCluster

    return YamlCluster(config.cluster_dir)


def _bind(server: aio.Server, config: ServerConfig) -> int:
    address = Address.parse(config.listen)
    try:
        if config.tls is None:
            return server.add_insecure_port(str(address))
        return server.add_secure_port(str(address), _credentials(config.tls))
    except RuntimeError:
        raise SettingsError([f"cannot listen on {address}: {address.why_not()}"]) from None


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    """With an authority's certificate, clients must show one of theirs; without, only we do."""
    if tls.ca:
        return server_credentials(tls)
    key, crt = read_pem(("the key", tls.server_key), ("the certificate", tls.server_crt))
    return grpc.ssl_server_credentials([(key, crt)])


async def _add_health(server: aio.Server) -> None:
    try:
        from grpc_health.v1 import health_pb2, health_pb2_grpc
        from grpc_health.v1._async import HealthServicer
    except ImportError as error:
        raise SettingsError(
            ["the health service needs grpcio-health-checking: pip install 'taskd[server]'"]
        ) from error
    servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", "Recover", "TrainingDataTrace", "taskd.v1.Control"):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
