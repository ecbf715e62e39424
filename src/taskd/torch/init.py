"""How a training process becomes part of its job.

`init` decides how much there is to join: a job of ours (resilient groups and a line to the
manager), some other launcher's (plain groups), or nothing at all. `job.py` is what the script gets.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from taskd import config
from taskd.model.ids import Incarnation, NodeRank, Rank
from taskd.model.worker import Identity
from taskd.torch import compat as seam
from taskd.torch.groups import resilient_group as group
from taskd.torch.groups import transport
from taskd.torch.job import Job
from taskd.torch.operations import interfaces as nic
from taskd.torch.operations import parked_operations as operations
from taskd.torch.recovery import Mending
from taskd.torch.start_mark import Begun
from taskd.worker.manager_connection import ManagerConnection
from taskd.worker.settings import WorkerSettings

TIMEOUT = timedelta(minutes=30)


def init(
    backend: str | None = None,
    timeout: timedelta = TIMEOUT,
    device_id: torch.device | None = None,
) -> Job:
    """Join the job. Without one, or without any launcher, training is simply not protected.

    `device_id`: the device that this process keeps to, which `dist.split_group` needs to know.
    """
    settings = config.load(WorkerSettings)
    rank = int(config.environ.get("RANK", "0"))
    world_size = int(config.environ.get("WORLD_SIZE", "1"))
    job = Job(settings, rank, world_size)
    if settings.proxy:
        _join(job, settings, backend, timeout, device_id)
    elif world_size > 1:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    return job


def _join(
    job: Job,
    settings: WorkerSettings,
    backend: str | None,
    timeout: timedelta,
    device_id: torch.device | None,
) -> None:
    seam.check()
    address = settings.store or "{MASTER_ADDR}:{MASTER_PORT}".format_map(dict(config.environ))
    attempt = config.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    begun = Begun(address, attempt)
    started_alone = config.environ.get("RESTART_FAULT_PROCESS_TYPE") == "worker"
    joining = begun.is_set(is_expected=started_alone)
    me = Identity(
        Rank(job.rank), NodeRank(settings.node_rank), Incarnation(settings.incarnation), os.getpid()
    )
    groups = job._groups
    job._link = ManagerConnection(settings, me, joining, groups.abort, job._copying.look)
    job._mending = Mending(job, job._link, begun)
    backends = transport.choose(backend)
    group.register(groups, backends)
    nics = nic.setup(settings)
    if nics.failover:
        nics.watch(job._on_fault)
    operations.offer(settings, job.rank, address, backends, lambda: job.members)
    if joining:
        job._holds = None
    else:
        groups.meet(settings.incident, address, f"start/{attempt}/", timeout)
        groups.open()
    groups.setup.begin(begun.store, job.rank)
    dist.init_process_group(
        group.BACKEND,
        store=groups.store,
        rank=job.rank,
        world_size=job.world_size,
        timeout=timeout,
        device_id=device_id,
    )
    groups.world.bound_device_id = device_id
    if not joining:
        begun.set()
