"""After the order: the job's reports about the repair, and what the cluster does meanwhile."""

from __future__ import annotations

from dataclasses import replace

from taskd.core.clusterd import signals
from taskd.core.clusterd.decision import decide, not_replaced, try_next
from taskd.core.clusterd.job_facts import Attempt
from taskd.core.clusterd.round.round_end import STATUS, exit_job, succeed
from taskd.core.clusterd.round.round_start import begin, settle
from taskd.core.clusterd.round.turn import Turn
from taskd.core.clusterd.states import (
    Dumping,
    Growing,
    Negotiating,
    Outcome,
    Repairing,
    Replacing,
    Retrying,
    Shrinking,
    Shrunk,
)
from taskd.model.clusterd import (
    AnnotatePodGroup,
    ResetOperation,
    ResultReport,
    StrategiesReport,
    WriteResetConfig,
)
from taskd.model.codes import RecoverCode
from taskd.model.faults import Fault, merge
from taskd.model.strategies import Strategy, WireStrategy


def strategy_of(state: Repairing) -> Strategy:
    match state:
        case Retrying():
            return Strategy.RETRY
        case Replacing():
            return state.strategy
        case Shrinking() | Growing():
            return Strategy.ELASTIC
        case Dumping():
            return Strategy.DUMP


def strategies_reported(
    state: Negotiating | Shrunk, turn: Turn, event: StrategiesReport
) -> Outcome:
    match state:
        case Negotiating():
            return decide(turn.with_round(offered=event.strategies))
        case Shrunk() if WireStrategy.UPGRADE in event.strategies:
            return _grow(turn.with_reason("the job offers to grow back"))
        case Shrunk():
            return turn.with_reason("the job cannot grow yet").go_to(state)


def status_reported(state: Repairing, turn: Turn, event: ResultReport) -> Outcome:
    match state, event.code:
        case Dumping(), _:
            return _dumped(turn, event.code)
        case Shrinking(), RecoverCode.OK:
            return _shrunk(turn)
        case Shrinking(), RecoverCode.ExitIsolateRanks:
            return _isolate(state, turn, event)
        case (Growing(), RecoverCode.OK):
            return succeed(turn.with_reason("the job has grown back"), "")
        case Replacing(), RecoverCode.OK if _names_missing(turn, event):
            return _still_shrunk(turn.with_reason(f"{state.strategy} worked"), event)
        case _, RecoverCode.OK:
            strategy = strategy_of(state)
            # The job says what it did: a strategy may have ended in a restart of all ranks.
            how = f"{strategy}: {event.info}" if event.info else f"{strategy} worked"
            return succeed(turn.with_reason(how), f"{strategy.on_wire}-success")
        case Growing(), code if not _in_cluster(turn):
            return not_grown(turn, f"growing failed with {code}")
        case Retrying(), code:
            return _retry_failed(turn, code)
        case _, code:
            strategy = strategy_of(state)
            turn = turn.with_reason(f"{strategy} failed with {code}")
            if strategy.on_wire is WireStrategy.RECOVER:
                turn = turn.with_cluster_commands(AnnotatePodGroup(STATUS, "recover-failed"))
            return try_next(turn, strategy, code)


def _names_missing(turn: Turn, event: ResultReport) -> bool:
    """Ascend's managers list the ranks that were repaired, with every result."""
    return bool(event.isolated) and not turn.job.config.cluster and not turn.job.from_ascend


def _retry_failed(turn: Turn, code: int) -> Outcome:
    turn = turn.with_reason(f"retry failed with {code}")
    turn = turn.with_cluster_commands(AnnotatePodGroup(STATUS, "retry-failed"))
    if code != RecoverCode.RecoverableRetryError:
        listed = WriteResetConfig(ResetOperation.FAULT, turn.round.ranks)
        turn = turn.with_cluster_commands(listed)
        return try_next(turn, Strategy.RETRY, code)
    # From here on the faults are ordinary ones, and the job is asked again.
    failed = Attempt(Strategy.RETRY, code)
    return settle(turn.with_round(history=(*turn.round.history, failed)).with_new_uuid())


def _dumped(turn: Turn, code: int) -> Outcome:
    worked = code == RecoverCode.OK
    turn = turn.with_reason(
        "the checkpoint is saved" if worked else f"the checkpoint could not be saved ({code})"
    )
    turn = turn.with_cluster_commands(
        AnnotatePodGroup(STATUS, "dump-success" if worked else "dump-failed")
    )
    return exit_job(turn, signals.dump_exit(turn.job, turn.round))


def _isolate(state: Shrinking, turn: Turn, event: ResultReport) -> Outcome:
    """Whole replicas leave, including healthy ranks that shared a replica with a lost rank.

    What has failed has failed for them: a rank that dies from here on may be repaired that way.
    """
    interrupted = tuple(attempt for attempt in turn.round.history if attempt.interrupted)
    turn = turn.with_round(history=interrupted)
    if not _in_cluster(turn):
        # No scheduler would bring their nodes back: they stay and wait for the job to grow.
        turn = turn.with_reason(f"ranks {list(event.isolated)} leave with their replicas")
        deadline = turn.now + turn.config.status_timeout_s
        return turn.go_to(replace(state, round=turn.round, deadline=deadline))
    known = set(turn.job.nodes_of(turn.round.ranks))
    nodes = tuple(node for node in turn.job.nodes_of(event.isolated) if node not in known)
    isolated = tuple(Fault(rank, evidence="leaves with its replica") for rank in event.isolated)
    turn = turn.with_reason(f"ranks {list(event.isolated)} leave with their replicas")
    turn = turn.with_round(
        faults=merge(turn.round.faults, isolated), leaving=turn.round.leaving | set(nodes)
    )
    order = signals.nodes_exit(turn.job, turn.round, nodes)
    deadline = turn.now + turn.config.status_timeout_s
    return turn.go_to(Shrinking(turn.job, turn.round, order, deadline), order)


def _shrunk(turn: Turn) -> Outcome:
    turn = turn.with_reason("the job trains without the lost ranks").with_round(history=())
    turn = turn.with_cluster_commands(WriteResetConfig(ResetOperation.CLEAR))
    return pods_changed(Shrunk(turn.job, turn.round), turn)


def _still_shrunk(turn: Turn, event: ResultReport) -> Outcome:
    """A rank of a job that had shrunk was repaired. The others are still missing."""
    turn = turn.with_reason(f"the job trains without ranks {list(event.isolated)}")
    missing = tuple(Fault(rank, evidence="left when the job shrank") for rank in event.isolated)
    leaving = frozenset(turn.job.nodes_of(event.isolated))
    turn = turn.with_round(faults=missing, leaving=leaving, history=(), stopped=False)
    return turn.go_to(Shrunk(turn.job, turn.round))


def _in_cluster(turn: Turn) -> bool:
    return turn.job.config.cluster


def _grow(turn: Turn) -> Outcome:
    turn = turn.with_new_uuid()
    order = signals.upgrade(turn.job, turn.round)
    deadline = turn.now + turn.config.status_timeout_s
    return turn.go_to(Growing(turn.job, turn.round, order, deadline), order)


def not_grown(turn: Turn, because: str) -> Outcome:
    """The job could train without these ranks, so it is asked again instead of ended."""
    return begin(turn.job, (), turn.now, turn.config, because, before=turn.round)


def pods_changed(state: Replacing | Shrunk, turn: Turn) -> Outcome:
    state = replace(state, job=turn.job)
    missing = not_replaced(turn.job, turn.round)
    match state:
        case Shrunk() if missing or not turn.round.leaving or turn.job.phase != "Running":
            return turn.go_to(state)
        case Shrunk():
            return _grow(turn.with_reason("all lost pods are replaced"))
        case Replacing(pods_by=float()) if not missing:
            turn = turn.with_reason("all lost pods are replaced")
            if state.strategy is Strategy.RECOVER_IN_PLACE:
                clear_at = turn.now + turn.config.pickup_s
                return turn.go_to(replace(state, pods_by=None, clear_at=clear_at))
            clear = WriteResetConfig(ResetOperation.CLEAR)
            return turn.go_to(replace(state, pods_by=None), clear)
        case Replacing():
            return turn.go_to(state)


def replacing_expired(state: Replacing, turn: Turn) -> Outcome:
    if state.clear_at is not None and turn.now >= state.clear_at:
        turn = turn.with_reason("agents had time to read reset-config")
        return turn.go_to(replace(state, clear_at=None), WriteResetConfig(ResetOperation.CLEAR))
    because = "the scheduler did not replace the lost pods in time"
    if turn.job.from_ascend:
        # MindIO waits for the new processes itself. It takes another strategy then, but no stop.
        turn = turn.with_reason(because)
        return try_next(turn, Strategy.RECOVER, RecoverCode.ScheduleTimeout)
    # The pods may have come unseen, and the ranks may train: park them before the next order.
    round_ = turn.round
    failed = Attempt(Strategy.RECOVER, RecoverCode.ScheduleTimeout)
    history = (*round_.history, failed)
    return begin(turn.job, (), turn.now, turn.config, because, before=round_, history=history)
