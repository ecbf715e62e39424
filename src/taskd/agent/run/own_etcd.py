"""This node's part of an etcd that `taskd run` starts: where its data is, and its process.

Whether the job has one is chosen before (`etcd_choice.py`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from taskd.agent.etcd_member import etcd_binary, job_authority
from taskd.agent.etcd_member.etcd_binary import EtcdBinary, EtcdMemberSettings, NoEtcd
from taskd.agent.etcd_member.member_main import MemberTask
from taskd.agent.etcd_member.member_registry import MOST_CANDIDATES
from taskd.agent.etcd_member.running_job import RunningJob
from taskd.agent.node_resources import SHARED_MEMORY
from taskd.agent.run.plan import MANAGER_PORT, Plan
from taskd.agent.run.supervisor import Supervisor
from taskd.agent.worker_environment import base_environment
from taskd.bus.liveness_port import own_address
from taskd.clusterd.etcd.etcd_settings import EtcdAccess, EtcdSettings
from taskd.errors import SettingsError
from taskd.runtime.address import Address

PORT_OFFSET = 2
"""The first node's etcd is at the manager's port plus this: 9603 by default."""
DATA_BYTES = 160 * 2**20
"""Two log files of 64 MB that etcd allocates at its start, and the job's state."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WithEtcd:
    """The job uses an etcd of its own: what this node needs for it."""

    access: EtcdAccess
    certificate: job_authority.Certificate | None
    folder: Path
    binary: EtcdBinary | NoEtcd
    first: bool
    """Whether this node starts it."""
    at_home: bool
    """Whether all nodes look for it on this one."""


@dataclass(frozen=True, slots=True)
class OwnEtcd:
    access: EtcdAccess
    member: Supervisor | None
    """None: this node cannot run a member, and only uses the others'."""
    first: bool = False
    """Whether this node starts it."""


def home_of(plan: Plan) -> Address:
    """Where every node looks for the job's etcd at first."""
    return Address(plan.master_addr, (plan.manager_port or MANAGER_PORT) + PORT_OFFSET)


def remember(plan: Plan, members: tuple[str, ...]) -> None:
    """The next launcher on this machine joins the job there."""
    RunningJob.of(plan.job, str(home_of(plan))).save(members)


def files_of(
    plan: Plan, folders: tuple[str, str], settings: EtcdMemberSettings
) -> tuple[Path, job_authority.Certificate | None]:
    run_dir, shared = folders
    folder = make_folder(settings.folder, shared, run_dir)
    return folder, _certificate(plan, home_of(plan), folder)


def access_to(
    certificate: job_authority.Certificate | None, addresses: tuple[str, ...]
) -> EtcdAccess:
    settings = EtcdSettings() if certificate is None else certificate.client_settings()
    return EtcdAccess(addresses, replace(settings, follow_members=True))


def start(plan: Plan, found: WithEtcd, say: Say) -> OwnEtcd:
    """Once the node's rank is known. Needs no event loop."""
    binary, access = found.binary, found.access
    if isinstance(binary, NoEtcd):
        say(f"this node cannot keep a copy of the job's state: {binary}")
        return OwnEtcd(access, None)
    if _is_far_back(plan):
        return OwnEtcd(access, None)
    task = MemberTask(
        binary=binary.path,
        version=binary.version,
        job=plan.job,
        name="witness" if plan.witness else f"node{plan.node}",
        order=plan.node,
        first=found.first,
        home=str(home_of(plan)),
        at_home=found.at_home,
        seeds=access.addresses,
        folder=str(found.folder),
        certificate=None if found.certificate is None else found.certificate.files,
    )
    env = {**base_environment(plan), "TASKD_TOKEN": plan.token}
    module = "taskd.agent.etcd_member.member_main"
    member = Supervisor("keeper of etcd", module, (task.to_json(),), env)
    member.start()
    return OwnEtcd(access, member, found.first)


def _certificate(plan: Plan, home: Address, folder: Path) -> job_authority.Certificate | None:
    if not plan.token:
        return None
    try:
        # A connection to the first node may be forwarded to the member of any node.
        hosts = [own_address(home), plan.master_addr]
        return job_authority.issue(plan.token, plan.job, hosts, folder)
    except OSError as error:
        raise SettingsError([f"{home.host} cannot be reached: {error}"]) from error
    except ImportError as error:
        raise SettingsError([f"--etcd own: {etcd_binary.no_certificates()}"]) from error


def make_folder(chosen: str, shared: str, run_dir: str) -> Path:
    """In this launcher's shared memory if there is room, or in its temporary folder."""
    if chosen:
        os.makedirs(chosen, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="taskd-etcd-", dir=chosen))
    folder = Path(_roomy(shared, run_dir)) / "etcd"
    folder.mkdir(mode=0o700)
    return folder


def _roomy(shared: str, run_dir: str) -> str:
    return shared if shared.startswith(SHARED_MEMORY) and _free(shared) > DATA_BYTES else run_dir


def _free(path: str) -> int:
    there = os.statvfs(path)
    return there.f_bavail * there.f_frsize


def why_no_member(
    plan: Plan, folders: tuple[str, str], settings: EtcdMemberSettings, binary: EtcdBinary | NoEtcd
) -> str:
    if isinstance(binary, NoEtcd):
        return str(binary)
    if _is_far_back(plan):
        return f"of the regular nodes, only the first {MOST_CANDIDATES} keep one"
    run_dir, shared = folders
    where = Path(settings.folder or _roomy(shared, run_dir)).absolute()
    free = _free(next(str(one) for one in (where, *where.parents) if one.exists()))
    if free > DATA_BYTES:
        return ""
    return (
        f"{where} has {free // 2**20} MiB free, and etcd needs {DATA_BYTES // 2**20} MiB. Set "
        "TASKD_ETCD_MEMBER_FOLDER to another folder"
    )


def _is_far_back(plan: Plan) -> bool:
    regular = not plan.spare and not plan.witness and not plan.draws_rank
    return regular and plan.node >= MOST_CANDIDATES
