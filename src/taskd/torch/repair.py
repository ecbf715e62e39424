"""Carries out the manager's plan in this process: meet, give or take state, go on.

`job.py` calls it in the training thread; the plan was made by `core/repair.py`. Anything that goes
wrong is raised as `Transient` and told to the manager, which makes a new plan.
"""

from __future__ import annotations

from datetime import timedelta

from taskd.edge.clock import monotonic
from taskd.errors import Transient
from taskd.model.ids import Rank, Step
from taskd.model.messages import Repair
from taskd.model.rank import Mended
from taskd.torch import courier, state
from taskd.torch.groups import Groups
from taskd.torch.protected import Protected


class CannotRepair(Transient):
    """The plan does not fit what is true here."""


def carry_out(
    plan: Repair, rank: int, held: int | None, groups: Groups, kept: Protected, default_store: str
) -> Mended:
    """`held` is the step whose state this rank holds; None: it holds none."""
    begun = monotonic()
    timeout = timedelta(seconds=plan.timeout_s)
    groups.meet(plan.incident, plan.store or default_store, f"{plan.incident}/", timeout)
    met = monotonic()
    try:
        _exchange(plan, rank, held, groups, kept)
    except RuntimeError as error:
        raise CannotRepair(groups.why or str(error)) from error
    groups.open()
    return Mended(plan.incident, Step(plan.resume), met - begun, monotonic() - met)


def _exchange(plan: Repair, rank: int, held: int | None, groups: Groups, kept: Protected) -> None:
    meeting = groups.meeting
    source = plan.sources.get(Rank(rank))
    if source is not None:
        aside = held is not None

        def read(receive: courier.Receive) -> None:
            state.take(kept, plan.resume, plan.incident, receive, aside)

        courier.take(meeting, source, read)
        return
    if held != plan.resume:
        raise CannotRepair(f"this rank holds step {held}, the plan resumes at {plan.resume}")
    takers = [taker for taker, giver in plan.sources.items() if giver == rank]
    if takers:
        parcel = state.Parcel(kept, plan.resume, plan.incident)
        courier.give(meeting, rank, takers, parcel.give)
