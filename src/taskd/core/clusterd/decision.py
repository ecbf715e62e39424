"""The decision of a round: which strategy, and the order that starts it."""

from __future__ import annotations

from dataclasses import replace

from taskd.core.clusterd import platform, signals
from taskd.core.clusterd.choose_strategy import Question, choose
from taskd.core.clusterd.job_facts import MASTER, Attempt, Job, Round
from taskd.core.clusterd.round.round_end import exit_job
from taskd.core.clusterd.round.round_start import mark_lost, nodes_to_replace, retryable
from taskd.core.clusterd.round.turn import Turn
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
from taskd.model.clusterd import DeletePod, ResetOperation, Signal, WriteResetConfig
from taskd.model.codes import RecoverCode
from taskd.model.faults import FaultKind
from taskd.model.ids import NodeRank
from taskd.model.strategies import Strategy


def decide(turn: Turn, pods_back: bool = False) -> Outcome:
    choice = choose(_question(turn, pods_back))
    turn = turn.with_reason(choice.because)
    match choice.strategy:
        case Strategy.RETRY:
            return _retry_after_convergence(turn)
        case Strategy.RECOVER_IN_PLACE | Strategy.RECOVER:
            return _recover_with_rank_table(turn, choice.strategy)
        case Strategy.ELASTIC:
            return _shrink_unless_new_pods(turn)
        case Strategy.DUMP:
            turn, order = _order(turn, Strategy.DUMP)
            deadline = turn.now + turn.config.status_timeout_s
            return turn.go_to(Dumping(turn.job, turn.round, order, deadline), order)
        case Strategy.EXIT:
            turn, order = _order(turn, Strategy.EXIT)
            return exit_job(turn, order)


def try_next(turn: Turn, strategy: Strategy, code: int) -> Outcome:
    """The strategy has failed: choose the next one."""
    failed = Attempt(strategy, code)
    return decide(turn.with_round(history=(*turn.round.history, failed)).with_new_uuid())


def _question(turn: Turn, pods_back: bool) -> Question:
    job, round_ = turn.job, turn.round
    nodes = job.nodes_of(round_.ranks)
    return Question(
        configured=job.config.strategies,
        offered=round_.offered,
        retryable=retryable(job, round_),
        in_place=bool(set(nodes) - round_.leaving) if nodes else _all_in_place(round_),
        # Without a cluster, the manager does not run in node 0's pod.
        master_lost=job.config.cluster and MASTER in nodes,
        pods_back=pods_back,
        platform=(round_.platform or "") if job.config.platform else None,
        history=round_.history,
        max_interruptions=turn.config.max_interruptions,
        exit_is_final=not job.config.cluster and not job.from_ascend,
        from_ascend=job.from_ascend,
        dump_useless=round_.nic_failed and job.config.framework == "mindspore",
    )


def _all_in_place(round_: Round) -> bool:
    return all(fault.in_place for fault in round_.faults)


def _order(turn: Turn, strategy: Strategy) -> tuple[Turn, Signal]:
    """Except for a retry and a repair in place, every pod at fault must be replaced."""
    if strategy is Strategy.RETRY:
        return turn, signals.change_strategy(turn.job, turn.round, strategy)
    if strategy is Strategy.RECOVER_IN_PLACE:
        turn = mark_lost(turn)
        return turn, signals.change_strategy(turn.job, turn.round, strategy)
    before = turn.round.leaving
    turn = turn.with_round(leaving=before | nodes_to_replace(turn.job, turn.round))
    turn = mark_lost(turn)
    also = turn.round.leaving - before
    return turn, signals.change_strategy(turn.job, turn.round, strategy, also)


def _retry_after_convergence(turn: Turn) -> Outcome:
    network = any(fault.kind is FaultKind.NETWORK for fault in turn.round.faults)
    if network and turn.config.convergence_s > 0:
        turn = turn.with_reason("waiting for the network to find new routes")
        return turn.go_to(Converging(turn.job, turn.round, turn.now + turn.config.convergence_s))
    return retry(turn)


def retry(turn: Turn) -> Outcome:
    turn, order = _order(turn, Strategy.RETRY)
    deadline = turn.now + turn.config.status_timeout_s
    return turn.go_to(Retrying(turn.job, turn.round, order, deadline), order)


def _recover_with_rank_table(turn: Turn, strategy: Strategy) -> Outcome:
    ranked_before = any(a.strategy is Strategy.RECOVER_IN_PLACE for a in turn.round.history)
    if ranked_before or not turn.job.config.platform:
        return recover(turn, strategy)
    deadline = turn.now + turn.config.platform_timeout_s
    return ranked(PlatformRanking(turn.job, turn.round, strategy, deadline), turn)


def ranked(state: PlatformRanking, turn: Turn) -> Outcome:
    """Continue once the platform says whether its rank table is ready."""
    match platform.rank_table_ready(turn.job):
        case None:
            return turn.with_reason("waiting for the platform to write the rank table").go_to(state)
        case True:
            return recover(turn.with_reason("the rank table is ready"), state.strategy)
        case False:
            return unranked(turn.with_reason("the platform could not write the rank table"))


def unranked(turn: Turn) -> Outcome:
    """Without a rank table, only what the platform wants now is left: a dump, or exit."""
    turn = turn.with_round(platform=platform.wanted_finally(turn.job))
    return try_next(turn, Strategy.RECOVER, RecoverCode.WaitPlatStrategyTimeout)


def recover(turn: Turn, strategy: Strategy) -> Outcome:
    turn, order = _order(turn, strategy)
    job, round_, now, config = turn.job, turn.round, turn.now, turn.config
    missing = not_replaced(job, round_)
    pods_by = clear_at = None
    if job.config.cluster and missing:
        pods_by = now + (job.config.reschedule_timeout_s or config.reschedule_timeout_s)
        turn = _delete_pods(turn, missing)
    elif job.config.cluster and strategy is Strategy.RECOVER_IN_PLACE:
        clear_at = now + config.pickup_s
    elif job.config.cluster:
        turn = turn.with_commands(WriteResetConfig(ResetOperation.CLEAR))
    report_by = now + config.status_timeout_s
    return turn.go_to(Replacing(job, round_, strategy, order, report_by, pods_by, clear_at), order)


def _delete_pods(turn: Turn, nodes: frozenset[NodeRank]) -> Turn:
    """Only where clusterd is configured to do it; usually the scheduler deletes pods. Their agents
    have been ordered to exit before."""
    if not turn.job.config.deletes_pods:
        return turn
    origin = dict(turn.round.origin)
    pods = [turn.job.pod_at(node) for node in sorted(nodes)]
    return turn.with_commands(
        *(DeletePod(pod.uid) for pod in pods if pod and pod.uid == origin.get(pod.node_rank))
    )


def not_replaced(job: Job, round_: Round) -> frozenset[NodeRank]:
    """Of the nodes whose pods must be replaced, those that have no new pod with devices yet."""
    origin = dict(round_.origin)
    return round_.leaving - {
        pod.node_rank
        for pod in job.members
        if pod.running and pod.ranks and pod.uid != origin.get(pod.node_rank)
    }


def _shrink_unless_new_pods(turn: Turn) -> Outcome:
    scheduled = turn.job.config.cluster and turn.job.config.rescheduling
    if scheduled and Strategy.RECOVER not in turn.job.config.strategies:
        wait_s = turn.job.config.resources_timeout_s or turn.config.resources_timeout_s
        leaving = frozenset(turn.job.nodes_of(turn.round.ranks))
        turn = turn.with_reason("waiting in case the scheduler finds new pods").with_round(
            leaving=leaving
        )
        return turn.go_to(AwaitingPods(turn.job, turn.round, turn.now + wait_s))
    return shrink(turn)


def shrink(turn: Turn) -> Outcome:
    turn, order = _order(turn, Strategy.ELASTIC)
    deadline = turn.now + turn.config.status_timeout_s
    return turn.go_to(Shrinking(turn.job, turn.round, order, deadline), order)


def pods_changed(state: AwaitingPods, turn: Turn) -> Outcome:
    if not_replaced(turn.job, turn.round):
        return turn.go_to(replace(state, job=turn.job))
    return decide(turn.with_reason("the scheduler has found new pods"), pods_back=True)
