"""A round, from the stop to the question what the job can do: stop, settle, confirm, announce.

`recovery/faults` opens the round, `recovery/decision` takes the job's answer to the question.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.clusterd import platform, signals
from taskd.core.clusterd.job_facts import Job, Round
from taskd.core.clusterd.round_end import give_up, kill
from taskd.core.clusterd.states import (
    Dumping,
    Negotiating,
    Outcome,
    PlatformChoosing,
    PlatformConfirming,
    Settling,
    Stopping,
)
from taskd.core.clusterd.turn import Matter
from taskd.model.clusterd import ResetOperation, StopReport, WriteFaultJobInfo, WriteResetConfig
from taskd.model.codes import RecoverCode
from taskd.model.faults import Fault, FaultKind, merge
from taskd.model.ids import NodeRank
from taskd.model.strategies import Strategy


def open_round(matter: Matter) -> Outcome:
    """Stop at once. Only while the job still trains, a platform is asked first whether to."""
    word = platform.wanted(matter.job) or matter.round.platform
    matter = matter.knowing(platform=word)
    if word or matter.round.stopped or not matter.job.config.platform:
        return stop(matter)
    matter = matter.since("the platform is to name a strategy")
    deadline = matter.now + matter.config.platform_timeout_s
    return matter.to(PlatformChoosing(matter.job, matter.round, deadline))


def platform_changed(state: PlatformChoosing, matter: Matter) -> Outcome:
    if word := platform.wanted(matter.job):
        return stop(matter.since(f"the platform wants {word}").knowing(platform=word))
    return matter.to(state)


def stop(matter: Matter) -> Outcome:
    """Tell every rank to stand still, or, where a dump is all that is wanted, to save and leave."""
    if _dump_only(matter):
        matter = matter.since("a dump is all that is wanted")
        leaving = beyond_in_place(matter.job, matter.round)
        matter = as_lost(matter.knowing(leaving=leaving))
        matter = matter.in_cluster(WriteResetConfig(ResetOperation.FAULT, matter.round.ranks))
        order = signals.save_and_exit(matter.job, matter.round)
        deadline = matter.now + matter.config.status_timeout_s
        return matter.to(Dumping(matter.job, matter.round, order, deadline), order)
    matter = matter.knowing(stopped=True)
    matter = matter.in_cluster(WriteResetConfig(ResetOperation.FLUSHING))
    order = signals.stop_train(matter.job, matter.round)
    deadline = matter.now + matter.config.stop_timeout_s
    return matter.to(Stopping(matter.job, matter.round, order, deadline), order)


def _dump_only(matter: Matter) -> bool:
    if matter.round.stopped:
        return False
    strategies = matter.job.config.strategies
    if matter.job.config.platform:
        return matter.round.platform == "dump" and Strategy.DUMP in strategies
    return strategies[0] is Strategy.DUMP


def stop_completed(matter: Matter, event: StopReport) -> Outcome:
    match event.code:
        case RecoverCode.OK:
            return settle(matter.since("every rank stands still"))
        case RecoverCode.ProcessNotReady:
            return kill(matter.since("the job has no running processes that could stop"))
        case code:
            return give_up(matter.since(f"the job could not stop its ranks ({code})"))


def settle(matter: Matter) -> Outcome:
    """Wait for the cluster only as far as these faults need it."""
    if retryable(matter.job, matter.round):
        return _confirm(matter.knowing(leaving=frozenset()))
    matter = matter.knowing(leaving=_must_leave(matter.job, matter.round))
    job, now, config = matter.job, matter.now, matter.config
    not_before = now + config.flush_s if job.config.cluster else now
    if job.config.super_pod:
        not_before += config.release_s
        pods = [job.pod_at(node) for node in job.nodes_of(matter.round.ranks)]
        matter = matter.doing(WriteFaultJobInfo(tuple(pod.node for pod in pods if pod is not None)))
    heal_by = now + config.heal_timeout_s if healing(job, matter.round) else now
    if max(not_before, heal_by) <= now:
        return _confirm(matter)
    matter = matter.since("the cluster comes to rest")
    return matter.to(Settling(job, matter.round, not_before, max(not_before, heal_by)))


def faults_changed(state: Settling, matter: Matter) -> Outcome:
    """What was to heal may have healed."""
    if healing(state.job, state.round):
        return matter.to(state)
    if matter.now >= state.not_before:
        return settled(matter)
    return matter.since("nothing is left to heal").to(replace(state, deadline=state.not_before))


def settled(matter: Matter) -> Outcome:
    unhealed = healing(matter.job, matter.round)
    reason = f"nodes {sorted(unhealed)} did not heal" if unhealed else "the cluster is at rest"
    return _confirm(matter.since(reason).knowing(leaving=matter.round.leaving | unhealed))


def retryable(job: Job, round_: Round) -> bool:
    """Every fault passes by itself, all are of one kind, and nothing speaks against a retry."""
    return (
        Strategy.RETRY in job.config.strategies
        and (not job.config.platform or round_.platform == "retry")
        and all(fault.kind.retryable for fault in round_.faults)
        and len({fault.kind for fault in round_.faults}) <= 1
        and not _retry_has_failed(round_)
    )


def _retry_has_failed(round_: Round) -> bool:
    return any(a.strategy is Strategy.RETRY and not a.interrupted for a in round_.history)


def healing(job: Job, round_: Round) -> frozenset[NodeRank]:
    """The nodes that stay only if their device fault passes, and on which it is still seen."""
    seen = {fault.rank for fault in job.seen if not (fault.ignored or fault.sub_healthy)}
    ranks = [fault.rank for fault in round_.faults if fault.hardware and fault.rank in seen]
    return frozenset(job.nodes_of(ranks)) - round_.leaving


def _must_leave(job: Job, round_: Round) -> frozenset[NodeRank]:
    """With a scheduler a pod is the least that can be replaced, unless it is healed in place.
    With none, a process is; only what cannot be helped there has to leave its node."""
    if Strategy.RECOVER_IN_PLACE not in job.config.strategies:
        return beyond_in_place(job, round_)
    return _not_in_place(job, round_)


def beyond_in_place(job: Job, round_: Round) -> frozenset[NodeRank]:
    if job.config.cluster:
        return frozenset(job.nodes_of(round_.ranks))
    return _not_in_place(job, round_)


def _not_in_place(job: Job, round_: Round) -> frozenset[NodeRank]:
    return frozenset(job.nodes_of(fault.rank for fault in round_.faults if not fault.in_place))


def _confirm(matter: Matter) -> Outcome:
    if not matter.job.config.platform:
        return _announce(matter)
    if platform.foreign_confirmation(matter.job):
        matter = matter.since(f"{platform.CONFIRM} still holds {matter.job.platform.confirm!r}")
        return give_up(matter, RecoverCode.WriteConfirmFaultOrWaitPlatResultFault)
    question = platform.ask(matter.round.faults)
    matter = matter.of_job(confirm=question.value).doing(question)
    deadline = matter.now + matter.config.platform_timeout_s
    return confirmed(PlatformConfirming(matter.job, matter.round, deadline), matter)


def confirmed(state: PlatformConfirming, matter: Matter) -> Outcome:
    """Go on once the platform has answered in full: a list of faults, and a strategy."""
    job, word = matter.job, platform.wanted_finally(matter.job)
    stale = word == Strategy.RETRY and _retry_has_failed(matter.round)
    if job.platform.result is None or not word or stale:
        return matter.since("the platform is to confirm the faults").to(state)
    told = platform.read_faults(f"{job.platform.confirm or ''},{job.platform.result}")
    matter = matter.knowing(platform=word, faults=merge(matter.round.faults, told))
    leaving = matter.round.leaving | _must_leave(job, matter.round)
    passing = retryable(job, matter.round)
    matter = matter.knowing(leaving=frozenset() if passing else leaving)
    return _announce(matter.since(f"the platform has confirmed the faults and wants {word}"))


def as_lost(matter: Matter) -> Matter:
    """Nothing passes by itself any more, and who shares a pod that must leave is lost with it."""
    mates = matter.job.ranks_of(matter.round.leaving)
    leavers = (Fault(rank, in_place=False, evidence="its pod must leave") for rank in mates)
    faults = [replace(fault, kind=FaultKind.ORDINARY) for fault in matter.round.faults]
    return matter.knowing(faults=merge(faults, leavers))


def _announce(matter: Matter) -> Outcome:
    again = retryable(matter.job, matter.round)
    if not again:
        matter = as_lost(matter)
        in_place = Strategy.RECOVER_IN_PLACE in matter.job.config.strategies
        listed = WriteResetConfig(ResetOperation.FAULT, matter.round.ranks, in_place)
        matter = matter.in_cluster(listed)
    order = signals.global_fault(matter.job, matter.round, again)
    deadline = matter.now + matter.config.strategy_timeout_s
    return matter.to(Negotiating(matter.job, matter.round, order, deadline), order)
