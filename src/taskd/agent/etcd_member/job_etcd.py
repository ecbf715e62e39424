"""This node's part of the job's own etcd: its member, if it gets one, and the keeper of both."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

from taskd.agent.etcd_member.etcd_binary import EtcdBinary
from taskd.agent.etcd_member.job_authority import Certificate
from taskd.agent.etcd_member.member_keeper import KeeperConfig, MemberKeeper
from taskd.agent.etcd_member.member_process import MemberPlan, MemberProcess
from taskd.agent.etcd_member.member_registry import Registered
from taskd.bus.liveness_port import LivenessPort, own_address
from taskd.clusterd.etcd.etcd_settings import EtcdSettings
from taskd.errors import SettingsError
from taskd.runtime.address import Address, free_port
from taskd.runtime.files.private_files import write_private
from taskd.wire.json_reading import loads


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEtcdPlan:
    binary: EtcdBinary
    job: str
    name: str
    """Of this node, for people."""
    order: int
    """Nodes with lower numbers are preferred as members."""
    first: bool
    """This node starts the cluster, and listens at its first seed."""
    seeds: tuple[Address, ...]
    """Where clients reach the first members."""
    folder: Path
    """For etcd's data. Removed at the end."""
    certificate: Certificate | None
    """None: without encryption, as the whole job."""
    keeper: KeeperConfig = field(default_factory=KeeperConfig)


@asynccontextmanager
async def job_etcd(plan: JobEtcdPlan, say: Callable[[str], None]) -> AsyncIterator[MemberKeeper]:
    """Raises SettingsError if the first node's port is taken, or the seed is not reachable."""
    seed = plan.seeds[0]
    try:
        host = own_address(seed)
    except OSError as error:
        raise SettingsError([f"{seed.host} cannot be reached: {error}"]) from error
    if plan.first and _is_taken(own := Address(host, seed.port)):
        remedy = "Choose another --manager-port (etcd's is two higher)"
        raise SettingsError([f"etcd cannot listen on {own}: {own.why_not()}. {remedy}"])
    port = await LivenessPort.open(str(seed))
    if port is None:
        raise SettingsError([f"this machine has no route to {seed.host}"])
    certificate = plan.certificate
    member = _member(plan, host, seed.port)
    keeper = MemberKeeper(
        me=Registered(member.name, plan.order, member.peer_url, member.client, port.address),
        process=MemberProcess(member, plan.folder),
        first=plan.first,
        seeds=(member.client if plan.first else str(seed), *map(str, plan.seeds[1:])),
        settings=EtcdSettings() if certificate is None else certificate.client_settings(),
        config=plan.keeper,
        say=say,
    )
    running = asyncio.create_task(keeper.run(), name="members of etcd")
    try:
        yield keeper
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await keeper.leave()
        await keeper.close()
        port.close()


def _member(plan: JobEtcdPlan, host: str, first_port: int) -> MemberPlan:
    """The same as before if this process was started again: the data belongs to that member."""
    path = plan.folder / "identity.json"
    if not path.exists():
        identity = {
            "name": f"{plan.name}-{token_hex(4)}",
            "client_port": first_port if plan.first else free_port(),
            "peer_port": free_port(),
            "cluster_token": f"{plan.job}-{token_hex(8)}",
        }
        write_private(path, json.dumps(identity))
    saved = loads(path.read_text())
    return MemberPlan(binary=plan.binary, host=host, certificate=plan.certificate, **saved)


def _is_taken(address: Address) -> bool:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address.host, address.port))
        except OSError:
            return True
    return False
