"""How a training process joins its job.

`init` decides how much there is to join: a job with a manager (resilient groups and a connection to
it), a job of another launcher (plain groups), or nothing. `job.py` is what the script gets.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from taskd import config
from taskd.bus.endpoint import BusConfig
from taskd.model.ids import Incarnation, NodeRank, Rank, worker
from taskd.model.worker import Identity
from taskd.torch import compat, dcp
from taskd.torch.context import JobContext
from taskd.torch.groups import resilient_group, transport
from taskd.torch.job import Job
from taskd.torch.operations import interfaces
from taskd.torch.operations.device_tests import StressSettings, StressTest
from taskd.torch.operations.nic_switch import Switcher
from taskd.torch.recovery import Recovery
from taskd.torch.startup import compile_cache
from taskd.torch.startup.setup_copies import SetupCopies
from taskd.torch.startup.start_mark import StartMark
from taskd.torch.state import link_encryption, sealed
from taskd.worker import bus_connection
from taskd.worker.manager_connection import ManagerConnection
from taskd.worker.operations.nic_order import NicSwitcher
from taskd.worker.operations.stress_order import StressTester
from taskd.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=30)
TAKE_DOWN_S = 5.0
"""How long the end of a process group may delay the end of the process."""


def init(
    backend: str | None = None,
    timeout: timedelta = TIMEOUT,
    device_id: torch.device | None = None,
) -> Job:
    """Join the job and initialise `torch.distributed`.

    Call it once, instead of `dist.init_process_group`, before any process group or DDP model is
    created. Under `taskd run`, or torchrun with TaskD's agent, the default group and all groups
    that are created from it are resilient: they survive the loss of a rank. Under any other
    launcher the script runs with torch's own groups, and without a launcher as a single process in
    a group of its own; faults are then not repaired, and nothing else changes.

    Args:
        backend: As in `dist.init_process_group`: "gloo", "nccl", "cpu:gloo,cuda:nccl" or a plugin
            such as "hccl". None: gloo for the CPU, and NCCL for CUDA where there is a GPU.
        timeout: As in `dist.init_process_group`. It limits collectives and the start; a lost rank
            is detected much earlier.
        device_id: The device that this process uses, which `dist.split_group` needs to know.

    Returns:
        The job. Call [`Job.protect`][taskd.torch.Job.protect] next.

    Raises:
        UnknownTorch: The installed torch lacks a name that TaskD relies on; the message gives the
            name and the supported versions.
        SettingsError: A `TASKD_*` variable has an invalid value, or a job of several nodes has no
            `TASKD_TOKEN`.

    Example:
        ```python
        import taskd.torch as taskd

        job = taskd.init("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = DDP(build_model().cuda())
        ```
    """
    settings = config.load(WorkerSettings)
    rank = int(config.environ.get("RANK", "0"))
    world_size = int(config.environ.get("WORLD_SIZE", "1"))
    if settings.proxy:
        compat.check_once()
    context = JobContext(settings, rank, world_size)
    recovery = None
    if settings.proxy:
        recovery = _join(context, backend, timeout, device_id)
    elif not dist.is_initialized():
        # One rank needs no address to meet others at, which there is not without a launcher.
        alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        where = alone if world_size == 1 else {}
        dist.init_process_group(backend, timeout=timeout, device_id=device_id, **where)
    return Job(context, recovery)


def _join(
    context: JobContext, backend: str | None, timeout: timedelta, device_id: torch.device | None
) -> Recovery:
    settings, groups = context.settings, context.groups
    sealed.check_key()
    if settings.encrypt_state:
        link_encryption.check_available()
    address = settings.store or "{MASTER_ADDR}:{MASTER_PORT}".format_map(dict(config.environ))
    attempt = config.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    start_mark = context.start_mark = StartMark(address, attempt)
    is_replacement = config.environ.get("RESTART_FAULT_PROCESS_TYPE") == "worker"
    joining = start_mark.is_set(is_expected=is_replacement)
    me = Identity(
        Rank(context.rank),
        NodeRank(settings.node_rank),
        Incarnation(settings.incarnation),
        os.getpid(),
    )
    manager = context.manager = ManagerConnection(
        settings, me, joining, groups.abort, context.copies.list_on_node
    )
    recovery = Recovery(context, manager, start_mark)
    compile_cache.prepare(joining)
    backends = transport.choose_backends(backend)
    resilient_group.register(groups, backends)
    dcp.support(groups)
    nics = interfaces.configure(settings)
    if nics.failover:
        nics.watch(context.on_fault)
    _register_operations(context, lambda: start_mark.address, backends)
    context.is_replacement = joining
    if joining:
        context.held_step = None
    else:
        context.position.forget_predecessor()
        context.turn_parts.forget_predecessor()
        context.kept_agreement.forget_predecessor()
        context.kept_seeds.forget_predecessor()
        context.copies.forget_predecessors()
        groups.form_all(settings.incident, address, f"start/{attempt}/", timeout)
        groups.open()
    if settings.store_moves:
        copies = _setup_copies(context, start_mark)
        groups.setup.copies = copies
        start_mark.publish = copies.publish
        if joining:
            copies.await_own(start_mark.store)
    groups.setup.start(start_mark.store, context.rank)
    dist.init_process_group(
        resilient_group.BACKEND,
        store=groups.store,
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
        device_id=device_id,
    )
    groups.world.bound_device_id = device_id
    if not joining:
        start_mark.arrive(context.rank, context.world_size)
    atexit.register(_take_down, context, os.getpid())
    return recovery


def _setup_copies(context: JobContext, start_mark: StartMark) -> SetupCopies:
    """With a copy of the results of a rank on the next node."""
    local_size = int(config.environ.get("LOCAL_WORLD_SIZE", "1"))
    peer = (context.rank + local_size) % context.world_size
    return SetupCopies(context.rank, peer, start_mark.connect)


def _take_down(context: JobContext, pid: int) -> None:
    """At the end of the process: as if the script had called `dist.destroy_process_group()`.

    A group that outlives the interpreter may abort the process: its threads still run when the
    interpreter is gone. Not after an error of the script: the peers must learn of this process's
    end from its exit code, not before it from closed connections.
    """
    if os.getpid() != pid or not context.is_over:
        return  # a child that the script has forked, or a script that has failed
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except (RuntimeError, ValueError, AssertionError) as error:
            log.debug("process groups were not destroyed: %s", error)
    transport.wait_for_discarded(TAKE_DOWN_S)


def _register_operations(
    context: JobContext, store: Callable[[], str], backends: dict[str, str]
) -> None:
    """Follow the manager's orders for stress tests and link switches from now on.

    They come over the connection to the manager, which exists already.
    """
    settings, rank = context.settings, context.rank
    test = StressTest(config.load(StressSettings, prefix="TASKD_STRESS"), store, backends)
    tester = StressTester(Rank(rank), test.operations())
    bus = BusConfig(me=worker(settings.node_rank, rank), upstream=settings.proxy)
    bus_connection.subscribe(tester, bus)
    switcher = Switcher(rank, store, backends, lambda: context.members)
    bus_connection.subscribe(NicSwitcher(switcher.switch), bus)
