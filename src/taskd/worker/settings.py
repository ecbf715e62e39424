"""What the agent tells a training process through its environment."""

from __future__ import annotations

from dataclasses import dataclass, field

from taskd.core.worker.machine import WorkerConfig

SWITCH = "/user/cluster-info/datatrace-config/profilingSwitch"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """Read from `TASKD_*`; torch's own RANK and WORLD_SIZE come from torchrun's variables."""

    proxy: str = ""
    """host:port of the node's proxy. Empty: there is no job to join."""

    job_id: str = ""
    """The job's name."""

    token: str = ""
    """The job's secret, shown to the proxy."""

    seal: str = ""
    """The key under which ranks seal the state that they give each other. Set by the agent."""

    node_rank: int = 0
    """The node that this process runs on."""

    incarnation: int = 0
    """Which life of its rank this process is."""

    incident: int = 0
    """The incident that it was started for; 0 at the job's first start."""

    store: str = ""
    """host:port of the store where the groups meet. Empty: MASTER_ADDR and MASTER_PORT."""

    nics: str = ""
    """The interfaces for this rank's groups, `PRIMARY,BACKUP`, each a name or, where NCCL needs
    one, `name:hca`. Empty: the backend chooses."""

    nic_failover: bool = False
    """Move to the other interface when no groups can be formed over the one in use."""

    nic_trial_s: float = 5.0
    """How long forming groups over an interface may take before it counts as dead."""

    beacon: str = ""
    """The file in shared memory where progress is shown. Empty: nowhere."""

    dump_dir: str = "taskd-dump"
    """Where the survivors of the last run have left their checkpoint, if they have."""

    rank: WorkerConfig = field(default_factory=WorkerConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilingSettings:
    """Read from `TASKD_PROFILING_*`."""

    dir: str = ""
    """Where records go. Empty: `/user/cluster-info/profiling` on an Ascend cluster, else
    `/tmp/taskd-<uid>/profiling`."""

    limit_mb: int = 5000
    """What all ranks of a node keep together; the oldest files make room for new ones."""

    save_s: float = 1.0
    """How often records go to disk and the pace is told, while recording."""

    probe: str = ""
    """The file in shared memory where the agent says what to record. Set by the agent."""

    switch: str = SWITCH
    """The file with Ascend's switch, which a worker looks at until it has found its manager."""

    mspti: str = ""
    """Ascend's profiling library. Empty: it is looked for in `LD_LIBRARY_PATH`, in the loader's
    cache and where CANN is installed; `off`: it is not used."""
