"""This node's part of the job's own etcd: its member, if it gets one, and the keeper of both."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

from taskd.agent.etcd_member.etcd_binary import EtcdBinary
from taskd.agent.etcd_member.home_address import forwarder, tell_first_node
from taskd.agent.etcd_member.job_authority import Certificate
from taskd.agent.etcd_member.member_keeper import KeeperConfig, MemberKeeper
from taskd.agent.etcd_member.member_process import MemberPlan, MemberProcess
from taskd.agent.etcd_member.member_registry import Registered
from taskd.bus.liveness_port import LivenessPort, own_address
from taskd.clusterd.etcd.etcd_settings import EtcdSettings
from taskd.errors import SettingsError
from taskd.runtime.address import Address, reserved_port
from taskd.runtime.files.private_files import write_private
from taskd.wire.json_reading import loads

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEtcdPlan:
    binary: EtcdBinary
    job: str
    name: str
    """Of this node, for people."""
    order: int
    """Nodes with lower numbers are preferred as members."""
    first: bool
    """This node starts the cluster, unless it has already been a member and was replaced."""
    home: Address
    """Where every node looks for the job's etcd at first."""
    at_home: bool
    """That address is this node's."""
    seeds: tuple[Address, ...]
    """Where other nodes reach the first members."""
    folder: Path
    """For etcd's data. Removed at the end."""
    certificate: Certificate | None
    """None: without encryption, as the whole job."""
    prefix: str
    """Of the keys that say who leads the job (`job_terms.py`)."""
    choice_key: str
    """Signs what the nodes say about the choice to use etcd (`choice_messages.py`)."""
    keeper: KeeperConfig = field(default_factory=KeeperConfig)


@asynccontextmanager
async def job_etcd(plan: JobEtcdPlan, say: Callable[[str], None]) -> AsyncIterator[MemberKeeper]:
    """Raises SettingsError if the first node's port is taken, or the seed is not reachable."""
    seed = plan.seeds[0]
    try:
        host = own_address(seed)
    except OSError as error:
        raise SettingsError([f"{seed.host} cannot be reached: {error}"]) from error
    port = await LivenessPort.open(str(seed))
    if port is None:
        raise SettingsError([f"this machine has no route to {seed.host}"])
    certificate = plan.certificate
    settings = EtcdSettings() if certificate is None else certificate.client_settings()
    made, kept = _member(plan, host)
    process = MemberProcess(made, plan.folder)
    member, first = process.plan, plan.first and not process.was_replaced
    keeper = MemberKeeper(
        me=Registered(member.name, plan.order, member.peer_url, member.client, port.address),
        process=process,
        first=first,
        seeds=(member.client if first else str(seed), *map(str, plan.seeds[1:])),
        settings=settings,
        config=plan.keeper,
        say=say,
    )
    async with AsyncExitStack() as stack:
        stack.callback(port.close)
        for one in kept:
            stack.enter_context(one)
        if plan.at_home:
            await _forward(plan, Address(host, plan.home.port), keeper, stack)
        stack.push_async_callback(keeper.close)
        stack.push_async_callback(keeper.leave)
        for work in (
            keeper.run(),
            tell_first_node(
                plan.home, settings, plan.prefix, plan.choice_key, lambda: keeper.leads
            ),
        ):
            stack.push_async_callback(_end, asyncio.create_task(work))
        yield keeper


async def _forward(
    plan: JobEtcdPlan, at: Address, keeper: MemberKeeper, stack: AsyncExitStack
) -> None:
    try:
        home = str(at), str(plan.home)

        def targets() -> tuple[str, ...]:
            return tuple(one for one in keeper.addresses if one not in home)

        serving = forwarder(at, targets, plan.choice_key, keeper.joined.is_set)
        await stack.enter_async_context(serving)
    except OSError as error:
        remedy = "Choose another --manager-port (etcd's is two higher)"
        problem = f"etcd cannot listen on {at}: {error.strerror}. {remedy}"
        if plan.first:
            raise SettingsError([problem]) from error
        log.warning("%s: new nodes may not find the job", problem)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _member(plan: JobEtcdPlan, host: str) -> tuple[MemberPlan, list[socket.socket]]:
    """The same as before if this process was started again: the data belongs to that member. With
    its ports, which nothing else may use while it starts, or is started again."""
    path = plan.folder / "identity.json"
    kept = []
    if path.exists():
        saved = loads(path.read_text())
        for port in (saved["client_port"], saved["peer_port"]):
            with suppress(OSError):  # its former process may still listen there
                kept.append(reserved_port(host, port))
    else:
        kept = [reserved_port(host), reserved_port(host)]
        client, peer = (one.getsockname()[1] for one in kept)
        saved = {
            "name": f"{plan.name}-{token_hex(4)}",
            "client_port": client,
            "peer_port": peer,
            "cluster_token": f"{plan.job}-{token_hex(8)}",
        }
        write_private(path, json.dumps(saved))
    made = MemberPlan(binary=plan.binary, host=host, certificate=plan.certificate, **saved)
    return made, kept
