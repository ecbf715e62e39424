"""New faults: which of them start a round, and what that round interrupts.

Reports are events: one with a new fault starts a round. What the cluster sees is a state: every
fault in it that no round has handled starts one, even if it was missed before.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.agent.error_text import fault_line
from taskd.core.clusterd.hot_switch import abandon_switch, begin_switch, sub_healthy_pod
from taskd.core.clusterd.job_config import ON, RecoveryConfig
from taskd.core.clusterd.job_facts import Attempt, Job, Round
from taskd.core.clusterd.round.operation_round import abandon_operation, tested
from taskd.core.clusterd.round.repair_progress import strategy_of
from taskd.core.clusterd.round.round_start import absorb, begin, faults_changed, open_round
from taskd.core.clusterd.round.turn import Turn
from taskd.core.clusterd.states import (
    AwaitingBackup,
    AwaitingPause,
    AwaitingRemoval,
    Dumping,
    Ended,
    Exiting,
    GivingUp,
    Growing,
    HandedOver,
    Idle,
    Killing,
    Migrating,
    Outcome,
    Pausing,
    PreExiting,
    Repairing,
    Replacing,
    Resuming,
    Retrying,
    Settling,
    Shrinking,
    State,
    Stopping,
    StressTesting,
    SwitchingNic,
    Undecided,
)
from taskd.model.clusterd import Command, LabelPodGroup
from taskd.model.codes import RecoverCode
from taskd.model.faults import Fault, FaultKind, SeenFault, merge
from taskd.model.strategies import Strategy

NAMES = {
    FaultKind.MEMORY: "memory error",
    FaultKind.ORDINARY: "fault",
    FaultKind.NETWORK: "network error",
}


def faults_reported(
    state: State, faults: tuple[Fault, ...], now: float, config: RecoveryConfig
) -> Outcome:
    job = state.job
    faults = tuple(f for f in faults if job.has(f.rank) and not job.has_finished(f.rank))
    if not faults:
        return Outcome(state, because="the report names no rank of the job that still runs")
    because = "; ".join(_describe(fault) for fault in faults)
    match state:
        case Exiting() | HandedOver() | Killing() | Ended():
            # Most likely the restart itself. If not, the fault is reported again afterwards.
            because = "the whole job is already being stopped"
            return Outcome(state, because=because, answer=RecoverCode.ControllerEventCancel)
        case PreExiting():
            # Its neighbours, which we ordered to exit, count as well. The stop gets its own uuid.
            round_ = _merged(state, faults)
            turn = Turn(state.job, round_, now, config, f"the job reports it, too: {because}")
            return open_round(turn.with_new_uuid())
        case _ if isinstance(state, Undecided) and not _new_ranks(state, faults):
            return Outcome(_with_faults(state, faults), because="these faults are known")
        case Stopping():
            # All ranks are being parked already, whichever of them failed. Most often a survivor
            # lost a connection, and the death that explains it is reported a moment later.
            turn = Turn(state.job, state.round, now, config, f"it belongs to this round: {because}")
            return absorb(state, turn, faults)
        case _:
            return _interrupt(state, faults, now, config, because)


def faults_seen(state: State, now: float, config: RecoveryConfig) -> Outcome:
    """`state.job.seen` has changed: does it hold a fault that is not handled yet?"""
    if isinstance(state, GivingUp):
        return Outcome(state, because="the whole job is already being stopped")
    faults = unhandled(state)
    because = "; ".join(f"the cluster sees {_describe(fault)}" for fault in faults)
    match state:
        case Idle(quiet=True):
            return Outcome(state, because="the faults are checked again later")
        case Idle():
            return _at_rest(state, faults, now, config, because)
        case Settling() if not _new_ranks(state, faults):
            state = replace(state, round=_merged(state, faults))
            return faults_changed(state, Turn(state.job, state.round, now, config))
        case _ if isinstance(state, Undecided) and not _new_ranks(state, faults):
            return Outcome(_with_faults(state, faults), because="there is no new fault")
        case _ if isinstance(state, Repairing) and state.job.from_ascend:
            return Outcome(state, because="MindIO takes no order to stop before its result")
        case _ if faults and _changes_repair(state, faults):
            return _interrupt(state, faults, now, config, because)
        case _:
            return Outcome(state, because="all faults are being handled")


def look_again(state: Idle, now: float, config: RecoveryConfig) -> Outcome:
    """Check again for unhandled faults, and reset the label if that has failed before."""
    outcome = faults_seen(Idle(state.job), now, config)
    if not isinstance(outcome.state, Idle) or not state.job.paused:
        return outcome
    waiting = replace(outcome.state, again_at=now + config.again_after_s)
    under_way = state.job.labelling
    if under_way is not None and now < under_way.since + config.again_after_s:
        return Outcome(waiting, because="the label `pause` is being reset")
    return Outcome(waiting, (LabelPodGroup(ON, "on"),), "the label `pause` must still be reset")


def unhandled(state: State) -> tuple[Fault, ...]:
    job = state.job
    expected = tested(state) if isinstance(state, StressTesting) else frozenset()
    here = {pod.uid for pod in job.pods}
    return merge(
        (),
        (
            seen.as_fault()
            for seen in job.seen
            if not (seen.ignored or seen.sub_healthy)
            and not job.is_handled(seen)
            and not job.has_finished(seen.rank)
            and not (seen.pod and here and seen.pod not in here)
            and not (seen.of_stress_test and seen.rank in expected)
        ),
    )


def _at_rest(
    state: Idle, faults: tuple[Fault, ...], now: float, config: RecoveryConfig, because: str
) -> Outcome:
    if faults:
        return _interrupt(state, faults, now, config, because)
    if pod := sub_healthy_pod(state.job, now, config):
        return begin_switch(state.job, pod, now, config)
    sub_healthy = tuple(
        seen.as_fault() for seen in state.job.seen if _calls_for_dump(state.job, seen)
    )
    if sub_healthy:
        because = "a device is sub-healthy, and the job is configured to save and exit"
        return begin(state.job, sub_healthy, now, config, because, leave_first=False)
    return Outcome(state, because="there is nothing to handle")


def _calls_for_dump(job: Job, seen: SeenFault) -> bool:
    return (
        seen.sub_healthy
        and job.config.sub_health == "graceExit"
        and job.config.strategies[0] is Strategy.DUMP
        and not job.is_handled(seen)
    )


def _changes_repair(state: State, faults: tuple[Fault, ...]) -> bool:
    """During a repair: do these faults change what has to be done?"""
    if _new_ranks(state, faults):
        return True
    match state:
        case Retrying():
            return any(not fault.kind.retryable for fault in faults)
        case Replacing(strategy=Strategy.RECOVER_IN_PLACE):
            leaving = state.round.leaving
            to_replace = state.job.nodes_of(fault.rank for fault in faults if not fault.in_place)
            return bool(set(to_replace) - leaving)
        case _:
            return False


def _interrupt(
    state: State, faults: tuple[Fault, ...], now: float, config: RecoveryConfig, because: str
) -> Outcome:
    """Start an incident from any state: undo what must be undone, keep what is known."""
    job, before = state.job, None
    commands: tuple[Command, ...] = ()
    history: tuple[Attempt, ...] = ()
    stopped = False
    match state:
        case Idle() | Ended():
            pass
        case AwaitingBackup() | AwaitingPause() | AwaitingRemoval() | Migrating():
            turn = abandon_switch(state, Turn(job, state.round, now, config)).with_uuid_retired()
            job, commands = turn.job, turn.commands
            stopped = not isinstance(state, AwaitingBackup)
        case Pausing() | SwitchingNic() | StressTesting() | Resuming():
            turn = abandon_operation(state, Turn(job, state.round, now, config)).with_uuid_retired()
            job, commands, stopped = turn.job, turn.commands, True
        case Retrying() | Replacing() | Shrinking() | Growing() | Dumping():
            before = replace(state.round, stopped=True)
            history = (*before.history, Attempt(strategy_of(state), -1))
        case _:
            before = state.round
            history = before.history
    return begin(
        job,
        faults,
        now,
        config,
        because,
        before=before,
        history=history,
        stopped=stopped,
        commands=commands,
    )


def _with_faults(state: Undecided, faults: tuple[Fault, ...]) -> Undecided:
    return replace(state, round=_merged(state, faults))


def _merged(state: Undecided, faults: tuple[Fault, ...]) -> Round:
    return replace(state.round, faults=merge(state.round.faults, faults))


def _new_ranks(state: State, faults: tuple[Fault, ...]) -> list[int]:
    known = set() if isinstance(state, Idle | Ended) else set(state.round.ranks)
    return [fault.rank for fault in faults if fault.rank not in known]


def _describe(fault: Fault) -> str:
    return f"{NAMES[fault.kind]} of rank {fault.rank}" + (
        f" ({fault_line(fault.evidence)})" if fault.evidence else ""
    )
