"""Keeps a node of a job with etcd connected to the manager that leads, on whichever node it runs.

etcd reports each change of the leader. The node registers its liveness port there, once, so that a
new leader knows at once which nodes are gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from taskd.agent.node import NodeRun
from taskd.clusterd.etcd.etcd_client import EtcdClient
from taskd.clusterd.etcd.etcd_replica import check_version
from taskd.clusterd.etcd.etcd_settings import EtcdAccess
from taskd.clusterd.etcd.job_terms import JobTerms, job_prefix
from taskd.core.election import Term, old_backup
from taskd.core.record import StoreUnreachable
from taskd.errors import EtcdLostAtStart
from taskd.runtime.clock import monotonic

log = logging.getLogger(__name__)

RETRY_S = 0.5
LOOK_AT_START_S, UNANSWERED_S, LOST_AT_START_S = 1.0, 15.0, 30.0
"""How often etcd is looked at before ranks run, and how long it may be silent then: at first on the
node that starts it, and otherwise."""


@dataclass
class LeaderFollower:
    access: EtcdAccess
    node: NodeRun
    on_change: Callable[[Term], None]
    """Called with each new term."""
    term: Term | None = None
    """The newest one that was seen."""
    incidents: list[dict[str, Any]] = field(default_factory=list)
    """Of the whole job, as its leaders have saved them."""
    _client: EtcdClient | None = None

    @property
    def leads(self) -> bool:
        """Whether the manager of this node leads, as far as is known."""
        return self.term is not None and self.term.node == self.node.plan.node

    def manager_arguments(self) -> tuple[str, ...]:
        """What a manager that is started now must know, and its predecessor could not."""
        addresses = self._client.addresses if self._client else self.access.addresses
        epoch = self.term.epoch if self.term else 0
        return f"--etcd={','.join(addresses)}", f"--newest-epoch={epoch}"

    async def run(self) -> None:
        """Never returns. Raises SettingsError if etcd cannot be used, JobElsewhere if the job
        already runs with another one."""
        plan = self.node.plan
        client = self._client = EtcdClient(self.access.addresses, self.access.settings)
        changed, news, moved = asyncio.Event(), asyncio.Event(), asyncio.Event()
        try:
            await check_version(client)
            terms = JobTerms(client, job_prefix(plan.job, plan.token))
            watching = (
                asyncio.create_task(terms.follow(changed)),
                asyncio.create_task(terms.follow(news, terms.summary_key)),
                asyncio.create_task(terms.follow(moved, terms.elsewhere_key)),
            )
            try:
                await asyncio.gather(
                    self._register(terms),
                    self._follow(terms, changed),
                    self._follow_incidents(terms, news),
                    self._look_elsewhere(terms, moved),
                )
            finally:
                for task in watching:
                    task.cancel()
        finally:
            await client.close()

    async def _register(self, terms: JobTerms) -> None:
        await self.node.opened.wait()
        port = self.node.liveness_port
        while True:
            try:
                return await terms.register(self.node.plan.node, port.address if port else "")
            except StoreUnreachable as error:
                log.warning("%s; trying again", error)
                await asyncio.sleep(RETRY_S)

    async def _follow(self, terms: JobTerms, changed: asyncio.Event) -> None:
        problem = ""
        while True:
            changed.clear()
            try:
                seen = await terms.look()
                if self.term is not None and (old := old_backup(seen, self.term.epoch)):
                    raise StoreUnreachable(old.because)
                term, problem = seen.term, ""
            except StoreUnreachable as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("%s", problem)
                await asyncio.sleep(RETRY_S)
                continue
            if term is not None and (self.term is None or term.epoch > self.term.epoch):
                await self._join(term)
            await changed.wait()

    async def _follow_incidents(self, terms: JobTerms, news: asyncio.Event) -> None:
        while True:
            await news.wait()
            news.clear()
            try:
                # The end of the job removes them.
                self.incidents = await terms.incidents() or self.incidents
            except StoreUnreachable:
                await asyncio.sleep(RETRY_S)
                news.set()

    async def _look_elsewhere(self, terms: JobTerms, moved: asyncio.Event) -> None:
        while True:
            await moved.wait()
            moved.clear()
            try:
                await terms.look_elsewhere(self.node.plan.nodes)
            except StoreUnreachable:
                await asyncio.sleep(RETRY_S)
                moved.set()

    async def _join(self, term: Term) -> None:
        self.term = term
        await self.node.opened.wait()
        self.node.bus.fence.admits(term.epoch)
        await self.node.proxy.redirect(term.manager, term.run)
        self.on_change(term)


async def watch_start(
    access: EtcdAccess,
    prefix: str,
    begun: Callable[[], bool],
    starts: bool,
    unanswered_s: float = UNANSWERED_S,
    lost_s: float = LOST_AT_START_S,
) -> None:
    """Until ranks run on this node. Raises EtcdLostAtStart: it does not start; or its members are
    gone for good, because node 0 was lost before they had a majority without it. `starts`: this
    node has started it."""
    client, reached = EtcdClient(access.addresses, access.settings), monotonic()
    terms = JobTerms(client, prefix)
    try:
        while not begun():
            try:
                await terms.look()
                reached, starts = monotonic(), False
            except StoreUnreachable as error:
                silent_s = monotonic() - reached
                if silent_s > (unanswered_s if starts else lost_s) and not begun():
                    raise EtcdLostAtStart(
                        f"the job's etcd has not answered for {silent_s:.0f} s, and no rank has "
                        f"begun ({error})",
                        do_without=starts,
                    ) from None
            await asyncio.sleep(LOOK_AT_START_S)
    finally:
        await client.close()
