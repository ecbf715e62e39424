"""The manager as one of several candidates: it waits until it leads, and stops when it does not.

Each node of a job with etcd has a manager process. One of them leads; the others wait here, with
everything imported, until etcd ends its term. `clusterd/etcd/job_lease.py` is the lease,
`core/election.py` the rules.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from taskd.bus import liveness_port
from taskd.bus.liveness_port import LivenessPort
from taskd.clusterd.etcd.etcd_client import EtcdClient
from taskd.clusterd.etcd.etcd_records import EtcdRecords
from taskd.clusterd.etcd.etcd_replica import check_version
from taskd.clusterd.etcd.etcd_settings import addresses, settings
from taskd.clusterd.etcd.job_lease import ANSWER_S, PERIOD_S, JobLease
from taskd.clusterd.etcd.job_terms import JobTerms, job_prefix
from taskd.clusterd.leadership import Leadership
from taskd.clusterd.records import journal_records
from taskd.clusterd.records.journal_records import PastRound
from taskd.clusterd.records.record_journal import RecordJournal
from taskd.core.election import Term
from taskd.core.record import StoreUnreachable
from taskd.manager.kept_incidents import KeptIncidents, with_rounds
from taskd.manager.settings import ManagerConfig
from taskd.model.ids import JobId, NodeRank
from taskd.model.manager import Event, NodeGone, NodeSilent, NodesRegistered
from taskd.runtime.journal.journal_values import JournalConfig
from taskd.wire.tagged_json import UnreadableRecord

log = logging.getLogger(__name__)

CALL_S = 1.0
MAX_CANDIDATES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTerm:
    """This process leads the job."""

    epoch: int
    lease: JobLease
    leadership: Leadership
    journal: RecordJournal
    incidents: KeptIncidents
    """Where the next leader finds them."""
    ports: dict[int, str]
    """The nodes that have registered, and the liveness ports of their agents."""
    earlier: list[Any] = field(default_factory=list)
    """The incidents of former leaders."""

    @property
    def leads(self) -> bool:
        """Asked before every action. The first False ends the term."""
        if not self.lease.held:
            self.leadership.lost.set()
        return not self.leadership.lost.is_set()

    async def find_lost_nodes(self, emit: Callable[[Event], None]) -> None:
        """Which nodes are gone, with their ranks? The others say hello by themselves."""
        emit(NodesRegistered(frozenset(map(NodeRank, self.ports)), self.epoch))
        await asyncio.gather(*(self._probe(node, port, emit) for node, port in self.ports.items()))
        await asyncio.Event().wait()

    async def _probe(self, node: int, port: str, emit: Callable[[Event], None]) -> None:
        answer = await liveness_port.is_open(port, ANSWER_S) if port else True
        if answer is False:
            emit(NodeGone(NodeRank(node), f"its agent has ended: its port {port} is closed"))
        elif answer is None:
            why = f"its machine does not answer at {port}, and it has not joined the new manager"
            emit(NodeSilent(NodeRank(node), why))

    async def end_job(self, incidents: list[Any]) -> None:
        """`incidents`: all of the job, for the nodes that are still there."""
        self.incidents.keep(incidents)
        await self.incidents.close()
        try:
            await self.lease.end_job()
        except StoreUnreachable as error:
            log.warning("the end of the job could not be written: %s", error)


async def lead(config: ManagerConfig, stack: AsyncExitStack) -> JobTerm:
    """Wait until this process leads. Raises SettingsError if etcd cannot be used."""
    client = EtcdClient(addresses(config.etcd), settings(), CALL_S)
    stack.push_async_callback(client.close)
    await check_version(client)
    prefix = job_prefix(config.job_id, config.token)
    terms = JobTerms(client, prefix)
    port = await LivenessPort.open(config.advertise, MAX_CANDIDATES)
    if port is not None:
        stack.callback(port.close)
    me = Term(config.newest_epoch, config.node, config.advertise, port.address if port else "")
    lease = JobLease(client, terms, me)
    leadership = Leadership(lease, PERIOD_S)
    stack.push_async_callback(leadership.close)
    epoch = await leadership.win()
    store = EtcdRecords(client, prefix, lease.is_ours)
    journal = RecordJournal(store, lease, epoch, leadership.lost.set, JournalConfig())
    stack.push_async_callback(journal.aclose)
    await journal.claim()
    ports = await terms.liveness_ports()
    rounds = await _past_rounds(journal, config.job_id)
    incidents = KeptIncidents(lease.save_summary)
    stack.push_async_callback(incidents.close)
    return JobTerm(
        epoch=epoch,
        lease=lease,
        leadership=leadership,
        journal=journal,
        incidents=incidents,
        ports=ports,
        earlier=with_rounds(await terms.incidents(), rounds),
    )


async def _past_rounds(journal: RecordJournal, job: str) -> tuple[PastRound, ...]:
    """What the embedded clusterd of this leader and of former ones has decided."""
    text = (await journal.records()).get(job)
    if text is None:
        return ()
    try:
        return journal_records.read(JobId(job), text, await journal.notes()).rounds
    except UnreadableRecord:
        return ()  # clusterd says so when it starts
