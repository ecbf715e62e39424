"""The ends of a round: success, or the job exits, is handed to the scheduler, or is killed.

Without a cluster there is no scheduler to hand the job to: every failure ends in an order to exit.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.clusterd import signals
from taskd.core.clusterd.job_config import ON
from taskd.core.clusterd.round.turn import Turn
from taskd.core.clusterd.states import Ended, Exiting, HandedOver, Idle, Killing, Outcome
from taskd.model.clusterd import (
    AnnotatePodGroup,
    LabelPodGroup,
    RemoveFaultJobInfo,
    ResetOperation,
    Signal,
    WriteResetConfig,
)
from taskd.model.codes import RecoverCode

STATUS = "ProcessRecoverStatus"


def succeed(turn: Turn, status: str) -> Outcome:
    """The job trains again. The faults of this round do not start another one while still seen;
    those of a replacement do."""
    job, ranks = turn.job, turn.round.ranks
    pods = {"", *dict(turn.round.origin).values()}
    handled_now = {
        (seen.rank, seen.code) for seen in job.seen if seen.rank in ranks and seen.pod in pods
    }
    turn = turn.with_uuid_retired().with_job(handled=job.handled | handled_now)
    if status:
        turn = turn.with_cluster_commands(AnnotatePodGroup(STATUS, status))
    turn = turn.with_cluster_commands(WriteResetConfig(ResetOperation.CLEAR), RemoveFaultJobInfo())
    return turn.go_to(Idle(turn.job))


def exit_job(turn: Turn, order: Signal) -> Outcome:
    order = replace(order, because=turn.because)
    if not turn.job.config.cluster:
        return turn.go_to(Ended(turn.with_uuid_retired().job, order, turn.cause), order)
    if turn.job.config.platform:
        # The platform watches the pods itself.
        return hand_over(turn, order, ResetOperation.RESTART_ALL)
    deadline = turn.now + turn.config.exit_timeout_s
    return turn.go_to(Exiting(turn.job, turn.round, order, turn.cause, deadline), order)


def give_up(turn: Turn, cause: RecoverCode = RecoverCode.OK) -> Outcome:
    """No answer, or no strategy left: the scheduler restarts the job."""
    turn = replace(turn, cause=cause)
    order = signals.dump_exit(turn.job, turn.round)
    if not turn.job.config.cluster:
        return exit_job(turn, order)
    return hand_over(turn, order, ResetOperation.CLEAR)


def hand_over(turn: Turn, order: Signal | None, reset: ResetOperation) -> Outcome:
    """`order` is the order to exit; None if the job does not need it or has received it."""
    turn = turn.with_job(paused=True).with_commands(
        WriteResetConfig(reset), LabelPodGroup(ON, "pause")
    )
    left_running = turn.job.phase != "Running"
    deadline = turn.now + turn.config.running_timeout_s
    state = HandedOver(turn.job, turn.round, order, turn.cause, left_running, deadline)
    return turn.go_to(state) if order is None else turn.go_to(state, order)


def take_back(turn: Turn) -> Outcome:
    """The scheduler has restarted the job: all its processes are new, on other devices."""
    turn = turn.with_uuid_retired().with_job(handled=frozenset())
    return turn.go_to(Idle(turn.job), LabelPodGroup(ON, "on"), RemoveFaultJobInfo())


def kill(turn: Turn, cause: RecoverCode = RecoverCode.OK) -> Outcome:
    if not turn.job.config.cluster:
        return give_up(turn, cause)
    turn = replace(turn, cause=cause)
    if turn.job.paused:
        turn = turn.with_commands(LabelPodGroup(ON, "on"))
    order = signals.kill_master(turn.job, turn.round)
    deadline = turn.now + turn.config.kill_timeout_s
    return turn.go_to(Killing(turn.job, turn.round, order, cause, deadline), order)


def killed(turn: Turn) -> Outcome:
    """Remaining faults are checked again only after the job had time to restart."""
    again_at = turn.now + turn.config.again_after_s
    closing = (WriteResetConfig(ResetOperation.CLEAR), RemoveFaultJobInfo())
    return turn.go_to(Idle(turn.with_uuid_retired().job, again_at, quiet=True), *closing)
