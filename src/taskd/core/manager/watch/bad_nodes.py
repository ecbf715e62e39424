"""Nodes on which no rank is placed any more, because a device there is broken.

A stress test finds such a node, or a device that computes wrong gradients again and again. Only
where no cluster replaces nodes; there it is the cluster's to decide. Called by `machine.py` and
`rank_faults.py`.
"""

from __future__ import annotations

from taskd.core.manager.states import JobConfig, Outcome, State, with_job
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import NodeRank, agent
from taskd.model.manager import SendMessage
from taskd.model.messages import NodeMarkedBad


def mark(state: State, nodes: frozenset[NodeRank], evidence: str, config: JobConfig) -> Outcome:
    if config.rescheduling or state.job.ascend:
        return Outcome(state, because="the cluster replaces these nodes")
    bad_nodes = state.job.bad_nodes | nodes
    why = f"nodes {sorted(nodes)} are not used any more: {evidence}"
    # Their agents repeat it to a restarted manager.
    messages = tuple(SendMessage(agent(node), NodeMarkedBad(evidence)) for node in sorted(nodes))
    return Outcome(with_job(state, bad_nodes=bad_nodes), messages, why)


def isolate_device(state: State, fault: Fault, config: JobConfig) -> Outcome:
    """After a wrong gradient: a spare node takes over, if there is one.

    Otherwise a new process on the same device gets one chance, because a bit may flip once in a
    healthy device. The second time the node is marked as bad.
    """
    job, rank = state.job, fault.rank
    node = job.view.ranks[rank].node
    used = {view.node for view in job.view.ranks.values()}
    has_spare = any(
        view.present and one not in used | job.bad_nodes for one, view in job.view.nodes.items()
    )
    former = [old for record in job.past_incidents for old in record.faults]
    former += job.known_faults()  # of its former process, if that was replaced just now
    again = any((old.rank, old.cause) == (rank, FaultCause.MISCOMPUTED) for old in former)
    if not (has_spare or again):
        return Outcome(state)
    return mark(state, frozenset({node}), f"rank {rank}: {fault.evidence}", config)
