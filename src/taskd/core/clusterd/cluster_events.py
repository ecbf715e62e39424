"""Events from the cluster and the streams: pods, platform, writes, registration, subscription."""

from __future__ import annotations

from dataclasses import replace

from taskd.core.clusterd import decision, hot_switch
from taskd.core.clusterd.job_config import ON, RecoveryConfig
from taskd.core.clusterd.job_facts import Job, Succession
from taskd.core.clusterd.new_faults import faults_seen
from taskd.core.clusterd.round import repair_progress, round_end, round_start
from taskd.core.clusterd.round.operation_round import resume, stress_over
from taskd.core.clusterd.round.round_start import begin
from taskd.core.clusterd.round.turn import Turn
from taskd.core.clusterd.states import (
    Asking,
    AwaitingBackup,
    AwaitingPods,
    AwaitingRemoval,
    Ended,
    Exiting,
    HandedOver,
    Idle,
    Killing,
    Outcome,
    Pausing,
    PlatformChoosing,
    PlatformConfirming,
    PlatformRanking,
    Repairing,
    Replacing,
    Shrunk,
    State,
    StressTesting,
    SwitchingNic,
    Undecided,
)
from taskd.model.clusterd import (
    ClusterWriteDone,
    ClusterWriteFailed,
    Command,
    JobDeleted,
    JobRegistered,
    LabelPodGroup,
    PlatformSeen,
    PodsSeen,
    ResetOperation,
    SendStressRanks,
    SendSwitchRanks,
    SignalDelivered,
    SignalFailed,
    Stream,
    Subscribed,
    Unsubscribed,
)
from taskd.model.codes import RecoverCode
from taskd.model.faults import Fault
from taskd.model.ids import NodeRank


def pods_seen(state: State, event: PodsSeen, now: float, config: RecoveryConfig) -> Outcome:
    promoted = state.job.promoted & {pod.uid for pod in event.pods}
    pods = tuple(replace(pod, backup=False) if pod.uid in promoted else pod for pod in event.pods)
    held = {pod.node_rank: pod.ranks for pod in pods if pod.ranks and not pod.backup}
    places = {**state.job.places, **held}
    job = replace(state.job, pods=pods, promoted=promoted, phase=event.phase, places=places)
    job = replace(job, successions=_successions(job, now))
    state = replace(state, job=job)
    if isinstance(state, Idle | Ended):
        return Outcome(state)
    turn = Turn(job, state.round, now, config)
    if isinstance(state, Undecided | Repairing | Pausing | SwitchingNic | StressTesting) and (
        _all_new(state)
    ):
        return _restarted(state, turn)
    match state:
        case Replacing() | Shrunk():
            return repair_progress.pods_changed(state, turn)
        case AwaitingPods():
            return decision.pods_changed(state, turn)
        case AwaitingBackup() | AwaitingRemoval():
            return hot_switch.pods_changed(state, turn)
        case Exiting() if not decision.not_replaced(job, state.round):
            turn = replace(turn.with_reason("the lost pods are replaced"), cause=state.cause)
            return round_end.hand_over(turn, state.order, ResetOperation.RESTART_ALL)
        case HandedOver():
            return _watch_restart(state, turn)
        case _:
            return Outcome(state)


def _successions(job: Job, now: float) -> dict[NodeRank, Succession]:
    found = dict(job.successions)
    for pod in job.members:
        last = found.get(pod.node_rank)
        if last is None:
            found[pod.node_rank] = Succession(pod.uid)
        elif last.uid != pod.uid:
            found[pod.node_rank] = Succession(pod.uid, last.uid, now)
    return found


def _all_new(state: Undecided | Repairing | Pausing | SwitchingNic | StressTesting) -> bool:
    """All pods are new, although the round did not ask for all of them to be replaced."""
    origin, job = dict(state.round.origin), state.job
    here = {pod.node_rank: pod.uid for pod in job.members if pod.running and pod.ranks}
    known = state.round.doubted  # they were there when the round began
    new = {node for node, uid in origin.items() if here.get(node, uid) not in {uid, *known}}
    staying = set(origin) - state.round.leaving
    return bool(staying) and len(new) == len(origin)


def _restarted(
    state: Undecided | Repairing | Pausing | SwitchingNic | StressTesting, turn: Turn
) -> Outcome:
    """The scheduler has restarted the job by itself: the processes that we stopped are gone."""
    turn = turn.with_reason("all pods of the job are new")
    match state:
        case Pausing() | SwitchingNic() | StressTesting():
            text = f"{state.task.operation} failed, the job was restarted"
            return resume(stress_over(state, turn), state.task, text)
        case _:
            # The hardware faults of the old pods do not apply to the new ones.
            known = [Fault(fault.rank, fault.kind) for fault in turn.round.faults]
            before = replace(turn.round, faults=(), origin=turn.job.origin)
            now, config = turn.now, turn.config
            history = before.history
            return begin(turn.job, known, now, config, turn.because, before=before, history=history)


def _watch_restart(state: HandedOver, turn: Turn) -> Outcome:
    """Phase "Running" alone does not prove a restart. The job restarted if it was seen to stop, or
    if it received the order to exit and its lost pods are new: then the agents of the other pods
    have started their processes again."""
    phase = turn.job.phase
    state = replace(state, left_running=state.left_running or phase != "Running")
    replaced = not decision.not_replaced(turn.job, turn.round)
    moved = bool(turn.round.leaving) and replaced and state.order is None
    if phase == "Running" and (state.left_running or moved):
        return round_end.take_back(turn.with_reason("the scheduler has restarted the job"))
    return turn.go_to(state)


def platform_seen(state: State, event: PlatformSeen, now: float, config: RecoveryConfig) -> Outcome:
    state = replace(state, job=replace(state.job, platform=event))
    match state:
        case PlatformChoosing():
            return round_start.platform_changed(state, Turn(state.job, state.round, now, config))
        case PlatformConfirming():
            return round_start.confirmed(state, Turn(state.job, state.round, now, config))
        case PlatformRanking():
            return decision.ranked(state, Turn(state.job, state.round, now, config))
        case _:
            return Outcome(state)


def registration(state: State, event: JobRegistered | JobDeleted) -> Outcome:
    if isinstance(event, JobDeleted):
        return Outcome(Ended(state.job, None, RecoverCode.OK), because=event.because)
    seed = state.job.seed or event.seed
    job = replace(state.job, id=event.job, name=event.name, config=event.config, seed=seed)
    if isinstance(state, HandedOver):
        # The label `pause` is the scheduler's order to restart the job; it must stay for now.
        return Outcome(replace(state, job=job), because="registered again")
    label: tuple[Command, ...] = (LabelPodGroup(ON, "on"),) if job.config.cluster else ()
    if isinstance(state, Ended) and state.order is None:
        return Outcome(Idle(replace(job, pods=(), seen=())), label, "the job starts again")
    again = "registered again" if state.job.seed else "registered"
    return Outcome(replace(state, job=job), label, again)


def stream(
    state: State, event: Subscribed | Unsubscribed, now: float, config: RecoveryConfig
) -> Outcome:
    subscribed = isinstance(event, Subscribed)
    if event.stream is Stream.SIGNALS:
        state = replace(state, job=replace(state.job, subscribed=subscribed))
    if not subscribed:
        return Outcome(state, because="waiting for the client to subscribe again")
    match event.stream, state:
        case Stream.SIGNALS, Idle():
            return faults_seen(state, now, config)
        case Stream.NIC, SwitchingNic(task=task):
            again: Command = SendSwitchRanks(task.ranks, task.to_backup)
            return Outcome(state, (again,), "sent again to the new subscriber")
        case Stream.STRESS, StressTesting(task=task):
            return Outcome(state, (SendStressRanks(task.ops),), "sent again to the new subscriber")
        case Stream.SIGNALS, _ if isinstance(state, Asking) and state.order is not None:
            return Outcome(state, (state.order,), "sent again to the new subscriber")
        case _:
            return Outcome(state)


def delivery(
    state: State, event: SignalDelivered | SignalFailed, now: float, config: RecoveryConfig
) -> Outcome:
    if isinstance(event, SignalFailed):
        return Outcome(state, because="it will be sent again on the next subscription")
    match state:
        case Ended() | Exiting() | HandedOver() if (
            state.order is not None and state.order.sequence == event.sequence
        ):
            return Outcome(
                replace(state, order=None), because="the job has received the order to exit"
            )
        case Killing() if state.order.sequence == event.sequence:
            turn = Turn(state.job, state.round, now, config, "the job starts again")
            return round_end.killed(turn)
        case _:
            return Outcome(state)


def written(
    state: State, event: ClusterWriteDone | ClusterWriteFailed, now: float, config: RecoveryConfig
) -> Outcome:
    """Only the label `pause` matters to the machine; other failed writes are only logged."""
    failed = isinstance(event, ClusterWriteFailed)
    because = ""
    if isinstance(event, ClusterWriteFailed):
        because = f"a cluster write failed: {event.because}"
    if state.job.labelling is None or state.job.labelling.sequence != event.sequence:
        return Outcome(state, because=because)
    label = state.job.labelling.value
    paused = state.job.paused if failed else label == "pause"
    state = replace(state, job=replace(state.job, labelling=None, paused=paused))
    match state:
        case HandedOver() if failed and label == "pause":
            turn = Turn(state.job, state.round, now, config, because)
            return round_end.kill(turn, RecoverCode.OperatePodGroupError)
        case Idle() if paused:
            again_at = now + config.again_after_s
            return Outcome(replace(state, again_at=min(again_at, state.deadline)), (), because)
        case _:
            return Outcome(state, because=because)
