"""The decision of a round: which strategy, and the order that puts it to work."""

from __future__ import annotations

from dataclasses import replace

from taskd.core.clusterd import platform, signals
from taskd.core.clusterd.choose_strategy import Question, choose
from taskd.core.clusterd.job_facts import MASTER, Attempt, Job, Round
from taskd.core.clusterd.round_end import exit_job
from taskd.core.clusterd.states import (
    AwaitingPods,
    Converging,
    Dumping,
    Outcome,
    PlatformRanking,
    Replacing,
    Retrying,
    Shrinking,
)
from taskd.core.clusterd.stop_and_ask import as_lost, beyond_in_place, retryable
from taskd.core.clusterd.turn import Matter
from taskd.model.clusterd import ResetOperation, Signal, WriteResetConfig
from taskd.model.codes import RecoverCode
from taskd.model.faults import FaultKind
from taskd.model.ids import NodeRank
from taskd.model.strategies import Strategy


def decide(matter: Matter, pods_back: bool = False) -> Outcome:
    choice = choose(_question(matter, pods_back))
    matter = matter.since(choice.because)
    match choice.strategy:
        case Strategy.RETRY:
            return _retry_when_routes_are_found(matter)
        case Strategy.RECOVER_IN_PLACE | Strategy.RECOVER:
            return _recover_when_ranked(matter, choice.strategy)
        case Strategy.ELASTIC:
            return _shrink_unless_pods_come(matter)
        case Strategy.DUMP:
            matter, order = _order(matter, Strategy.DUMP)
            deadline = matter.now + matter.config.status_timeout_s
            return matter.to(Dumping(matter.job, matter.round, order, deadline), order)
        case Strategy.EXIT:
            matter, order = _order(matter, Strategy.EXIT)
            return exit_job(matter, order)


def try_next(matter: Matter, strategy: Strategy, code: int) -> Outcome:
    """The strategy has failed: what comes after it?"""
    failed = Attempt(strategy, code)
    return decide(matter.knowing(history=(*matter.round.history, failed)).next_turn())


def _question(matter: Matter, pods_back: bool) -> Question:
    job, round_ = matter.job, matter.round
    nodes = job.nodes_of(round_.ranks)
    return Question(
        configured=job.config.strategies,
        offered=round_.offered,
        retryable=retryable(job, round_),
        in_place=bool(set(nodes) - round_.leaving) if nodes else _all_in_place(round_),
        # Without a cluster, the manager does not stand or fall with node 0's pod.
        master_lost=job.config.cluster and MASTER in nodes,
        pods_back=pods_back,
        platform=round_.platform if job.config.platform else None,
        history=round_.history,
        max_interruptions=matter.config.max_interruptions,
        dump_useless=round_.nic_failed and job.config.framework == "mindspore",
    )


def _all_in_place(round_: Round) -> bool:
    return all(fault.in_place for fault in round_.faults)


def _order(matter: Matter, strategy: Strategy) -> tuple[Matter, Signal]:
    """Beyond a retry and a repair in place, every pod at fault has to leave."""
    if strategy is Strategy.RETRY:
        return matter, signals.change_strategy(matter.job, matter.round, strategy)
    if strategy is Strategy.RECOVER_IN_PLACE:
        matter = as_lost(matter)
        return matter, signals.change_strategy(matter.job, matter.round, strategy)
    before = matter.round.leaving
    matter = matter.knowing(leaving=before | beyond_in_place(matter.job, matter.round))
    matter = as_lost(matter)
    also = matter.round.leaving - before
    return matter, signals.change_strategy(matter.job, matter.round, strategy, also)


def _retry_when_routes_are_found(matter: Matter) -> Outcome:
    network = any(fault.kind is FaultKind.NETWORK for fault in matter.round.faults)
    if network and matter.config.convergence_s > 0:
        matter = matter.since("the network first finds its routes")
        return matter.to(
            Converging(matter.job, matter.round, matter.now + matter.config.convergence_s)
        )
    return retry(matter)


def retry(matter: Matter) -> Outcome:
    matter, order = _order(matter, Strategy.RETRY)
    deadline = matter.now + matter.config.status_timeout_s
    return matter.to(Retrying(matter.job, matter.round, order, deadline), order)


def _recover_when_ranked(matter: Matter, strategy: Strategy) -> Outcome:
    ranked_before = any(a.strategy is Strategy.RECOVER_IN_PLACE for a in matter.round.history)
    if ranked_before or not matter.job.config.platform:
        return recover(matter, strategy)
    deadline = matter.now + matter.config.platform_timeout_s
    return ranked(PlatformRanking(matter.job, matter.round, strategy, deadline), matter)


def ranked(state: PlatformRanking, matter: Matter) -> Outcome:
    """Go on once the platform says whether its rank table is ready."""
    match platform.rank_table_ready(matter.job):
        case None:
            return matter.since("the platform is to write the rank table").to(state)
        case True:
            return recover(matter.since("the rank table is ready"), state.strategy)
        case False:
            return unranked(matter.since("the platform could not write the rank table"))


def unranked(matter: Matter) -> Outcome:
    """Only what the platform wants now can still be done: a dump, or nothing."""
    matter = matter.knowing(platform=platform.wanted_finally(matter.job))
    return try_next(matter, Strategy.RECOVER, RecoverCode.WaitPlatStrategyTimeout)


def recover(matter: Matter, strategy: Strategy) -> Outcome:
    matter, order = _order(matter, strategy)
    job, round_, now, config = matter.job, matter.round, matter.now, matter.config
    missing = not_replaced(job, round_)
    pods_by = clear_at = None
    if job.config.cluster and missing:
        pods_by = now + (job.config.reschedule_timeout_s or config.reschedule_timeout_s)
    elif job.config.cluster and strategy is Strategy.RECOVER_IN_PLACE:
        clear_at = now + config.pickup_s
    elif job.config.cluster:
        matter = matter.doing(WriteResetConfig(ResetOperation.CLEAR))
    report_by = now + config.status_timeout_s
    return matter.to(Replacing(job, round_, strategy, order, report_by, pods_by, clear_at), order)


def not_replaced(job: Job, round_: Round) -> frozenset[NodeRank]:
    """Of the nodes that had to leave, those where no new pod with devices stands yet."""
    origin = dict(round_.origin)
    return round_.leaving - {
        pod.node_rank
        for pod in job.members
        if pod.running and pod.ranks and pod.uid != origin.get(pod.node_rank)
    }


def _shrink_unless_pods_come(matter: Matter) -> Outcome:
    scheduled = matter.job.config.cluster and matter.job.config.rescheduling
    if scheduled and Strategy.RECOVER not in matter.job.config.strategies:
        wait_s = matter.job.config.resources_timeout_s or matter.config.resources_timeout_s
        leaving = frozenset(matter.job.nodes_of(matter.round.ranks))
        matter = matter.since("unless the scheduler finds new pods").knowing(leaving=leaving)
        return matter.to(AwaitingPods(matter.job, matter.round, matter.now + wait_s))
    return shrink(matter)


def shrink(matter: Matter) -> Outcome:
    matter, order = _order(matter, Strategy.ELASTIC)
    deadline = matter.now + matter.config.status_timeout_s
    return matter.to(Shrinking(matter.job, matter.round, order, deadline), order)


def pods_changed(state: AwaitingPods, matter: Matter) -> Outcome:
    if not_replaced(matter.job, matter.round):
        return matter.to(replace(state, job=matter.job))
    return decide(matter.since("the scheduler has found new pods"), pods_back=True)
