"""Which ranks need a new process, and on which node each of them is placed.

Used by `strategy_actions.py` and `growth.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from taskd.core.manager.job_view import RankView
from taskd.core.manager.repair.repair_plan import Placement
from taskd.core.manager.states import Job
from taskd.core.rank_sets import RankSet
from taskd.model.ids import Incarnation, NodeRank


def lost_ranks(job: Job) -> list[Placement]:
    """The ranks that need a new process, with their last node and incarnation."""
    return [placement_of(job.view.ranks[rank]) for rank in job.broken()]


def missing_ranks(job: Job) -> list[Placement]:
    """The lost ranks, and those that the job trains without since it has shrunk."""
    views = job.view.ranks
    absent = (RankSet(views) - job.world) | job.broken()
    return [placement_of(views[rank]) for rank in absent]


def placement_of(view: RankView) -> Placement:
    return Placement(
        view.rank, view.node, view.incarnation, view.shard, view.replica, view.own_since
    )


def place(job: Job, wanted: Iterable[Placement], *, in_place: bool) -> list[Placement] | None:
    """The next incarnation of each rank, on its own node or, if that is lost, on a spare node.

    None: there are not enough nodes.
    """
    wanted = list(wanted)
    nodes = job.view.nodes
    usable = {n for n in nodes if nodes[n].present and n not in job.bad_nodes}
    used = {job.view.ranks[rank].node for rank in job.world} | {
        placement.node for placement in wanted
    }
    spares = [n for n in sorted(usable) if n not in used and not in_place]
    moved: dict[NodeRank, NodeRank] = {}
    placements = []
    for placement in wanted:
        node = placement.node
        if node not in usable:
            if node not in moved:
                if not spares:
                    return None
                moved[node] = spares.pop(0)
            node = moved[node]
        placements.append(
            replace(placement, node=node, incarnation=Incarnation(placement.incarnation + 1))
        )
    return placements
