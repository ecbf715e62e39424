"""One replica of clusterd in Kubernetes: follows the cluster, and waits until it leads.

All replicas watch the cluster, so that the next leader need not list it first. The leader labels
its own pod; the Service selects that label.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from secrets import token_hex

from taskd.clusterd.kubernetes.api_client import from_environment
from taskd.clusterd.kubernetes.cluster import KubernetesCluster
from taskd.clusterd.kubernetes.lease import KubernetesLease
from taskd.clusterd.kubernetes.record_store import ConfigMapRecords
from taskd.clusterd.kubernetes.role_label import RoleLabel
from taskd.clusterd.leadership import Leadership
from taskd.clusterd.records.record_journal import RecordJournal
from taskd.core.election import Election, ElectionConfig
from taskd.runtime import probes
from taskd.runtime.clock import monotonic
from taskd.runtime.journal.journal_values import JournalConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesConfig:
    namespace: str = "mindx-dl"
    """Where the records, the lease and the replicas are."""
    pod: str = ""
    """The pod of this replica, which is labelled while it leads; empty: no pod is labelled."""
    probes: str = ""
    """host:port on which /healthz and /readyz are served; empty: not served."""
    election: ElectionConfig = field(default_factory=ElectionConfig)


async def join(
    config: KubernetesConfig, history: JournalConfig, stack: AsyncExitStack
) -> tuple[RecordJournal, KubernetesCluster, Leadership]:
    """Wait until this replica leads. The stack undoes everything in reverse order."""
    api = from_environment()
    stack.push_async_callback(api.close)
    cluster = KubernetesCluster(api, Random())
    label = RoleLabel(api, config.namespace, config.pod, config.election.period_s)
    stack.push_async_callback(label.close)
    if config.probes:
        # Not ready with the label of an earlier incarnation: the Service would select this pod.
        ready = probes.serve(config.probes, lambda: cluster.synced and label.current)
        await stack.enter_async_context(ready)
    await cluster.start()
    stack.push_async_callback(cluster.close)
    log.info("in sync with the cluster; waiting for the lease")
    election = Election(f"{config.pod or 'clusterd'}_{token_hex(4)}", config.election)
    lease = KubernetesLease(api, config.namespace, election)
    leadership = Leadership(lease, config.election.period_s, lambda: election.pause_s(monotonic()))
    stack.push_async_callback(leadership.close)
    epoch = await leadership.win()
    store = ConfigMapRecords(api, config.namespace)
    journal = RecordJournal(store, lease, epoch, leadership.lost.set, history, lease.acquire)
    stack.push_async_callback(journal.aclose)
    await journal.claim()
    for unreadable in store.unreadable:
        log.error("record %s cannot be read; its job must register again", unreadable)
    label.lead()
    stack.push_async_callback(label.close)  # before the lease is given back
    return journal, cluster, leadership
