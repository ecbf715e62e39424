"""Hot switch: a pod on a sub-healthy device is moved before the device fails.

A backup pod is created, the job pauses, the old pod is removed, the job resumes in the backup. A
failure before the pause costs only the attempt; after the pause, the scheduler restarts the job.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.clusterd import signals
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.core.clusterd.job_facts import MASTER, Job
from taskd.core.clusterd.round.round_end import hand_over
from taskd.core.clusterd.round.round_start import new_incident
from taskd.core.clusterd.round.turn import Turn
from taskd.core.clusterd.states import (
    AwaitingBackup,
    AwaitingPause,
    AwaitingRemoval,
    HotSwitch,
    Idle,
    Migrating,
    Outcome,
)
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


def sub_healthy_pod(job: Job, now: float, config: RecoveryConfig) -> Pod | None:
    """The pod to move now, if any. Node 0 cannot move: the job depends on it."""
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
    turn = new_incident(job, now, config, f"pod {pod.name} must move before its device fails")
    order = signals.hot_switch(turn.job, turn.round, "hot switch", pod.ranks)
    annotations = (AnnotatePod(pod.uid, IN_FLOW, "true"), AnnotatePod(pod.uid, OPERATOR, "create"))
    deadline = now + config.backup_timeout_s
    return turn.go_to(
        AwaitingBackup(turn.job, turn.round, pod, order, deadline), order, *annotations
    )


def pods_changed(state: AwaitingBackup | AwaitingRemoval, turn: Turn) -> Outcome:
    state = replace(state, job=turn.job)
    here = {pod.uid for pod in turn.job.pods}
    match state:
        case AwaitingBackup() if state.pod.uid not in here:
            return expired(state, turn.with_reason("the sub-healthy pod has gone by itself"))
        case AwaitingBackup():
            backups = [pod for pod in turn.job.pods if pod.backup and pod.running]
            return _backup_runs(turn, state.pod, backups[0]) if backups else turn.go_to(state)
        case AwaitingRemoval() if state.pod.uid in here:
            return turn.go_to(state)
        case AwaitingRemoval():
            return _migrate(turn, state.pod, state.backup)


def _backup_runs(turn: Turn, pod: Pod, backup: Pod) -> Outcome:
    order = signals.hot_switch(turn.job, turn.round, "new pod running")
    deadline = turn.now + turn.config.strategy_timeout_s
    turn = turn.with_reason("the backup pod runs")
    state = AwaitingPause(turn.job, turn.round, pod, backup, order, deadline)
    return turn.go_to(state, order)


def strategies_reported(state: AwaitingPause, turn: Turn, event: StrategiesReport) -> Outcome:
    if set(event.strategies) <= {WireStrategy.EXIT}:
        return _stop_job(state, turn.with_reason("the job cannot move"))
    turn = turn.with_reason("the job has paused and can move").with_commands(
        AnnotatePod(state.pod.uid, SCHEDULER, "delete"),
        LabelPod(state.pod.uid, "fault-type", "SubHealth"),
    )
    deadline = turn.now + turn.config.removal_timeout_s
    waiting = AwaitingRemoval(turn.job, turn.round, state.pod, state.backup, deadline)
    return pods_changed(waiting, turn)


def _migrate(turn: Turn, pod: Pod, backup: Pod) -> Outcome:
    order = signals.migrate(turn.job, turn.round)
    deadline = turn.now + turn.config.status_timeout_s
    turn = turn.with_reason("the old pod has gone")
    return turn.go_to(Migrating(turn.job, turn.round, pod, backup, order, deadline), order)


def status_reported(state: Migrating, turn: Turn, event: ResultReport) -> Outcome:
    if event.code != RecoverCode.OK:
        return _stop_job(state, turn.with_reason(f"the job could not move ({event.code})"))
    promoted = turn.job.promoted | {state.backup.uid}
    turn = turn.with_reason(f"the job trains in {state.backup.name}").with_uuid_retired()
    turn = turn.with_job(promoted=promoted)
    return turn.go_to(Idle(turn.job), AnnotatePod(state.backup.uid, IN_FLOW, None))


def refused(state: AwaitingBackup, turn: Turn) -> Outcome:
    """The job's manager cannot move ranks. They train on, on the sub-healthy device."""
    again_at = turn.now + turn.config.hot_switch_refused_s
    turn = _call_off(state, turn.with_reason("the job cannot move"), again_at)
    return turn.go_to(Idle(turn.job))


def _call_off(state: AwaitingBackup, turn: Turn, again_at: float) -> Turn:
    turn = abandon_switch(state, turn)
    turn = turn.with_commands(signals.hot_switch(turn.job, turn.round, "stop switch"))
    return turn.with_uuid_retired().with_job(hot_switch_not_before=again_at)


def expired(state: HotSwitch, turn: Turn) -> Outcome:
    match state:
        case AwaitingBackup():
            again_at = turn.now + turn.config.hot_switch_again_after_s
            turn = _call_off(state, turn.with_reason("there is no backup pod"), again_at)
            return turn.go_to(Idle(turn.job, again_at))
        case AwaitingPause() | Migrating():
            turn = replace(turn, cause=RecoverCode.WaitReportTimeout)
            return _stop_job(state, turn.with_reason("the job did not answer in time"))
        case AwaitingRemoval():
            turn = replace(turn, cause=RecoverCode.ScheduleTimeout)
            return _stop_job(state, turn.with_reason("the old pod did not go in time"))


def _stop_job(state: HotSwitch, turn: Turn) -> Outcome:
    """The ranks are parked and cannot resume: the scheduler restarts the job by its first pod."""
    turn = abandon_switch(state, turn)
    if master := turn.job.pod_at(MASTER):
        turn = turn.with_commands(
            AnnotatePod(master.uid, SCHEDULER, "delete"),
            LabelPod(master.uid, "fault-type", "SubHealth"),
        )
    again_at = turn.now + turn.config.hot_switch_again_after_s
    turn = turn.with_job(hot_switch_not_before=again_at)
    return hand_over(turn, None, ResetOperation.CLEAR)


def abandon_switch(state: HotSwitch, turn: Turn) -> Turn:
    """Remove all annotations. A backup that has already replaced its pod stays."""
    backup = None if isinstance(state, AwaitingBackup) else state.backup
    if state.pod.uid in {pod.uid for pod in turn.job.pods}:
        for key in (IN_FLOW, "backupNewPodName", OPERATOR, SCHEDULER):
            turn = turn.with_commands(AnnotatePod(state.pod.uid, key, None))
        if backup is not None:
            turn = turn.with_commands(AnnotatePod(backup.uid, OPERATOR, "delete"))
    elif backup is not None:
        turn = turn.with_commands(AnnotatePod(backup.uid, IN_FLOW, None))
    return turn
