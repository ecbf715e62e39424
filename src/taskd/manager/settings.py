"""The settings of the manager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from taskd.bus.security import (
    ClusterdTlsSettings,
    Tls,
    clusterd_tls_from_environment,
    tls_from_environment,
    token_file_from_environment,
)
from taskd.config import environ
from taskd.core.manager.operation_progress import OperationsConfig
from taskd.core.manager.states import JobConfig
from taskd.core.manager.watch.silent_nodes import SilenceConfig
from taskd.core.manager.watch.stragglers import StragglerConfig
from taskd.core.manager.watch.wait_bounds import LivenessConfig
from taskd.model.strategies import Strategy
from taskd.worker.settings import SWITCH

PORT = 9601
EMBEDDED = "embedded"
"""Instead of clusterd's address: run clusterd inside the manager's process."""


def is_mindspore(environment: Mapping[str, str]) -> bool:
    """Ascend's operator sets this variable for MindSpore jobs only."""
    return bool(environment.get("MS_WORKER_NUM"))


def switch_file() -> str:
    return environ.get("TASKD_PROFILING_SWITCH", SWITCH)


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagerConfig:
    job_id: str
    """The job's name, the same for all its processes."""

    listen: str = f"127.0.0.1:{PORT}"
    """host:port for the nodes' proxies; port 0: any free port."""

    token: str = ""
    """The job's secret. Empty: peers are not authenticated."""

    token_file: str = field(default_factory=token_file_from_environment)
    """Secrets that the proxies of nodes present instead, from TASKD_BUS_TOKEN_FILE: one per line,
    read again when the file changes."""

    tls: Tls | None = field(default_factory=tls_from_environment)
    """Files for mutual TLS on the bus, from TASKD_TLS_CA and the other TASKD_TLS variables."""

    clusterd: str = ""
    """host:port of clusterd, several with commas or `embedded`. Empty: every fault ends the job."""

    clusterd_token: str = ""
    """The token that clusterd requires from this job's manager."""

    clusterd_token_file: str = ""
    """A file with that token. It is read for each call, so that the token can be renewed."""

    clusterd_tls: ClusterdTlsSettings = field(default_factory=clusterd_tls_from_environment)

    etcd: str = ""
    """host:port of etcd, several with commas. Then each node has a manager, and one leads."""

    node: int = 0
    """The node of this manager, among those that can lead."""

    newest_epoch: int = 0
    """The newest epoch that this node has seen: an etcd with an older one is not used."""

    advertise: str = ""
    """host:port where other nodes reach this manager, when it leads."""

    strategies: tuple[Strategy, ...] = ()
    """Strategies to declare to a clusterd that cannot read them from a cluster. Empty: all."""

    state_dir: Path | None = None
    """Directory for the journal of an embedded clusterd and for summary.json."""

    ready_file: Path | None = None
    """Written once the manager listens: its ports as JSON."""

    ready_fd: int | None = None
    """The same, written to this file descriptor inherited from the parent process."""

    plugin_dir: Path | None = None
    """Directory with plugins, as Python files."""

    rpc_timeout_s: float = 5.0
    """How long clusterd may take to answer one call."""

    silence_s: float = 20.0
    """Reconnect to clusterd when not even a keep-alive has come for this long."""

    node_silence_s: float = 3.0
    """How long a node may be disconnected before it counts as lost."""

    publish_s: float = 1.0
    """How often the ranks' steps are published to clusterd."""

    profiling_switch: str = field(default_factory=switch_file)
    """The file with Ascend's profiling switch; it need not exist."""

    liveness: LivenessConfig = field(default_factory=LivenessConfig)

    silence: SilenceConfig = field(default_factory=SilenceConfig)

    stragglers: StragglerConfig = field(default_factory=StragglerConfig)

    operations: OperationsConfig = field(default_factory=OperationsConfig)

    backup_nic: bool = True
    """False: the ranks have no second network interface; orders to switch links are refused."""

    precheck: bool = False
    """Stress-test all ranks after their first step."""

    metrics: str = ""
    """host:port of the Prometheus metrics endpoint; empty: none."""

    otlp: str = ""
    """Address of an OpenTelemetry collector that gets each incident as spans; empty: none."""

    show_incidents: bool = False
    """Write a line to standard error about each incident that is over, as `taskd run` does."""

    job: JobConfig = field(default_factory=JobConfig)
