"""The ends of a round: it worked, or the job is told to exit, handed to the scheduler, or killed.

With no cluster behind the job there is nobody to hand it to: every way down is one order to exit.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.clusterd import signals
from taskd.core.clusterd.job_config import ON
from taskd.core.clusterd.states import Ended, Exiting, HandedOver, Idle, Killing, Outcome
from taskd.core.clusterd.turn import Matter
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


def succeed(matter: Matter, status: str) -> Outcome:
    """The job trains again. What the round dealt with begins no other while it is still seen."""
    job, ranks = matter.job, matter.round.ranks
    dealt_with = {(seen.rank, seen.code) for seen in job.seen if seen.rank in ranks}
    matter = matter.retired().of_job(handled=job.handled | dealt_with)
    if status:
        matter = matter.in_cluster(AnnotatePodGroup(STATUS, status))
    matter = matter.in_cluster(WriteResetConfig(ResetOperation.CLEAR), RemoveFaultJobInfo())
    return matter.to(Idle(matter.job))


def exit_job(matter: Matter, order: Signal) -> Outcome:
    if not matter.job.config.cluster:
        return matter.to(Ended(matter.retired().job, order, matter.cause), order)
    if matter.job.config.platform:
        # The platform watches the pods itself.
        return hand_over(matter, order, ResetOperation.RESTART_ALL)
    deadline = matter.now + matter.config.exit_timeout_s
    return matter.to(Exiting(matter.job, matter.round, order, matter.cause, deadline), order)


def give_up(matter: Matter, cause: RecoverCode = RecoverCode.OK) -> Outcome:
    """No answer, or no way: the scheduler restarts the job."""
    matter = replace(matter, cause=cause)
    order = signals.dump_exit(matter.job, matter.round)
    if not matter.job.config.cluster:
        return exit_job(matter, order)
    return hand_over(matter, order, ResetOperation.CLEAR)


def hand_over(matter: Matter, order: Signal | None, reset: ResetOperation) -> Outcome:
    """`order` tells the job to exit; None when it need not, or has heard it."""
    matter = matter.of_job(paused=True).doing(WriteResetConfig(reset), LabelPodGroup(ON, "pause"))
    left_running = matter.job.phase != "Running"
    deadline = matter.now + matter.config.running_timeout_s
    state = HandedOver(matter.job, matter.round, order, matter.cause, left_running, deadline)
    return matter.to(state) if order is None else matter.to(state, order)


def take_back(matter: Matter) -> Outcome:
    """The scheduler has restarted the job: all its processes are new, and on other devices."""
    matter = matter.retired().of_job(handled=frozenset())
    return matter.to(Idle(matter.job), LabelPodGroup(ON, "on"), RemoveFaultJobInfo())


def kill(matter: Matter, cause: RecoverCode = RecoverCode.OK) -> Outcome:
    if not matter.job.config.cluster:
        return give_up(matter, cause)
    matter = replace(matter, cause=cause)
    if matter.job.paused:
        matter = matter.doing(LabelPodGroup(ON, "on"))
    order = signals.kill_master(matter.job, matter.round)
    deadline = matter.now + matter.config.kill_timeout_s
    return matter.to(Killing(matter.job, matter.round, order, cause, deadline), order)


def killed(matter: Matter) -> Outcome:
    """What is left of the fault is looked at again only once the job had time to come back."""
    again_at = matter.now + matter.config.again_after_s
    closing = (WriteResetConfig(ResetOperation.CLEAR), RemoveFaultJobInfo())
    return matter.to(Idle(matter.retired().job, again_at, quiet=True), *closing)
