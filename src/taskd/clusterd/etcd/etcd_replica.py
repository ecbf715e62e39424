"""One of several clusterds that share an etcd: waits until it leads, then has the journal."""

from __future__ import annotations

import logging
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from os import getpid
from secrets import token_hex

from taskd.clusterd.etcd.etcd_client import EtcdClient
from taskd.clusterd.etcd.etcd_errors import EtcdBusy, EtcdRefused, EtcdUnanswered
from taskd.clusterd.etcd.etcd_lease import EtcdLease
from taskd.clusterd.etcd.etcd_records import EtcdRecords
from taskd.clusterd.etcd.etcd_settings import EtcdSettings
from taskd.clusterd.leadership import Leadership
from taskd.clusterd.records.record_journal import RecordJournal
from taskd.core.election import Election, ElectionConfig
from taskd.errors import SettingsError
from taskd.runtime.clock import monotonic
from taskd.runtime.journal.journal_values import JournalConfig
from taskd.runtime.retry import Tries, every

log = logging.getLogger(__name__)

PREFIX = "/taskd/clusterd"
ELECTION = ElectionConfig(duration_s=5.0, give_up_s=3.5, period_s=0.5)
CALL_S = 1.0
RETRY_S, PATIENT_TRIES = 0.3, 20
"""An etcd that starts together with us is not reported at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdConfig:
    addresses: tuple[str, ...]
    prefix: str = PREFIX
    """Of all keys. clusterds with the same prefix elect one leader."""
    settings: EtcdSettings = field(default_factory=EtcdSettings)
    election: ElectionConfig = ELECTION


async def join(
    config: EtcdConfig, history: JournalConfig, stack: AsyncExitStack
) -> tuple[RecordJournal, Leadership]:
    """Wait until this process leads. The stack undoes everything in reverse order."""
    client = EtcdClient(config.addresses, config.settings, CALL_S)
    stack.push_async_callback(client.close)
    await check_version(client)
    log.info("etcd answers; waiting for the lease")
    identity = f"{socket.gethostname()}-{getpid()}-{token_hex(4)}"
    election = Election(identity, config.election)
    lease = EtcdLease(client, config.prefix, election)
    leadership = Leadership(lease, config.election.period_s, lambda: election.pause_s(monotonic()))
    stack.push_async_callback(leadership.close)
    epoch = await leadership.win()
    store = EtcdRecords(client, config.prefix, lease.is_ours)
    journal = RecordJournal(store, lease, epoch, leadership.lost.set, history, lease.acquire)
    stack.push_async_callback(journal.aclose)
    await journal.claim()
    for unreadable in store.unreadable:
        log.error("record %s cannot be read; its job must register again", unreadable)
    return journal, leadership


async def check_version(client: EtcdClient) -> None:
    """Raises SettingsError if etcd can be reached but not used."""
    problem = ""
    async for tries in Tries(every(RETRY_S)):
        try:
            await client.check_version()
            await client.range(PREFIX)
        except (EtcdUnanswered, EtcdBusy) as error:
            if tries > PATIENT_TRIES and str(error) != problem:
                problem = str(error)
                log.warning("%s; trying again. Is it running, and does it have a quorum?", problem)
        except EtcdRefused as error:
            raise SettingsError([str(error)]) from error
        else:
            return
