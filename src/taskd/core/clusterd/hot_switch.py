"""Hot switch: a pod on an ailing device is moved before it fails.

A backup pod is made, the job pauses, the old pod goes, the job goes on in the backup. Until the
job has paused, a failure costs nothing but the attempt; after that the scheduler restarts the job.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.clusterd import signals
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.core.clusterd.job_facts import MASTER, Job
from taskd.core.clusterd.new_incident import new_incident
from taskd.core.clusterd.round_end import hand_over
from taskd.core.clusterd.states import (
    AwaitingBackup,
    AwaitingPause,
    AwaitingRemoval,
    HotSwitch,
    Idle,
    Migrating,
    Outcome,
)
from taskd.core.clusterd.turn import Matter
from taskd.model.clusterd import (
    AnnotatePod,
    LabelPod,
    Pod,
    ResetOperation,
    ResultReport,
    StrategiesReport,
)
from taskd.model.codes import RecoverCode
from taskd.model.strategies import WireStrategy

IN_FLOW = "inHotSwitchFlow"
OPERATOR, SCHEDULER = "needOperatorOpe", "needVolcanoOpe"


def ailing_pod(job: Job, now: float, config: RecoveryConfig) -> Pod | None:
    """The pod to move, if one is to be moved now. Node 0 cannot move: the job hangs on it."""
    if job.config.sub_health != "hotSwitch" or not (job.config.cluster and job.subscribed):
        return None
    if job.config.framework not in ("pytorch", "mindspore") or now < job.hot_switch_not_before:
        return None
    ranks = [seen.rank for seen in job.seen if seen.sub_healthy and not job.is_handled(seen)]
    nodes = job.nodes_of(ranks)
    if len(nodes) > config.max_hot_switch_pods:
        return None
    return next((job.pod_at(node) for node in nodes if node != MASTER), None)


def begin_switch(job: Job, pod: Pod, now: float, config: RecoveryConfig) -> Outcome:
    matter = new_incident(job, now, config, f"pod {pod.name} is to move before it fails")
    order = signals.hot_switch(matter.job, matter.round, "hot switch", pod.ranks)
    marks = (AnnotatePod(pod.uid, IN_FLOW, "true"), AnnotatePod(pod.uid, OPERATOR, "create"))
    deadline = now + config.backup_timeout_s
    return matter.to(AwaitingBackup(matter.job, matter.round, pod, order, deadline), order, *marks)


def pods_changed(state: AwaitingBackup | AwaitingRemoval, matter: Matter) -> Outcome:
    state = replace(state, job=matter.job)
    here = {pod.uid for pod in matter.job.pods}
    match state:
        case AwaitingBackup() if state.pod.uid not in here:
            return expired(state, matter.since("the ailing pod has gone by itself"))
        case AwaitingBackup():
            backups = [pod for pod in matter.job.pods if pod.backup and pod.running]
            return _backup_runs(matter, state.pod, backups[0]) if backups else matter.to(state)
        case AwaitingRemoval() if state.pod.uid in here:
            return matter.to(state)
        case AwaitingRemoval():
            return _migrate(matter, state.pod, state.backup)


def _backup_runs(matter: Matter, pod: Pod, backup: Pod) -> Outcome:
    order = signals.hot_switch(matter.job, matter.round, "new pod running")
    deadline = matter.now + matter.config.strategy_timeout_s
    matter = matter.since("the backup pod runs")
    state = AwaitingPause(matter.job, matter.round, pod, backup, order, deadline)
    return matter.to(state, order)


def strategies_reported(state: AwaitingPause, matter: Matter, event: StrategiesReport) -> Outcome:
    if set(event.strategies) <= {WireStrategy.EXIT}:
        return _stop_job(state, matter.since("the job cannot move"))
    matter = matter.since("the job has paused and can move").doing(
        AnnotatePod(state.pod.uid, SCHEDULER, "delete"),
        LabelPod(state.pod.uid, "fault-type", "SubHealth"),
    )
    deadline = matter.now + matter.config.removal_timeout_s
    waiting = AwaitingRemoval(matter.job, matter.round, state.pod, state.backup, deadline)
    return pods_changed(waiting, matter)


def _migrate(matter: Matter, pod: Pod, backup: Pod) -> Outcome:
    order = signals.migrate(matter.job, matter.round)
    deadline = matter.now + matter.config.status_timeout_s
    matter = matter.since("the old pod has gone")
    return matter.to(Migrating(matter.job, matter.round, pod, backup, order, deadline), order)


def status_reported(state: Migrating, matter: Matter, event: ResultReport) -> Outcome:
    if event.code != RecoverCode.OK:
        return _stop_job(state, matter.since(f"the job could not move ({event.code})"))
    promoted = matter.job.promoted | {state.backup.uid}
    matter = matter.since(f"the job trains in {state.backup.name}").retired()
    matter = matter.of_job(promoted=promoted)
    return matter.to(Idle(matter.job), AnnotatePod(state.backup.uid, IN_FLOW, None))


def expired(state: HotSwitch, matter: Matter) -> Outcome:
    match state:
        case AwaitingBackup():
            matter = abandon_switch(state, matter.since("no backup pod"))
            matter = matter.doing(signals.hot_switch(matter.job, matter.round, "stop switch"))
            again_at = matter.now + matter.config.hot_switch_again_after_s
            matter = matter.retired().of_job(hot_switch_not_before=again_at)
            return matter.to(Idle(matter.job, again_at))
        case AwaitingPause() | Migrating():
            matter = replace(matter, cause=RecoverCode.WaitReportTimeout)
            return _stop_job(state, matter.since("the job has not answered in time"))
        case AwaitingRemoval():
            matter = replace(matter, cause=RecoverCode.ScheduleTimeout)
            return _stop_job(state, matter.since("the old pod has not gone in time"))


def _stop_job(state: HotSwitch, matter: Matter) -> Outcome:
    """The ranks stand and cannot go on: the scheduler restarts the job by its first pod."""
    matter = abandon_switch(state, matter)
    if master := matter.job.pod_at(MASTER):
        matter = matter.doing(
            AnnotatePod(master.uid, SCHEDULER, "delete"),
            LabelPod(master.uid, "fault-type", "SubHealth"),
        )
    again_at = matter.now + matter.config.hot_switch_again_after_s
    matter = matter.of_job(hot_switch_not_before=again_at)
    return hand_over(matter, None, ResetOperation.CLEAR)


def abandon_switch(state: HotSwitch, matter: Matter) -> Matter:
    """Take back every mark. A backup that has already replaced its pod stays."""
    backup = None if isinstance(state, AwaitingBackup) else state.backup
    if state.pod.uid in {pod.uid for pod in matter.job.pods}:
        for key in (IN_FLOW, "backupNewPodName", OPERATOR, SCHEDULER):
            matter = matter.doing(AnnotatePod(state.pod.uid, key, None))
        if backup is not None:
            matter = matter.doing(AnnotatePod(backup.uid, OPERATOR, "delete"))
    elif backup is not None:
        matter = matter.doing(AnnotatePod(backup.uid, IN_FLOW, None))
    return matter
