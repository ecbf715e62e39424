"""What the manager of one job needs to know when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from taskd.bus.clusterd_tls import ClusterdTlsSettings, from_environment
from taskd.bus.security import Tls, tls_from_environment
from taskd.config import environ
from taskd.core.manager.hung_ranks import LivenessConfig
from taskd.core.manager.operation_progress import OperationsConfig
from taskd.core.manager.silent_nodes import SilenceConfig
from taskd.core.manager.states import JobConfig
from taskd.core.manager.stragglers import StragglerConfig
from taskd.worker.settings import SWITCH

PORT = 9601
EMBEDDED = "embedded"
"""In place of clusterd's address: run it in the manager's own process."""


def switch_file() -> str:
    return environ.get("TASKD_PROFILING_SWITCH", SWITCH)


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagerConfig:
    job_id: str
    """The job's name, the same for all its processes."""

    listen: str = f"127.0.0.1:{PORT}"
    """host:port for the nodes' proxies; port 0 takes a free one."""

    token: str = ""
    """The job's secret. Empty: peers are not checked."""

    tls: Tls | None = field(default_factory=tls_from_environment)
    """Files for mutual TLS on the bus, from TASKD_TLS_CA and its like."""

    clusterd: str = ""
    """host:port of clusterd, or `embedded`. Empty: there is none, and faults end the job."""

    clusterd_token: str = ""
    """What clusterd asks of this job's manager."""

    clusterd_tls: ClusterdTlsSettings = field(default_factory=from_environment)

    strategies: tuple[str, ...] = ()
    """Declared to a clusterd that has no cluster to read them from. Empty: all of them."""

    state_dir: Path | None = None
    """Where an embedded clusterd keeps its journal, and where summary.json is written."""

    ready_file: Path | None = None
    """Written once the manager listens: its ports as JSON."""

    ready_fd: int | None = None
    """Or told through this descriptor, inherited from whoever started us."""

    plugin_dir: Path | None = None
    """Python files with plugins."""

    rpc_timeout_s: float = 5.0
    """How long clusterd may take to answer one call."""

    silence_s: float = 20.0
    """Without even a keep-alive for this long, clusterd is called anew."""

    node_silence_s: float = 3.0
    """How long a node may be without a link before it counts as lost."""

    publish_s: float = 1.0
    """How often clusterd is told which steps the ranks have done."""

    profiling_switch: str = field(default_factory=switch_file)
    """The file with Ascend's switch of profiling; it need not exist."""

    liveness: LivenessConfig = field(default_factory=LivenessConfig)

    silence: SilenceConfig = field(default_factory=SilenceConfig)

    stragglers: StragglerConfig = field(default_factory=StragglerConfig)

    operations: OperationsConfig = field(default_factory=OperationsConfig)

    precheck: bool = False
    """Stress-test every rank once it has done its first step."""

    metrics: str = ""
    """host:port where metrics are served for Prometheus; empty: nowhere."""

    job: JobConfig = field(default_factory=JobConfig)
