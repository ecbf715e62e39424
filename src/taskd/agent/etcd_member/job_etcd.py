"""The job's own etcd, as one launcher sees it: its member if it has one, and how to reach it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex

from taskd.agent.etcd_member import job_authority, member_process
from taskd.agent.etcd_member.etcd_binary import EtcdBinary, EtcdMemberSettings
from taskd.agent.etcd_member.member_keeper import KeeperConfig, MemberKeeper
from taskd.agent.etcd_member.member_process import MemberPlan, MemberProcess
from taskd.agent.etcd_member.member_registry import Registered
from taskd.agent.run.plan import free_port
from taskd.bus.liveness_port import LivenessPort, own_address
from taskd.clusterd.etcd.etcd_settings import EtcdSettings
from taskd.errors import SettingsError
from taskd.runtime.address import Address

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEtcdPlan:
    binary: EtcdBinary
    settings: EtcdMemberSettings
    job: str
    token: str
    """Empty: without encryption."""
    name: str
    """Of this node, for people."""
    order: int
    """Nodes with lower numbers are preferred as members."""
    first: bool
    """This node starts the cluster."""
    seed: Address
    """Where clients reach the member of the first node."""
    shared: str
    """This launcher's folder in shared memory."""
    run_dir: str
    keeper: KeeperConfig = field(default_factory=KeeperConfig)


@dataclass(frozen=True, slots=True)
class JobEtcd:
    keeper: MemberKeeper
    settings: EtcdSettings
    """For clients, also in other processes of this node: they find the members by themselves."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.keeper.addresses

    async def ready(self, timeout_s: float) -> bool:
        """Wait until etcd answers."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.keeper.joined.wait()
        except TimeoutError:
            return False
        return True


@asynccontextmanager
async def job_etcd(plan: JobEtcdPlan, say: Callable[[str], None]) -> AsyncIterator[JobEtcd]:
    """Run this node's part of it. Raises SettingsError if the first node's port is taken."""
    try:
        host = own_address(plan.seed)
    except OSError as error:
        raise SettingsError([f"{plan.seed.host} cannot be resolved: {error}"]) from error
    folder = member_process.make_folder(plan.settings, plan.shared, plan.run_dir)
    certificate = _certificate(plan, host, folder)
    settings = EtcdSettings() if certificate is None else certificate.client_settings()
    settings = replace(settings, follow_members=True)
    if plan.first and _is_taken(own := Address(host, plan.seed.port)):
        raise SettingsError([f"etcd cannot listen on {own}: {own.why_not()}"])
    port = await LivenessPort.open(str(plan.seed))
    if port is None:
        raise SettingsError([f"there is no way from this machine to {plan.seed.host}"])
    member = MemberPlan(
        binary=plan.binary,
        name=f"{plan.name}-{token_hex(4)}",
        host=host,
        listen_host=host,
        client_port=plan.seed.port if plan.first else free_port(),
        peer_port=free_port(),
        certificate=certificate,
        cluster_token=f"{plan.job}-{token_hex(8)}",
    )
    me = Registered(member.name, plan.order, member.peer_url, member.client, port.address)
    keeper = MemberKeeper(
        me=me,
        process=MemberProcess(member, folder),
        first=plan.first,
        seeds=(member.client if plan.first else str(plan.seed),),
        settings=replace(settings, follow_members=False),
        config=plan.keeper,
        say=say,
    )
    running = asyncio.create_task(keeper.run(), name="members of etcd")
    try:
        yield JobEtcd(keeper, settings)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await keeper.close()
        port.close()


def _certificate(plan: JobEtcdPlan, host: str, folder: Path) -> job_authority.Certificate | None:
    if not plan.token:
        return None
    hosts = [host, *([plan.seed.host] if plan.first else [])]
    return job_authority.issue(plan.token, plan.job, hosts, folder)


def _is_taken(address: Address) -> bool:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address.host, address.port))
        except OSError:
            return True
    return False
