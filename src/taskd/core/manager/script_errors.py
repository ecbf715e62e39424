"""Which errors of a training script end the job, because another start would only repeat them.

The same exception at the same place twice in a row, without progress in between, is such an error.
Before the first step, once is enough for an exception that cannot depend on the moment: a mistake
in the source, or the same exception in all ranks.

Not judged: a fault in which a rank died without an exception (it was killed), and an exception
that only says that another rank is gone.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.manager.job_view import ProcessState, RankView
from taskd.core.manager.states import Job, LastError
from taskd.model.faults import FaultCause
from taskd.model.ids import Rank
from taskd.model.messages import ScriptError

IN_SOURCE = {"SyntaxError", "ImportError"}
"""Mistakes that every rank would make at any time."""
MAY_PASS = {"OSError", "MemoryError", "OutOfMemoryError", "SystemExit", "KeyboardInterrupt"}
"""Even if all ranks raise one of these at their start, the next start may be different."""
_OF_THE_SCRIPT = {"TypeError", "ValueError", "AttributeError", "NameError", "NotImplementedError"}
"""No rank raises one of these because another one is gone, whatever their text says."""
_OF_A_PEER = {"ConnectionError", "DistNetworkError", "DistBackendError", "DistStoreError"}
_PEER_PLACES = ("/torch/distributed/",)
_PEER_WORDS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")


def judge(job: Job, has_progress: bool) -> Job:
    """Compare the errors of this fault with those before it. Called once all ranks are parked."""
    job = replace(job, hopeless="")
    views = [job.view.ranks[rank] for rank in _by_time(job)]
    found = next((v for v in views if v.error is not None and not is_symptom(v.error)), None)
    killed = any(view.error is None for view in views)
    if killed and _all_exited(job) and not all(map(_is_over, views)):
        # Its replacement is on its way, and has perhaps failed again: the end of it will show.
        return replace(job, last_error=None) if has_progress else job
    if found is None or found.error is None or killed or not _all_exited(job):
        return replace(job, last_error=None)
    error, before = found.error, None if has_progress else job.last_error
    # Ranks that fail in the same attempt may be reported one after another.
    newest = max(view.error_of for view in views)
    is_repeated = before is not None and error.same_as(before.error) and newest > before.incarnation
    is_first = not has_progress and not job.attempt and not job.best and not newest
    why = ""
    if is_repeated:
        why = "the same error twice, without a step in between"
    elif is_first and IN_SOURCE & set(error.types):
        why = "an error in the source, before any step was reported"
    elif is_first and not MAY_PASS & set(error.types) and _all_failed(job, error):
        why = "the same error in all ranks, before any step was reported"
    if why:
        may_pass = bool(MAY_PASS & set(error.types))
        hopeless = f"{error}: rank {found.rank} failed with {why}"
        return replace(job, hopeless=hopeless, may_pass=may_pass)
    if before is None or not error.same_as(before.error):
        job = replace(job, last_error=LastError(error, newest))
    return job


def is_symptom(error: ScriptError) -> bool:
    """Whether the exception only says that another rank is gone."""
    if _OF_THE_SCRIPT & set(error.types):
        return False
    return (
        bool(_OF_A_PEER & set(error.types))
        or any(place in error.place for place in _PEER_PLACES)
        or any(words in error.message for words in _PEER_WORDS)
    )


def _is_over(view: RankView) -> bool:
    return view.process is ProcessState.DEAD


def _by_time(job: Job) -> list[Rank]:
    return sorted(job.faults, key=lambda rank: (job.faults[rank].seen_at, rank))


def _all_exited(job: Job) -> bool:
    return all(fault.cause is FaultCause.EXITED for fault in job.faults.values())


def _all_failed(job: Job, error: ScriptError) -> bool:
    views = (job.view.ranks[rank] for rank in job.world)
    return all(view.error is not None and error.same_as(view.error) for view in views)
