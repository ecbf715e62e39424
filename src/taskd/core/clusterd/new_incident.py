"""The one door into trouble: a new incident number, a new uuid, everything known carried over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from taskd.core.clusterd import signals
from taskd.core.clusterd.job_config import ON, RecoveryConfig
from taskd.core.clusterd.job_facts import Attempt, Job, Round, new_uuid
from taskd.core.clusterd.states import Outcome, PreExiting
from taskd.core.clusterd.stop_and_ask import open_round
from taskd.core.clusterd.turn import Matter
from taskd.model.clusterd import Command, LabelPod, LabelPodGroup
from taskd.model.faults import Fault, merge
from taskd.model.ids import Incident, NodeRank


def new_incident(
    job: Job, now: float, config: RecoveryConfig, because: str, before: Round | None = None
) -> Matter:
    """Fences off every answer to what was asked before."""
    incident = Incident(job.incident + 1)
    past = job.past if before is None else (*job.past, before.uuid)[-8:]
    job = replace(job, incident=incident, past=past, answered=())
    uuid = new_uuid(job, incident, 0, now)
    return Matter(job, Round(uuid=uuid, began=now, origin=job.origin), now, config, because)


def begin(
    job: Job,
    faults: Iterable[Fault],
    now: float,
    config: RecoveryConfig,
    because: str,
    *,
    before: Round | None = None,
    history: tuple[Attempt, ...] = (),
    commands: tuple[Command, ...] = (),
    told: bool = False,
    leave_first: bool = True,
    nic_failed: bool = False,
) -> Outcome:
    """`before` is the round that these faults break into; what it knew is still true.

    `told`: the ranks have been told to pause, if not to stop. `leave_first`: processes on a broken
    device may have to be told to leave it.
    """
    matter = new_incident(job, now, config, because, before).doing(*commands)
    faults = tuple(faults)
    if before is not None:
        origin = _origin(matter.job, before, faults)
        matter = matter.knowing(
            faults=before.faults, origin=origin, platform=before.platform, stopped=before.stopped
        )
    if told:
        matter = matter.knowing(stopped=True)
    known = matter.round.faults
    matter = matter.knowing(faults=merge(known, faults), history=history, nic_failed=nic_failed)
    matter = _mark_pods(matter, faults)
    if job.paused:
        matter = matter.doing(LabelPodGroup(ON, "on"))
    if leave_first and before is None and not told and _should_leave_first(matter):
        order = signals.pre_exit(matter.job, matter.round)
        deadline = now + config.pre_exit_timeout_s
        return matter.to(PreExiting(matter.job, matter.round, order, deadline), order)
    return open_round(matter)


def _origin(job: Job, before: Round, news: tuple[Fault, ...]) -> tuple[tuple[NodeRank, str], ...]:
    """A pod that has come during the trouble counts as new, unless the fault is in it."""
    hit = set(job.nodes_of(fault.rank for fault in news))
    here = {pod.node_rank: pod.uid for pod in job.members if pod.node_rank in hit}
    return tuple(sorted({**dict(before.origin), **here}.items()))


def _should_leave_first(matter: Matter) -> bool:
    """Only the cluster has seen it: the processes there may hang, and notice nothing."""
    faults = matter.round.faults
    known_to_client = any(not fault.hardware or fault.kind.retryable for fault in faults)
    return bool(faults) and matter.job.subscribed and not known_to_client


def _mark_pods(matter: Matter, faults: tuple[Fault, ...]) -> Matter:
    """So that the scheduler knows why these pods are in trouble."""
    soft = [fault for fault in faults if not fault.hardware]
    mark = "retry-fault" if all(fault.kind.retryable for fault in soft) else "software"
    nodes = matter.job.nodes_of(fault.rank for fault in soft)
    pods = [matter.job.pod_at(node) for node in nodes]
    return matter.in_cluster(
        *(LabelPod(pod.uid, "fault-type", mark) for pod in pods if pod is not None)
    )
