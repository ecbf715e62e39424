"""Carries out the manager's plan in this process: meet, give or take state, go on.

`mending.py` calls it in the training thread; the plan was made by `core/manager/repair_plan.py`.
Anything that goes wrong is raised as `Transient` and told to the manager, which makes a new plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from taskd.errors import PeerUnreachable, Transient
from taskd.model.ids import Rank, Step
from taskd.model.messages import Repair
from taskd.model.strategies import WireStrategy
from taskd.model.worker import LocalRepairDone
from taskd.runtime.clock import monotonic
from taskd.torch.copies import snapshot_file as page
from taskd.torch.copies.snapshots import Snapshots
from taskd.torch.groups.all_groups import Groups
from taskd.torch.groups.store import Meeting
from taskd.torch.guard import Guard
from taskd.torch.operations import nic_switch as switch
from taskd.torch.state import state_link as courier
from taskd.torch.state import transfer as state
from taskd.torch.state.protected import Protected
from taskd.torch.state.state_link import Wanted
from taskd.torch.state.transfer import Parcel


class CannotRepair(Transient):
    """The plan does not fit what is true here."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What this rank has: of which step, which shard, and which copies lie on its node."""

    rank: int
    shard: str
    step: int | None
    """None: no state at all, as in a replacement that has just been started."""
    kept: Protected
    snapshots: Snapshots | None


def carry_out(
    plan: Repair,
    mine: Holding,
    groups: Groups,
    default_store: str,
    at_the_meeting: Callable[[Meeting], None],
    guard: Guard | None,
) -> LocalRepairDone:
    """Returns when this rank stands at the plan's step and its groups are open."""
    begun = monotonic()
    if mine.step != plan.resume and any(mine.rank in others for others in plan.helpers.values()):
        raise CannotRepair(f"this rank holds step {mine.step}, and is to help with {plan.resume}")
    takers = [taker for taker, giver in plan.sources.items() if giver == mine.rank]
    parcel = _parcel(plan, mine) if takers else None
    helped = [taker for taker, others in plan.helpers.items() if mine.rank in others]
    if helped and state.is_large(mine.kept):
        parcel = parcel or Parcel(mine.kept, plan.resume, plan.incident, mine.shard)
        takers += helped
    timeout = timedelta(seconds=plan.timeout_s)
    store = plan.store or default_store
    if plan.strategy != WireStrategy.CONTINUE:
        ranks = [member.rank for member in plan.members]
        switch.settle(store, plan.incident, ranks, mine.rank, fresh=mine.step is None)
    members = tuple(sorted(member.rank for member in plan.members))
    place = f"{plan.incident}/"
    if guard is not None:
        try:
            guard.tell(store, place, timeout)
        except RuntimeError as error:
            raise CannotRepair(f"nobody can be told whose state is wrong: {error}") from error
    groups.meet(plan.incident, store, place, timeout, members)
    met = monotonic()
    try:
        if guard is not None:
            _be_told(guard, mine, groups.meeting)
        _exchange(plan, mine, groups.meeting, takers, parcel)
        at_the_meeting(groups.meeting)
    except RuntimeError as error:
        raise CannotRepair(groups.why or str(error)) from error
    if mine.snapshots is not None:
        mine.snapshots.forget_after(plan.resume)
    groups.open()
    return LocalRepairDone(plan.incident, Step(plan.resume), met - begun, monotonic() - met)


def _be_told(guard: Guard, mine: Holding, meeting: Meeting) -> None:
    """The groups may have broken before we heard that our state differs from others'."""
    right = guard.heard(meeting, mine.rank)
    if right is None or mine.step is None or mine.step <= right:
        return
    mine.kept.step = None
    if mine.snapshots is not None:
        mine.snapshots.distrust([mine.rank], right)
    raise CannotRepair(f"the state of this rank differs from its replica's since step {right}")


def _parcel(plan: Repair, mine: Holding) -> Parcel | None:
    """Sealed while the others are still on their way."""
    if mine.step != plan.resume:
        return None
    parcel = Parcel(mine.kept, plan.resume, plan.incident, mine.shard)
    parcel.seal()
    return parcel


def _exchange(
    plan: Repair, mine: Holding, meeting: Meeting, takers: list[Rank], parcel: Parcel | None
) -> None:
    aside = mine.step is not None
    given: list[page.Found] = []

    helpers = plan.helpers.get(Rank(mine.rank), ())
    givers = 1 + len(helpers)

    def ask(helper: Rank, lot: int, fetch: Callable[[courier.Receive], None]) -> None:
        courier.take(meeting, helper, Wanted(mine.shard, givers, lot), fetch)

    def read(receive: courier.Receive) -> None:
        asks = [partial(ask, helper) for helper in helpers]
        state.take(mine.kept, plan.resume, plan.incident, mine.shard, receive, aside, asks)

    def write(wanted: Wanted, send: courier.Send) -> None:
        kept = mine.snapshots
        copy = kept.find(wanted.shard, plan.resume) if kept is not None else None
        if parcel is not None and wanted.shard == mine.shard:
            parcel.give(send, wanted.givers, wanted.lot)
        elif copy is not None:
            given.append(copy)
            page.send(copy, send)
        else:
            raise CannotRepair(f"nothing here of shard {wanted.shard!r} at step {plan.resume}")

    source = plan.sources.get(Rank(mine.rank))
    if source is not None:
        courier.take(meeting, source, Wanted(mine.shard, givers), read)
    elif mine.step != plan.resume:
        _find_own(plan, mine, read)
    if not takers:
        return
    try:
        courier.give(meeting, mine.rank, takers, write)
    except PeerUnreachable:
        # Perhaps it was refused. The next plan must not count on it again.
        for copy in given:
            if mine.snapshots is not None and not page.is_sound(copy):
                mine.snapshots.refuse(copy)
        raise


def _find_own(plan: Repair, mine: Holding, read: Callable[[courier.Receive], None]) -> None:
    """Go back by a copy of our own."""
    found = mine.snapshots.find(mine.shard, plan.resume) if mine.snapshots is not None else None
    if mine.snapshots is None or found is None:
        raise CannotRepair(f"this rank holds step {mine.step}, the plan resumes at {plan.resume}")
    mine.snapshots.read(found, read)
