"""Faults come in: which of them are news, and what the round that they begin breaks into.

Reports are events: one that is news begins a round. What the cluster sees is a level: whatever is
in its picture and has been handled by no round begins one, however often it was overlooked.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.clusterd.hot_switch import abandon_switch, begin_switch, sub_healthy_pod
from taskd.core.clusterd.job_config import ON, RecoveryConfig
from taskd.core.clusterd.job_facts import Attempt, Job, Round
from taskd.core.clusterd.operation_round import abandon_operation, tested
from taskd.core.clusterd.repair_progress import strategy_of
from taskd.core.clusterd.round_start import begin, faults_changed, open_round
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
    Replacing,
    Resuming,
    Retrying,
    Settling,
    Shrinking,
    State,
    StressTesting,
    SwitchingNic,
    Undecided,
)
from taskd.core.clusterd.turn import Turn
from taskd.model.clusterd import Command, LabelPodGroup
from taskd.model.codes import RecoverCode
from taskd.model.faults import Fault, SeenFault, merge
from taskd.model.strategies import Strategy


def faults_reported(
    state: State, faults: tuple[Fault, ...], now: float, config: RecoveryConfig
) -> Outcome:
    faults = tuple(fault for fault in faults if state.job.has(fault.rank))
    if not faults:
        return Outcome(state, because="no rank of the job is named")
    because = "; ".join(_describe(fault) for fault in faults)
    match state:
        case Exiting() | HandedOver() | Killing() | Ended():
            # Most likely the restart itself. If not, it is still true afterwards: say it again.
            because = "the whole job is already being stopped"
            return Outcome(state, because=because, answer=RecoverCode.ControllerEventCancel)
        case PreExiting():
            # Also of its neighbours, which we told to leave. The stop gets a uuid of its own.
            round_ = _merged(state, faults)
            turn = Turn(state.job, round_, now, config, f"the job has noticed: {because}")
            return open_round(turn.with_new_uuid())
        case _ if isinstance(state, Undecided) and not _new_ranks(state, faults):
            return Outcome(_with_faults(state, faults), because="these faults are known")
        case _:
            return _interrupt(state, faults, now, config, because)


def faults_seen(state: State, now: float, config: RecoveryConfig) -> Outcome:
    """`state.job.seen` is new: is there anything in it that nobody deals with?"""
    if isinstance(state, GivingUp):
        return Outcome(state, because="the whole job is already being stopped")
    faults = unhandled(state)
    because = "; ".join(f"the cluster sees {_describe(fault)}" for fault in faults)
    match state:
        case Idle(quiet=True):
            return Outcome(state, because="is looked at again later")
        case Idle():
            return _at_rest(state, faults, now, config, because)
        case Settling() if not _new_ranks(state, faults):
            state = replace(state, round=_merged(state, faults))
            return faults_changed(state, Turn(state.job, state.round, now, config))
        case _ if isinstance(state, Undecided) and not _new_ranks(state, faults):
            return Outcome(_with_faults(state, faults), because="nothing that is not known")
        case _ if faults and _changes_repair(state, faults):
            return _interrupt(state, faults, now, config, because)
        case _:
            return Outcome(state, because="nothing that is not being dealt with")


def look_again(state: Idle, now: float, config: RecoveryConfig) -> Outcome:
    """The time has come to see whether something is left, and to try again what has failed."""
    outcome = faults_seen(Idle(state.job), now, config)
    if not isinstance(outcome.state, Idle) or not state.job.paused:
        return outcome
    waiting = replace(outcome.state, again_at=now + config.again_after_s)
    under_way = state.job.labelling
    if under_way is not None and now < under_way.since + config.again_after_s:
        return Outcome(waiting, because="the mark `pause` is being taken back")
    return Outcome(
        waiting, (LabelPodGroup(ON, "on"),), "the mark `pause` is still to be taken back"
    )


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
    ailing = tuple(seen.as_fault() for seen in state.job.seen if _calls_for_dump(state.job, seen))
    if ailing:
        because = "a device is ailing, and the job is to leave in good order"
        return begin(state.job, ailing, now, config, because, leave_first=False)
    return Outcome(state, because="nothing to deal with")


def _calls_for_dump(job: Job, seen: SeenFault) -> bool:
    return (
        seen.sub_healthy
        and job.config.sub_health == "graceExit"
        and job.config.strategies[0] is Strategy.DUMP
        and not job.is_handled(seen)
    )


def _changes_repair(state: State, faults: tuple[Fault, ...]) -> bool:
    """In the middle of a repair, does this change what has to be done?"""
    if _new_ranks(state, faults):
        return True
    match state:
        case Retrying():
            return any(not fault.kind.retryable for fault in faults)
        case Replacing(strategy=Strategy.RECOVER_IN_PLACE):
            leaving = state.round.leaving
            doomed = state.job.nodes_of(fault.rank for fault in faults if not fault.in_place)
            return bool(set(doomed) - leaving)
        case _:
            return False


def _interrupt(
    state: State, faults: tuple[Fault, ...], now: float, config: RecoveryConfig, because: str
) -> Outcome:
    """Begin an incident, whatever goes on: take back what must be, carry over what is known."""
    job, before = state.job, None
    commands: tuple[Command, ...] = ()
    history: tuple[Attempt, ...] = ()
    told = False
    match state:
        case Idle() | Ended():
            pass
        case AwaitingBackup() | AwaitingPause() | AwaitingRemoval() | Migrating():
            turn = abandon_switch(state, Turn(job, state.round, now, config)).with_uuid_retired()
            job, commands = turn.job, turn.commands
            told = not isinstance(state, AwaitingBackup)
        case Pausing() | SwitchingNic() | StressTesting() | Resuming():
            turn = abandon_operation(state, Turn(job, state.round, now, config)).with_uuid_retired()
            job, commands, told = turn.job, turn.commands, True
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
        stopped=told,
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
    kind = {"0": "memory error", "1": "fault", "2": "network error"}[fault.kind]
    return f"{kind} of rank {fault.rank}" + (f" ({fault.evidence})" if fault.evidence else "")
