"""`taskd run` of several nodes with an etcd of its own: whether, where, and how to reach it.

Node 0 decides. The other nodes find out: they wait until node 0 serves either etcd or the manager's
port without it. A launcher that is started again joins the etcd of its running job, also on node 0
(`etcd_member/running_job.py`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from taskd.agent.etcd_member import etcd_binary, job_authority
from taskd.agent.etcd_member.etcd_binary import COST, NoEtcd
from taskd.agent.etcd_member.member_main import MemberTask
from taskd.agent.etcd_member.member_registry import MOST_CANDIDATES
from taskd.agent.etcd_member.running_job import RunningJob, still_runs
from taskd.agent.node_resources import SHARED_MEMORY
from taskd.agent.run.plan import MANAGER_PORT, Plan
from taskd.agent.run.supervisor import Supervisor
from taskd.agent.worker_environment import base_environment
from taskd.bus.liveness_port import own_address
from taskd.clusterd.etcd.etcd_settings import EtcdAccess, EtcdSettings
from taskd.clusterd.etcd.job_terms import job_prefix
from taskd.errors import SettingsError
from taskd.runtime.address import Address
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every

PORT_OFFSET = 2
"""The first node's etcd is at the manager's port plus this: 9603 by default."""
DATA_BYTES = 160 * 2**20
"""Two log files of 64 MB that etcd allocates at its start, and the job's state."""
LOOK_S = 0.2
ANSWER_S = 0.5


@dataclass(frozen=True, slots=True)
class OwnEtcd:
    access: EtcdAccess
    member: Supervisor | None
    """None: this node cannot run a member, and only uses the others'."""


def seed_of(plan: Plan) -> Address:
    """Where every node looks for the job's etcd at first."""
    return Address(plan.master_addr, (plan.manager_port or MANAGER_PORT) + PORT_OFFSET)


def start(
    plan: Plan, folders: tuple[str, str], *, first: bool, say: Callable[[str], None]
) -> OwnEtcd | None:
    """None: the job runs without it, and `say` has said why. Needs no event loop."""
    run_dir, shared = folders
    settings = etcd_binary.member_settings()
    binary = etcd_binary.find(settings, encrypted=bool(plan.token))
    if first and isinstance(binary, NoEtcd):
        raise SettingsError([f"--etcd own: {binary}. Without etcd, {COST}"])
    seed, at_home = seed_of(plan), first
    known = tuple(one for one in (settings.join, *RunningJob.of(plan.job).addresses()) if one)
    if not known and not first and not plan.witness and not _is_used(plan):
        return None
    folder = make_folder(settings.folder, shared, run_dir)
    certificate = _certificate(plan, seed, folder)
    access = _access(certificate, (str(seed),))
    prefix = job_prefix(plan.job, plan.token)
    if known:
        of_job = _access(certificate, known)
        if asyncio.run(still_runs(of_job, prefix, plan.join_timeout_s, say)):
            first, access = False, of_job
        elif not first and not plan.witness and not _is_used(plan):
            return None
    if isinstance(binary, NoEtcd):
        say(f"this node cannot keep a copy of the job's state: {binary}")
        return OwnEtcd(access, None)
    if not plan.spare and not plan.witness and plan.node >= MOST_CANDIDATES:
        return OwnEtcd(access, None)
    task = MemberTask(
        binary=binary.path,
        version=binary.version,
        job=plan.job,
        name="witness" if plan.witness else f"node{plan.node}",
        order=plan.node,
        first=first,
        home=str(seed),
        at_home=at_home,
        seeds=access.addresses,
        folder=str(folder),
        certificate=None if certificate is None else certificate.files,
    )
    env = {**base_environment(plan), "TASKD_TOKEN": plan.token}
    module = "taskd.agent.etcd_member.member_main"
    member = Supervisor("keeper of etcd", module, (task.to_json(),), env)
    member.start()
    return OwnEtcd(access, member)


def _certificate(plan: Plan, seed: Address, folder: Path) -> job_authority.Certificate | None:
    if not plan.token:
        return None
    try:
        # A connection to the first node may be forwarded to the member of any node.
        hosts = [own_address(seed), plan.master_addr]
        return job_authority.issue(plan.token, plan.job, hosts, folder)
    except OSError as error:
        raise SettingsError([f"{seed.host} cannot be reached: {error}"]) from error
    except ImportError as error:
        raise SettingsError(
            [
                "node 0 keeps the job's state in etcd, which needs certificates: install the "
                "library `cryptography` on every node (pip install 'taskd[secure]'), or start all "
                "nodes without `--etcd own`"
            ]
        ) from error


def _access(
    certificate: job_authority.Certificate | None, addresses: tuple[str, ...]
) -> EtcdAccess:
    settings = EtcdSettings() if certificate is None else certificate.client_settings()
    return EtcdAccess(addresses, replace(settings, follow_members=True))


def _is_used(plan: Plan) -> bool:
    """Whether node 0 serves etcd. Waits until it serves anything."""
    seed = seed_of(plan)
    manager = Address(plan.master_addr, seed.port - PORT_OFFSET)
    deadline = monotonic() + plan.join_timeout_s
    for _ in Tries(every(LOOK_S), deadline=deadline):
        serves_manager = _accepts(manager)
        if _accepts(seed):
            return True
        if serves_manager:
            return False
    return False


def _accepts(address: Address) -> bool:
    try:
        with socket.create_connection((address.host, address.port), ANSWER_S):
            return True
    except OSError:
        return False


def make_folder(chosen: str, shared: str, run_dir: str) -> Path:
    """In this launcher's shared memory if there is room, or in its temporary folder."""
    if chosen:
        os.makedirs(chosen, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="taskd-etcd-", dir=chosen))
    where = shared if shared.startswith(SHARED_MEMORY) and _free(shared) > DATA_BYTES else run_dir
    folder = Path(where) / "etcd"
    folder.mkdir(mode=0o700)
    return folder


def _free(path: str) -> int:
    there = os.statvfs(path)
    return there.f_bavail * there.f_frsize
