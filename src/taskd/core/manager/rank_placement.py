"""Which ranks need a new process, and on which node each of them gets one.

Used by `core/manager/strategy_actions.py` and `core/manager/growth.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from taskd.core.manager.job_view import RankView
from taskd.core.manager.repair_plan import Placement
from taskd.core.manager.states import Job
from taskd.core.rank_sets import RankSet
from taskd.model.ids import Incarnation, NodeRank


def lost_ranks(job: Job) -> list[Placement]:
    """The ranks that need a new process, as they last were."""
    return [placement_of(job.view.ranks[rank]) for rank in job.broken()]


def missing_ranks(job: Job) -> list[Placement]:
    """The same, with those that the job has gone on without."""
    views = job.view.ranks
    absent = (RankSet(views) - job.world) | job.broken()
    return [placement_of(views[rank]) for rank in absent]


def placement_of(view: RankView) -> Placement:
    return Placement(view.rank, view.node, view.incarnation, view.shard, view.replica)


def place(job: Job, wanted: Iterable[Placement], *, in_place: bool) -> list[Placement] | None:
    """Give each its next life, on its own node or, when that is gone, on a spare one."""
    wanted = list(wanted)
    nodes = job.view.nodes
    usable = {n for n in nodes if nodes[n].present and n not in job.bad_nodes}
    taken = {job.view.ranks[rank].node for rank in job.world} | {seat.node for seat in wanted}
    spares = [n for n in sorted(usable) if n not in taken and not in_place]
    moved: dict[NodeRank, NodeRank] = {}
    seats = []
    for seat in wanted:
        node = seat.node
        if node not in usable:
            if node not in moved:
                if not spares:
                    return None
                moved[node] = spares.pop(0)
            node = moved[node]
        seats.append(replace(seat, node=node, incarnation=Incarnation(seat.incarnation + 1)))
    return seats
