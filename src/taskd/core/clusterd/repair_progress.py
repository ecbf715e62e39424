"""After the order: what the job reports of the repair, and what the cluster does meanwhile."""

from __future__ import annotations

from dataclasses import replace

from taskd.core.clusterd import signals
from taskd.core.clusterd.decision import decide, not_replaced, try_next
from taskd.core.clusterd.job_facts import Attempt
from taskd.core.clusterd.new_incident import begin
from taskd.core.clusterd.round_end import STATUS, exit_job, succeed
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
from taskd.core.clusterd.stop_and_ask import settle
from taskd.core.clusterd.turn import Matter
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
    state: Negotiating | Shrunk, matter: Matter, event: StrategiesReport
) -> Outcome:
    match state:
        case Negotiating():
            return decide(matter.knowing(offered=event.strategies))
        case Shrunk() if WireStrategy.UPGRADE in event.strategies:
            return _grow(matter.since("the job offers to grow back"))
        case Shrunk():
            return matter.since("the job cannot grow yet").to(state)


def status_reported(state: Repairing, matter: Matter, event: ResultReport) -> Outcome:
    match state, event.code:
        case Dumping(), _:
            return _dumped(matter, event.code)
        case Shrinking(), RecoverCode.OK:
            return _shrunk(matter)
        case Shrinking(), RecoverCode.ExitIsolateRanks:
            return _isolate(state, matter, event)
        case (Growing(), RecoverCode.OK):
            return succeed(matter.since("the job has grown back"), "")
        case _, RecoverCode.OK:
            word = strategy_of(state).on_wire
            return succeed(matter.since(f"{strategy_of(state)} worked"), f"{word}-success")
        case Growing(), code if not matter.job.config.cluster:
            return not_grown(matter, f"growing failed with {code}")
        case Retrying(), code:
            return _retry_failed(matter, code)
        case _, code:
            strategy = strategy_of(state)
            matter = matter.since(f"{strategy} failed with {code}")
            if strategy.on_wire is WireStrategy.RECOVER:
                matter = matter.in_cluster(AnnotatePodGroup(STATUS, "recover-failed"))
            return try_next(matter, strategy, code)


def _retry_failed(matter: Matter, code: int) -> Outcome:
    matter = matter.since(f"retry failed with {code}")
    matter = matter.in_cluster(AnnotatePodGroup(STATUS, "retry-failed"))
    if code != RecoverCode.RecoverableRetryError:
        listed = WriteResetConfig(ResetOperation.FAULT, matter.round.ranks)
        matter = matter.in_cluster(listed)
        return try_next(matter, Strategy.RETRY, code)
    # The faults are ordinary ones from here on, and the job is asked anew.
    failed = Attempt(Strategy.RETRY, code)
    return settle(matter.knowing(history=(*matter.round.history, failed)).next_turn())


def _dumped(matter: Matter, code: int) -> Outcome:
    worked = code == RecoverCode.OK
    matter = matter.since("the job is saved" if worked else f"the job was not saved ({code})")
    matter = matter.in_cluster(
        AnnotatePodGroup(STATUS, "dump-success" if worked else "dump-failed")
    )
    return exit_job(matter, signals.dump_exit(matter.job, matter.round))


def _isolate(state: Shrinking, matter: Matter, event: ResultReport) -> Outcome:
    """Whole replicas leave: healthy ranks, too, that shared one with a lost rank."""
    if not matter.job.config.cluster:
        # Nobody would bring their nodes back: they stay, and wait for the job to grow.
        matter = matter.since(f"ranks {list(event.isolated)} leave with their replicas")
        return matter.to(replace(state, deadline=matter.now + matter.config.status_timeout_s))
    known = set(matter.job.nodes_of(matter.round.ranks))
    nodes = tuple(node for node in matter.job.nodes_of(event.isolated) if node not in known)
    leavers = tuple(Fault(rank, evidence="leaves with its replica") for rank in event.isolated)
    matter = matter.since(f"ranks {list(event.isolated)} leave with their replicas")
    matter = matter.knowing(
        faults=merge(matter.round.faults, leavers), leaving=matter.round.leaving | set(nodes)
    )
    order = signals.nodes_exit(matter.job, matter.round, nodes)
    deadline = matter.now + matter.config.status_timeout_s
    return matter.to(Shrinking(matter.job, matter.round, order, deadline), order)


def _shrunk(matter: Matter) -> Outcome:
    matter = matter.since("the job trains without the lost ranks").knowing(history=())
    matter = matter.in_cluster(WriteResetConfig(ResetOperation.CLEAR))
    return pods_changed(Shrunk(matter.job, matter.round), matter)


def _grow(matter: Matter) -> Outcome:
    matter = matter.next_turn()
    order = signals.upgrade(matter.job, matter.round)
    deadline = matter.now + matter.config.status_timeout_s
    return matter.to(Growing(matter.job, matter.round, order, deadline), order)


def not_grown(matter: Matter, because: str) -> Outcome:
    """No reason to end a job that could train without these ranks: what can it do now?"""
    return begin(matter.job, (), matter.now, matter.config, because, before=matter.round)


def pods_changed(state: Replacing | Shrunk, matter: Matter) -> Outcome:
    state = replace(state, job=matter.job)
    missing = not_replaced(matter.job, matter.round)
    match state:
        case Shrunk() if missing or not matter.round.leaving or matter.job.phase != "Running":
            return matter.to(state)
        case Shrunk():
            return _grow(matter.since("every lost pod has been replaced"))
        case Replacing(pods_by=float()) if not missing:
            matter = matter.since("every lost pod has been replaced")
            if state.strategy is Strategy.RECOVER_IN_PLACE:
                clear_at = matter.now + matter.config.pickup_s
                return matter.to(replace(state, pods_by=None, clear_at=clear_at))
            clear = WriteResetConfig(ResetOperation.CLEAR)
            return matter.to(replace(state, pods_by=None), clear)
        case Replacing():
            return matter.to(state)


def replacing_expired(state: Replacing, matter: Matter) -> Outcome:
    if state.clear_at is not None and matter.now >= state.clear_at:
        matter = matter.since("agents have had the time to read the reset config")
        return matter.to(replace(state, clear_at=None), WriteResetConfig(ResetOperation.CLEAR))
    # The pods may have come unseen, and the ranks may train: nothing is ordered before they stand.
    round_ = matter.round
    failed = Attempt(Strategy.RECOVER, RecoverCode.ScheduleTimeout)
    because = "the scheduler has not replaced the lost pods in time"
    history = (*round_.history, failed)
    return begin(matter.job, (), matter.now, matter.config, because, before=round_, history=history)
