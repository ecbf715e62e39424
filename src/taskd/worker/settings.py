"""Settings that the agent passes to a training process through its environment."""

from __future__ import annotations

from dataclasses import dataclass, field

from taskd.core.worker.states import WorkerConfig

SWITCH = "/user/cluster-info/datatrace-config/profilingSwitch"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """Read from `TASKD_*`. RANK and WORLD_SIZE are read from torchrun's own variables."""

    proxy: str = ""
    """host:port of the node's proxy. Empty: the process does not join a job."""

    job_id: str = ""
    """The job's name."""

    token: str = ""
    """The job's secret, which the process presents to the proxy."""

    seal: str = ""
    """The key that signs the state that ranks send to each other. Set by the agent."""

    insecure: bool = False
    """The job has several nodes and no secret, and may unpickle what it cannot authenticate. Set by
    the agent (`taskd run --insecure`)."""

    encrypt_state: bool = False
    """Encrypt the state that ranks send to each other. Set by the agent
    (`taskd run --encrypt-state`)."""

    checkpoint_key: str = ""
    """The key that signs emergency checkpoints. Set by the agent if `TASKD_TOKEN` is set."""

    node_rank: int = 0
    """The node that this process runs on."""

    incarnation: int = 0
    """How many processes this rank had before this one."""

    incident: int = 0
    """The incident that this process was started for; 0 at the first start of the job."""

    store: str = ""
    """host:port of the rendezvous store for process groups. Empty: MASTER_ADDR and MASTER_PORT."""

    store_moves: bool = False
    """The store can be lost with its node, and another node serves the next one. Set by the agent
    (`taskd run --etcd`)."""

    nics: str = ""
    """The network interfaces for this rank's groups, `PRIMARY,BACKUP`: each a name or, where NCCL
    needs an adapter, `name:hca`. Empty: the backend chooses."""

    nic_failover: bool = False
    """Switch to the other interface when groups cannot be formed over the current one."""

    nic_trial_s: float = 5.0
    """How long forming groups over an interface may take before it counts as dead."""

    beacon: str = ""
    """The file in shared memory where this process publishes its progress. Empty: none."""

    dump_dir: str = "taskd-dump"
    """Where the checkpoints are from which the next start continues: emergency checkpoints of the
    survivors, and continuous ones."""

    checkpoint_every: int = 0
    """After how many steps the state is copied for a continuous checkpoint. 0: there are none. Set
    by the agent (`taskd run --checkpoint-every`)."""

    warm_device: bool = True
    """If all ranks of a node use one GPU, its standby makes itself ready on it, which takes half a
    gigabyte of its memory. It does not if less than a tenth of that memory is free."""

    rank: WorkerConfig = field(default_factory=WorkerConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilingSettings:
    """Read from `TASKD_PROFILING_*`."""

    dir: str = ""
    """Where records go. Empty: `/user/cluster-info/profiling` on an Ascend cluster, else
    `/tmp/taskd-<uid>/profiling`."""

    limit_mb: int = 5000
    """Size limit for the records of all ranks of a node; the oldest files are removed first."""

    save_s: float = 1.0
    """How often records are written and the pace is published, while recording."""

    probe: str = ""
    """The file in shared memory where the agent sets what to record. Set by the agent."""

    switch: str = SWITCH
    """Ascend's switch file, which a worker reads until it is connected to its manager."""

    mspti: str = ""
    """Path of Ascend's profiling library. Empty: search `LD_LIBRARY_PATH`, the loader's cache and
    CANN's folders; `off`: do not use it."""
