"""`taskd run --witness`: a member of the job's etcd on a machine without ranks.

With it, two nodes have a majority when one of them is lost. It ends with the job.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from taskd.agent.run import etcd_choice, own_etcd
from taskd.agent.run.etcd_choice import WithoutEtcd
from taskd.agent.run.own_etcd import OwnEtcd
from taskd.agent.run.plan import Plan
from taskd.clusterd.etcd.etcd_client import EtcdClient
from taskd.clusterd.etcd.job_terms import JobTerms, job_prefix
from taskd.core.agent.machine import WorkersConfig
from taskd.core.record import StoreUnreachable
from taskd.errors import SettingsError
from taskd.runtime.clock import monotonic

LOOK_S = 1.0
GIVE_UP_S = WorkersConfig().order_timeout_s
"""How long etcd may not answer after the job has begun: as long as the other nodes wait for it."""
ORDER = 1_000
"""Nodes with ranks are preferred as members: they are there anyway."""


def witness(plan: Plan, folders: tuple[str, str], say: Callable[[str], None]) -> int:
    plan = replace(plan, node=plan.nodes + ORDER)
    found = etcd_choice.decide(plan, folders, "", first=False, say=say)
    if isinstance(found, WithoutEtcd):
        raise SettingsError(["--witness: the job has no etcd. Node 0 has said why at its start"])
    started = own_etcd.start(plan, found, say)
    if started.member is None:
        raise SettingsError(["--witness: this machine cannot run a member of etcd: see above"])
    say(f"witness of job {plan.job}: it ends with the job")
    return asyncio.run(_watch(plan, started, say))


async def _watch(plan: Plan, started: OwnEtcd, say: Callable[[str], None]) -> int:
    assert started.member is not None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (*plan.signals, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)
    keeping = asyncio.create_task(started.member.keep_running())
    try:
        say(await _until_over(plan, started, stop, keeping))
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await started.member.stop(0.0)
    return 0


async def _until_over(
    plan: Plan, started: OwnEtcd, stop: asyncio.Event, keeping: asyncio.Task[None]
) -> str:
    client = EtcdClient(started.access.addresses, started.access.settings)
    terms = JobTerms(client, job_prefix(plan.job, plan.token))
    answered, seen_a_leader = monotonic() + plan.join_timeout_s, False
    try:
        while not stop.is_set():
            if keeping.done():
                keeping.result()
            try:
                seen = await terms.look()
                await terms.look_elsewhere(plan.nodes)
                answered = monotonic()
                seen_a_leader = seen_a_leader or seen.term is not None
                if seen_a_leader and seen.term is None and seen.ended == seen.epoch:
                    return "done: the job has ended"
            except StoreUnreachable:
                if monotonic() - answered > GIVE_UP_S:
                    return f"no member of the job has answered for {GIVE_UP_S:.0f} s: it has ended"
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await stop.wait()
        return "stopped by a signal"
    finally:
        await client.close()
