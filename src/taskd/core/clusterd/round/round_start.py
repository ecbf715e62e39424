"""The start of a round: new incident, stop, settle, confirm, and the question to the job.

`new_faults.py` starts the round; `decision.py` handles the job's answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from taskd.core.clusterd import platform, signals
from taskd.core.clusterd.job_config import ON, RecoveryConfig
from taskd.core.clusterd.job_facts import Attempt, Job, Round, new_uuid
from taskd.core.clusterd.round.round_end import give_up, kill
from taskd.core.clusterd.round.turn import Turn
from taskd.core.clusterd.states import (
    Dumping,
    Negotiating,
    Outcome,
    PlatformChoosing,
    PlatformConfirming,
    PreExiting,
    Settling,
    Stopping,
)
from taskd.model.clusterd import (
    Command,
    LabelPod,
    LabelPodGroup,
    ResetOperation,
    StopReport,
    WriteFaultJobInfo,
    WriteResetConfig,
)
from taskd.model.codes import RecoverCode
from taskd.model.faults import Fault, FaultKind, merge
from taskd.model.ids import Incident, NodeRank
from taskd.model.strategies import Strategy, WireStrategy


def new_incident(
    job: Job, now: float, config: RecoveryConfig, because: str, before: Round | None = None
) -> Turn:
    """A new number and a new uuid: answers to earlier orders no longer count."""
    incident = Incident(job.incident + 1)
    past = job.past if before is None else (*job.past, before.uuid)[-8:]
    job = replace(job, incident=incident, past=past, answered=())
    uuid = new_uuid(job, incident, 0, now)
    return Turn(job, Round(uuid=uuid, began=now, origin=job.origin), now, config, because)


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
    stopped: bool = False,
    leave_first: bool = True,
    nic_failed: bool = False,
) -> Outcome:
    """Start an incident with these faults.

    `before` is the round that they interrupt; what it knew is kept. `stopped`: the ranks were
    already ordered to pause or stop. `leave_first`: processes on a broken device may have to exit
    first.
    """
    turn = new_incident(job, now, config, because, before).with_commands(*commands)
    faults = tuple(faults)
    if before is None:
        origin, doubted = _origin(turn.job, _before_replacements(turn, faults), faults)
        turn = turn.with_round(origin=origin, doubted=doubted)
    else:
        origin, doubted = _origin(turn.job, before, faults)
        turn = turn.with_round(
            faults=before.faults,
            origin=origin,
            doubted=doubted,
            platform=before.platform,
            stopped=before.stopped,
        )
    if stopped:
        turn = turn.with_round(stopped=True)
    known = turn.round.faults
    turn = turn.with_round(faults=merge(known, faults), history=history, nic_failed=nic_failed)
    turn = _label_pods(turn, faults)
    if job.paused:
        turn = turn.with_commands(LabelPodGroup(ON, "on"))
    if leave_first and before is None and not stopped and _should_leave_first(turn):
        order = signals.pre_exit(turn.job, turn.round)
        deadline = now + config.pre_exit_timeout_s
        return turn.go_to(PreExiting(turn.job, turn.round, order, deadline), order)
    return open_round(turn)


def absorb(state: Stopping, turn: Turn, faults: tuple[Fault, ...]) -> Outcome:
    """Add faults of further ranks to a round whose stop is not complete: the order stays."""
    origin, doubted = _origin(turn.job, turn.round, faults)
    merged = merge(turn.round.faults, faults)
    turn = turn.with_round(faults=merged, origin=origin, doubted=doubted)
    turn = _label_pods(turn, faults)
    return turn.go_to(replace(state, job=turn.job, round=turn.round))


def _before_replacements(turn: Turn, faults: tuple[Fault, ...]) -> Round:
    """As if the pods of these nodes that have just come were not there yet."""
    origin, began = dict(turn.round.origin), turn.now - turn.config.late_report_s
    for node in turn.job.nodes_of(fault.rank for fault in faults):
        found = turn.job.successions.get(node)
        if found is not None and found.before and node in origin and found.since > began:
            origin[node] = found.before
    return replace(turn.round, origin=tuple(sorted(origin.items())))


def _origin(
    job: Job, before: Round, new_faults: tuple[Fault, ...]
) -> tuple[tuple[tuple[NodeRank, str], ...], frozenset[str]]:
    """The pods that count as old, and the replacements that a report was not held against.

    A pod that came during the earlier round, or just before this one, counts as new, unless its
    device is broken or the job reports its ranks twice. The first report may be about the pod that
    it replaces: managers notice the end of a pod later than the cluster does.
    """
    origin, doubted = dict(before.origin), set(before.doubted)
    broken = job.nodes_of(fault.rank for fault in new_faults if fault.hardware)
    for node in job.nodes_of(fault.rank for fault in new_faults):
        pod = job.pod_at(node)
        if pod is None or pod.uid == origin.get(node):
            continue
        if not pod.running and node not in broken:
            continue  # it has no ranks yet
        if node in broken or pod.uid in doubted:
            origin[node] = pod.uid
            doubted.discard(pod.uid)
        else:
            doubted.add(pod.uid)
    return tuple(sorted(origin.items())), frozenset(doubted)


def _should_leave_first(turn: Turn) -> bool:
    """Only the cluster has seen the fault: the processes there may hang without noticing it."""
    faults = turn.round.faults
    known_to_client = any(not fault.hardware or fault.kind.retryable for fault in faults)
    return bool(faults) and turn.job.subscribed and not known_to_client


def _label_pods(turn: Turn, faults: tuple[Fault, ...]) -> Turn:
    """Label the pods, so that the scheduler knows their fault type. It replaces them."""
    software = [fault for fault in faults if not fault.hardware]
    fault_type = "retry-fault" if all(fault.kind.retryable for fault in software) else "software"
    nodes = turn.job.nodes_of(fault.rank for fault in software)
    pods = [turn.job.pod_at(node) for node in nodes]
    labels = {
        pod.uid: fault_type for pod in pods if pod is not None and pod.uid not in turn.round.doubted
    }
    hit = {fault.rank for fault in faults}
    labels |= {seen.pod: seen.label for seen in turn.job.seen if seen.label and seen.rank in hit}
    return turn.with_cluster_commands(
        *(LabelPod(pod, "fault-type", label) for pod, label in labels.items())
    )


def open_round(turn: Turn) -> Outcome:
    """Stop at once; but if the job still trains and has a platform, ask the platform first."""
    word = platform.wanted(turn.job) or turn.round.platform
    turn = turn.with_round(platform=word)
    if word or turn.round.stopped or not turn.job.config.platform:
        return stop(turn)
    turn = turn.with_reason("waiting for the platform to name a strategy")
    deadline = turn.now + turn.config.platform_timeout_s
    return turn.go_to(PlatformChoosing(turn.job, turn.round, deadline))


def platform_changed(state: PlatformChoosing, turn: Turn) -> Outcome:
    if word := platform.wanted(turn.job):
        return stop(turn.with_reason(f"the platform wants {word}").with_round(platform=word))
    return turn.go_to(state)


def stop(turn: Turn) -> Outcome:
    """Order all ranks to park; or, if only a dump is wanted, to save and exit."""
    if _dump_only(turn):
        turn = turn.with_reason("only a dump is wanted")
        leaving = nodes_to_replace(turn.job, turn.round)
        turn = mark_lost(turn.with_round(leaving=leaving))
        turn = turn.with_cluster_commands(WriteResetConfig(ResetOperation.FAULT, turn.round.ranks))
        order = signals.save_and_exit(turn.job, turn.round)
        deadline = turn.now + turn.config.status_timeout_s
        return turn.go_to(Dumping(turn.job, turn.round, order, deadline), order)
    turn = turn.with_round(stopped=True)
    turn = turn.with_cluster_commands(WriteResetConfig(ResetOperation.FLUSHING))
    order = signals.stop_train(turn.job, turn.round)
    deadline = turn.now + turn.config.stop_timeout_s
    return turn.go_to(Stopping(turn.job, turn.round, order, deadline), order)


def _dump_only(turn: Turn) -> bool:
    if turn.round.stopped:
        return False
    strategies = turn.job.config.strategies
    if turn.job.config.platform:
        return turn.round.platform == WireStrategy.DUMP and Strategy.DUMP in strategies
    return strategies[0] is Strategy.DUMP


def stop_completed(turn: Turn, event: StopReport) -> Outcome:
    match event.code:
        case RecoverCode.OK:
            return settle(_without_symptoms(turn, event).with_reason("all ranks are parked"))
        case RecoverCode.ProcessNotReady:
            return kill(turn.with_reason("the job has no running processes to stop"))
        case code:
            return give_up(turn.with_reason(f"the job could not stop its ranks ({code})"))


def _without_symptoms(turn: Turn, report: StopReport) -> Turn:
    """Remove lost connections that the job no longer lists: a death explains them.

    Otherwise their nodes would be replaced, too.
    """
    if all(fault.kind.retryable for fault in report.faults):
        return turn
    listed = {fault.rank for fault in report.faults}
    kept = tuple(
        fault
        for fault in turn.round.faults
        if fault.hardware or fault.kind is not FaultKind.NETWORK or fault.rank in listed
    )
    return turn.with_round(faults=kept) if kept else turn


def settle(turn: Turn) -> Outcome:
    """Wait for the cluster only as long as these faults need it."""
    if retryable(turn.job, turn.round):
        return _confirm(turn.with_round(leaving=frozenset()))
    turn = turn.with_round(leaving=_must_leave(turn.job, turn.round))
    job, now, config = turn.job, turn.now, turn.config
    not_before = now + config.flush_s if job.config.cluster else now
    if job.config.super_pod:
        not_before += config.release_s
        pods = [job.pod_at(node) for node in job.nodes_of(turn.round.ranks)]
        turn = turn.with_commands(
            WriteFaultJobInfo(tuple(pod.node for pod in pods if pod is not None))
        )
    heal_by = now + config.heal_timeout_s if healing(job, turn.round) else now
    if max(not_before, heal_by) <= now:
        return _confirm(turn)
    turn = turn.with_reason("waiting for the cluster to settle")
    return turn.go_to(Settling(job, turn.round, not_before, max(not_before, heal_by)))


def faults_changed(state: Settling, turn: Turn) -> Outcome:
    """The faults may have healed."""
    if healing(state.job, state.round):
        return turn.go_to(state)
    if turn.now >= state.not_before:
        return settled(turn)
    return turn.with_reason("all faults have healed").go_to(
        replace(state, deadline=state.not_before)
    )


def settled(turn: Turn) -> Outcome:
    unhealed = healing(turn.job, turn.round)
    reason = f"nodes {sorted(unhealed)} did not heal" if unhealed else "the cluster has settled"
    return _confirm(turn.with_reason(reason).with_round(leaving=turn.round.leaving | unhealed))


def retryable(job: Job, round_: Round) -> bool:
    """All faults can be retried, all are of one kind, and no retry has failed before."""
    return (
        Strategy.RETRY in job.config.strategies
        and (not job.config.platform or round_.platform == WireStrategy.RETRY)
        and all(fault.kind.retryable for fault in round_.faults)
        and len({fault.kind for fault in round_.faults}) <= 1
        and not _retry_has_failed(round_)
    )


def _retry_has_failed(round_: Round) -> bool:
    return any(a.strategy is Strategy.RETRY and not a.interrupted for a in round_.history)


def healing(job: Job, round_: Round) -> frozenset[NodeRank]:
    """The nodes that stay only if their device fault heals, and that still have it."""
    seen = {fault.rank for fault in job.seen if not (fault.ignored or fault.sub_healthy)}
    ranks = [fault.rank for fault in round_.faults if fault.hardware and fault.rank in seen]
    return frozenset(job.nodes_of(ranks)) - round_.leaving


def _must_leave(job: Job, round_: Round) -> frozenset[NodeRank]:
    """With a scheduler, whole pods are replaced, unless they are repaired in place. Without one,
    single processes are; only a fault that cannot be repaired there moves to another node."""
    if Strategy.RECOVER_IN_PLACE not in job.config.strategies:
        return nodes_to_replace(job, round_)
    return _not_in_place(job, round_)


def nodes_to_replace(job: Job, round_: Round) -> frozenset[NodeRank]:
    if job.config.cluster:
        return frozenset(job.nodes_of(round_.ranks))
    return _not_in_place(job, round_)


def _not_in_place(job: Job, round_: Round) -> frozenset[NodeRank]:
    return frozenset(job.nodes_of(fault.rank for fault in round_.faults if not fault.in_place))


def _confirm(turn: Turn) -> Outcome:
    if not turn.job.config.platform:
        return _announce(turn)
    if platform.foreign_confirmation(turn.job):
        turn = turn.with_reason(f"{platform.CONFIRM} still holds {turn.job.platform.confirm!r}")
        return give_up(turn, RecoverCode.WriteConfirmFaultOrWaitPlatResultFault)
    question = platform.ask(turn.round.faults)
    turn = turn.with_job(confirm=question.value).with_commands(question)
    deadline = turn.now + turn.config.platform_timeout_s
    return confirmed(PlatformConfirming(turn.job, turn.round, deadline), turn)


def confirmed(state: PlatformConfirming, turn: Turn) -> Outcome:
    """Continue once the platform has answered in full: a list of faults, and a strategy."""
    job, word = turn.job, platform.wanted_finally(turn.job)
    stale = word is WireStrategy.RETRY and _retry_has_failed(turn.round)
    if job.platform.result is None or not word or stale:
        return turn.with_reason("waiting for the platform to confirm the faults").go_to(state)
    confirmed_faults = platform.read_faults(f"{job.platform.confirm or ''},{job.platform.result}")
    turn = turn.with_round(platform=word, faults=merge(turn.round.faults, confirmed_faults))
    leaving = turn.round.leaving | _must_leave(job, turn.round)
    can_retry = retryable(job, turn.round)
    turn = turn.with_round(leaving=frozenset() if can_retry else leaving)
    return _announce(turn.with_reason(f"the platform has confirmed the faults and wants {word}"))


def mark_lost(turn: Turn) -> Turn:
    """All faults are ordinary now, and all ranks of a pod that must be replaced are lost, too."""
    pod_ranks = turn.job.ranks_of(turn.round.leaving)
    lost = (Fault(rank, in_place=False, evidence="its pod must be replaced") for rank in pod_ranks)
    faults = [replace(fault, kind=FaultKind.ORDINARY) for fault in turn.round.faults]
    return turn.with_round(faults=merge(faults, lost))


def _announce(turn: Turn) -> Outcome:
    again = retryable(turn.job, turn.round)
    if not again:
        turn = mark_lost(turn)
        in_place = Strategy.RECOVER_IN_PLACE in turn.job.config.strategies
        listed = WriteResetConfig(ResetOperation.FAULT, turn.round.ranks, in_place)
        turn = turn.with_cluster_commands(listed)
    order = signals.global_fault(turn.job, turn.round, again)
    deadline = turn.now + turn.config.strategy_timeout_s
    return turn.go_to(Negotiating(turn.job, turn.round, order, deadline), order)
