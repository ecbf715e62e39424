"""The clusterd server: journal, cluster, jobs and services on one port.

`serve` runs the server inside another process; `clusterd_command.py` makes a process of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from grpc import aio

from taskd.bus.late_reading import SMALL_BUFFERS
from taskd.bus.security import Tls, renewed_credentials, server_credentials
from taskd.clusterd import cluster_metrics
from taskd.clusterd.auth import Authority, TokenFile, Tokens
from taskd.clusterd.cluster.in_memory import InMemoryCluster
from taskd.clusterd.cluster.interface import Cluster
from taskd.clusterd.faults.cluster_info import ClusterInfo
from taskd.clusterd.faults.public_codes import PLACES, PublicCodeFile
from taskd.clusterd.interceptors import (
    JOB_RATE,
    LARGE_BYTES,
    UNKNOWN_CALLER_RATE,
    AdmissionInterceptor,
)
from taskd.clusterd.job_registry import JobRegistry, RegistryConfig
from taskd.clusterd.job_summaries import JobSummaries
from taskd.clusterd.leadership import Leadership
from taskd.clusterd.services.config_service import ConfigService
from taskd.clusterd.services.control_service import ControlService
from taskd.clusterd.services.fault_service import FaultService
from taskd.clusterd.services.job_service import JobService
from taskd.clusterd.services.profiling_service import ProfilingService
from taskd.clusterd.services.public_fault_service import PublicFaultService
from taskd.clusterd.services.recover_service import RecoverService
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.errors import SettingsError
from taskd.model.strategies import LADDER, Strategy
from taskd.runtime import metrics
from taskd.runtime.address import Address
from taskd.runtime.clock import Clock, monotonic, wall
from taskd.runtime.journal.journal import Journal
from taskd.runtime.journal.journal_values import JournalConfig
from taskd.runtime.limits import connection_limit
from taskd.runtime.limits.rate_limit import Rate
from taskd.wire._pb.config_pb2_grpc import add_ConfigServicer_to_server
from taskd.wire._pb.control_pb2_grpc import add_ControlServicer_to_server
from taskd.wire._pb.fault_pb2_grpc import add_FaultServicer_to_server
from taskd.wire._pb.job_pb2_grpc import add_JobServicer_to_server
from taskd.wire._pb.profiling_pb2_grpc import add_TrainingDataTraceServicer_to_server
from taskd.wire._pb.pubfault_pb2_grpc import add_PubFaultServicer_to_server
from taskd.wire._pb.recover_pb2_grpc import add_RecoverServicer_to_server

if TYPE_CHECKING:
    from taskd.clusterd.etcd.etcd_replica import EtcdConfig
    from taskd.clusterd.kubernetes.replica import KubernetesConfig

log = logging.getLogger(__name__)

OPTIONS = (
    *SMALL_BUFFERS,
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", LARGE_BYTES),
    ("grpc.max_send_message_length", 8 * 1024 * 1024),
    ("grpc.max_concurrent_streams", 100),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Known clients ping every 3 s, with and without calls.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 2_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A peer that connects and sends nothing, or that makes no call, is dropped.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
)
GRACE_S = 1.0
ADD = (
    add_RecoverServicer_to_server,
    add_TrainingDataTraceServicer_to_server,
    add_ControlServicer_to_server,
    add_PubFaultServicer_to_server,
    add_FaultServicer_to_server,
    add_JobServicer_to_server,
    add_ConfigServicer_to_server,
)
NAMES = (
    "Recover",
    "TrainingDataTrace",
    "taskd.v1.Control",
    "PubFault",
    "fault.Fault",
    "job.Job",
    "config.Config",
)
"""The services, for the health service."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    listen: str = "127.0.0.1:0"
    """host:port; port 0 takes a free one."""
    journal: Path | None = None
    """None: nothing outlives the process."""
    cluster_dir: Path | None = None
    """A directory of cluster objects; None: there is no cluster, jobs are declared."""
    etcd: EtcdConfig | None = None
    """The etcd that keeps the state of all jobs, shared with other clusterds."""
    kubernetes: KubernetesConfig | None = None
    """The Kubernetes cluster around this process, which also keeps the state of all jobs."""
    tls: Tls | None = None
    tokens: Tokens | TokenFile | None = None
    """None: every caller that reaches the port may do everything."""
    delete_pods: bool = False
    """Delete the pods that must be replaced, because no scheduler does."""
    public_codes: Path | None = None
    """Who may report public faults, and the level of each code; None: Ascend's usual places."""
    strategies: tuple[Strategy, ...] | None = LADDER
    """For a job without a declaration, if there is no cluster; None: it is refused."""
    health: bool = False
    """Also serve gRPC's standard health service."""
    metrics: str = ""
    """host:port on which metrics are served for Prometheus; empty: not served."""
    max_jobs: int = 10_000
    inbox: int = 64
    signals: int = 64
    job_rate: Rate = JOB_RATE
    unknown_caller_rate: Rate = UNKNOWN_CALLER_RATE
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    history: JournalConfig = field(default_factory=JournalConfig)


class WithStreams(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    jobs: JobRegistry
    journal: Journal
    grpc: aio.Server
    leadership: Leadership | None = None
    """None: this is the only server."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def steady_wall(
    wall_clock: Clock = wall, ticking: Clock = monotonic, not_before: float = 0.0
) -> Clock:
    """A clock: the time of day at the start, plus the monotonic time since.

    Deadlines in the journal must be valid for the next process, and must not jump when the clock of
    the machine is set. `not_before` is the newest time in the journal: if the clock was set
    back while no server ran, every wait would be longer by that amount.
    """
    started = wall_clock()
    if started < not_before:
        log.warning(
            "the clock was set back by %.0f s: continuing from the newest time in the journal",
            not_before - started,
        )
    offset = max(started, not_before) - ticking()
    return lambda: offset + ticking()


@asynccontextmanager
async def serve(config: ServerConfig, given: Journal | None = None) -> AsyncIterator[Server]:
    """Raises before serving anything if the journal, the cluster or the port is not available.

    `given`: the journal of the process around it, which also closes it.
    """
    async with AsyncExitStack() as stack:
        journal, cluster, leadership = await _state(config, given, stack)
        clock = steady_wall(not_before=await journal.newest())
        has_cluster = config.cluster_dir is not None or config.kubernetes is not None
        strategies = None if has_cluster else config.strategies
        limits = RegistryConfig(
            max_jobs=config.max_jobs,
            strategies=strategies,
            delete_pods=config.delete_pods,
            inbox=config.inbox,
            signals=config.signals,
        )
        jobs = JobRegistry(journal, cluster, clock, limits, config.recovery)
        stack.push_async_callback(jobs.close)
        await jobs.start()
        trace = ProfilingService(jobs, cluster, journal)
        await trace.start()
        authority = Authority(
            config.tokens, certificates=config.tls is not None and bool(config.tls.ca)
        )
        guard = AdmissionInterceptor(
            authority, jobs.is_served, clock, config.job_rate, config.unknown_caller_rate
        )
        server = aio.server(interceptors=[guard], options=OPTIONS)
        places = PLACES if config.public_codes is None else (config.public_codes,)
        codes = PublicCodeFile(places)
        public = PublicFaultService(jobs, cluster, journal, codes, clock)
        await public.start()
        stack.callback(public.close)
        summaries = JobSummaries(jobs, cluster, clock)
        cluster_info = ClusterInfo(jobs.faults, cluster)
        jobs.on_change.append(cluster_info.changed)
        if has_cluster:
            summaries.start()
            cluster_info.start()
        stack.push_async_callback(summaries.close)
        stack.push_async_callback(cluster_info.close)
        streams = (
            FaultService(jobs, cluster),
            JobService(summaries, clock),
            ConfigService(jobs, cluster),
        )
        control = ControlService(jobs, journal, authority)
        _add_services(server, RecoverService(jobs), trace, control, public, *streams)
        if config.health:
            await _add_health(server)
        port = _bind(server, config)
        await server.start()
        stack.push_async_callback(_stop, server, jobs, (trace, *streams))
        stack.callback(asyncio.create_task(connection_limit.watch()).cancel)
        stack.callback(asyncio.create_task(guard.refused.watch(port)).cancel)
        if config.metrics:
            collect = partial(cluster_metrics.metrics, jobs, cluster)
            await stack.enter_async_context(metrics.serve(config.metrics, collect))
        log.info("clusterd listens on port %d: jobs=%d", port, len(jobs.served))
        yield Server(port, jobs, journal, server, leadership)


async def _stop(server: aio.Server, jobs: JobRegistry, services: Sequence[WithStreams]) -> None:
    """Accept no new calls, end the streams, and let running calls finish."""
    stopping = asyncio.ensure_future(server.stop(GRACE_S))
    for service in services:
        service.close()
    await jobs.close()
    await stopping


def _add_services(server: aio.Server, *services: object) -> None:
    add: Any
    for service, add in zip(services, ADD, strict=True):
        add(service, server)


async def _state(
    config: ServerConfig, given: Journal | None, stack: AsyncExitStack
) -> tuple[Journal, Cluster, Leadership | None]:
    """The journal and the cluster. With Kubernetes or etcd: when this server leads."""
    if config.kubernetes is not None:
        from taskd.clusterd.kubernetes.replica import join

        return await join(config.kubernetes, config.history, stack)
    journal, leadership = (given, None) if given else await _journal(config, stack)
    cluster = _cluster(config)
    await cluster.start()
    stack.push_async_callback(cluster.close)
    return journal, cluster, leadership


async def _journal(
    config: ServerConfig, stack: AsyncExitStack
) -> tuple[Journal, Leadership | None]:
    if config.etcd is not None:
        from taskd.clusterd.etcd.etcd_replica import join

        return await join(config.etcd, config.history, stack)
    journal = Journal(config.journal, config.history)
    stack.push_async_callback(journal.aclose)
    return journal, None


def _cluster(config: ServerConfig) -> Cluster:
    if config.cluster_dir is None:
        return InMemoryCluster()
    from taskd.clusterd.cluster.yaml_directory import YamlCluster

    return YamlCluster(config.cluster_dir)


def _bind(server: aio.Server, config: ServerConfig) -> int:
    address = Address.parse(config.listen)
    for weakness in weaknesses(config):
        log.warning("%s", weakness)
    try:
        if config.tls is None:
            return server.add_insecure_port(str(address))
        return server.add_secure_port(str(address), _credentials(config.tls))
    except RuntimeError:
        raise SettingsError([f"cannot listen on {address}: {address.why_not()}"]) from None


def weaknesses(config: ServerConfig) -> list[str]:
    """What an attacker could use, in one sentence each."""
    found, tls = [], config.tls
    if tls is not None and tls.server_key:
        with suppress(OSError):  # reported when it is read
            if Path(tls.server_key).stat().st_mode & 0o077:
                found.append(f"key {tls.server_key} can be read by others: run chmod 600")
    if Address.parse(config.listen).is_loopback:
        return found
    if config.tokens is None and not (tls is not None and tls.ca):
        found.append(
            f"clusterd is open: every process that reaches {config.listen} may do everything with "
            "every job. Use --tokens or --tls-ca, or --listen 127.0.0.1:PORT"
        )
    if tls is None:
        what = "the traffic, with its tokens," if config.tokens is not None else "the traffic"
        found.append(f"clusterd has no TLS: {what} on {config.listen} can be read. Use --tls")
    return found


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    """With a CA, clients must present a certificate; without one, only the server does."""
    if tls.ca:
        return server_credentials(tls)
    return renewed_credentials(("the key", tls.server_key), ("the certificate", tls.server_crt))


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
    for name in ("", *NAMES):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
