"""Every signal that a job can receive: type, actions and texts exactly as upstream has them."""

from __future__ import annotations

from collections.abc import Iterable

from taskd.core.clusterd.job_facts import Job, Round
from taskd.model.clusterd import Signal
from taskd.model.faults import Fault, FaultKind
from taskd.model.ids import NodeRank, Rank
from taskd.model.strategies import Strategy, WireStrategy

NETWORK_RETRY_TIMEOUT_S = 33
"""Sent to the job when a step is retried over a network that has just changed its routes."""
STRESS_PAUSE_TIMEOUT_S = 900

EXIT_NODES, RESTART_NODES = "fault_nodes_exit", "fault_nodes_restart"


def pre_exit(job: Job, round_: Round) -> Signal:
    return Signal(
        uuid=round_.uuid,
        incident=job.incident,
        type="preExitProcess",
        actions=("pre exit process",),
        faults=as_ordinary(round_.ranks),
        nodes=unreplaced(job, round_, job.nodes_of(round_.ranks)),
    )


def stop_train(job: Job, round_: Round) -> Signal:
    return Signal(
        uuid=round_.uuid,
        incident=job.incident,
        type="stopTrain",
        actions=("stop_train",),
        faults=as_they_are(round_.faults),
    )


def pause_train(job: Job, round_: Round, timeout_s: int) -> Signal:
    return Signal(
        uuid=round_.uuid,
        incident=job.incident,
        type="stopTrain",
        actions=("pause_train",),
        timeout_s=timeout_s,
    )


def save_and_exit(job: Job, round_: Round) -> Signal:
    return Signal(
        uuid=round_.uuid,
        incident=job.incident,
        type="saveAndExit",
        actions=("save_and_exit",),
        nodes=job.nodes_of(round_.ranks),
    )


def global_fault(job: Job, round_: Round, retryable: bool) -> Signal:
    """All lost ranks, including those that share a pod which must be replaced."""
    if retryable:
        kinds = {fault.kind for fault in round_.faults}
        return Signal(
            uuid=round_.uuid,
            incident=job.incident,
            type="globalFault",
            actions=("on_global_rank",),
            faults=as_they_are(round_.faults),
            timeout_s=NETWORK_RETRY_TIMEOUT_S if FaultKind.NETWORK in kinds else 0,
        )
    return Signal(
        uuid=round_.uuid,
        incident=job.incident,
        type="globalFault",
        actions=("on_global_rank", EXIT_NODES),
        faults=as_ordinary(round_.ranks),
        nodes=unreplaced(job, round_, round_.leaving),
    )


def change_strategy(
    job: Job, round_: Round, strategy: Strategy, also_leave: frozenset[NodeRank] = frozenset()
) -> Signal:
    """`also_leave`: nodes that the global fault did not list, because they might heal in place."""
    faults = as_ordinary(round_.ranks)
    nodes = job.nodes_of(round_.ranks)
    actions: tuple[str, ...] = ("change_strategy",)
    extra = ""
    match strategy:
        case Strategy.RETRY:
            faults = as_they_are(round_.faults)
        case Strategy.RECOVER_IN_PLACE:
            actions += (RESTART_NODES,)
            nodes = tuple(node for node in nodes if node not in round_.leaving)
            extra = strategy.value
        case Strategy.RECOVER:
            nodes = unreplaced(job, round_, round_.leaving)
        case Strategy.ELASTIC:
            extra = '{"scale-in-strategy": "DP"}'
        case Strategy.DUMP | Strategy.EXIT:
            pass
    if also_leave and strategy is not Strategy.EXIT:
        actions += (EXIT_NODES,)
    return _change(job, round_, strategy.on_wire, actions, faults, nodes, extra)


def upgrade(job: Job, round_: Round) -> Signal:
    nodes = job.nodes_of(round_.ranks)
    extra = '{"scale-out-strategy": "DP"}'
    faults = as_ordinary(round_.ranks)
    return _change(job, round_, WireStrategy.UPGRADE, ("change_strategy",), faults, nodes, extra)


def dump_exit(job: Job, round_: Round) -> Signal:
    nodes = job.nodes_of(round_.ranks)
    return _change(job, round_, WireStrategy.EXIT, ("change_strategy",), (), nodes, "dump_exit")


def continue_train(job: Job, round_: Round) -> Signal:
    return _change(job, round_, WireStrategy.CONTINUE, ("change_strategy",), (), (), "")


def migrate(job: Job, round_: Round) -> Signal:
    return _change(job, round_, WireStrategy.MIGRATION, ("change_strategy",), (), (), "")


def nodes_exit(job: Job, round_: Round, nodes: tuple[NodeRank, ...]) -> Signal:
    return Signal(
        uuid=round_.uuid,
        incident=job.incident,
        type="faultNodesExit",
        actions=(EXIT_NODES,),
        nodes=nodes,
    )


def kill_master(job: Job, round_: Round) -> Signal:
    return Signal(uuid=round_.uuid, incident=job.incident, type="killMaster")


def hot_switch(job: Job, round_: Round, action: str, ranks: tuple[Rank, ...] = ()) -> Signal:
    return Signal(
        uuid=round_.uuid,
        incident=job.incident,
        type="hot-switch",
        actions=(action,),
        faults=as_ordinary(ranks),
    )


def pause_agents(job: Job, round_: Round) -> Signal:
    return Signal(
        uuid=round_.uuid,
        incident=job.incident,
        type="pauseStartAgent",
        actions=("pause_start_agent",),
    )


def continue_agents(job: Job, round_: Round) -> Signal:
    return Signal(
        uuid=round_.uuid,
        incident=job.incident,
        type="continueStartAgent",
        actions=("continue_start_agent",),
    )


def as_they_are(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    return tuple(Fault(fault.rank, fault.kind) for fault in faults)


def as_ordinary(ranks: Iterable[Rank]) -> tuple[Fault, ...]:
    return tuple(Fault(rank) for rank in ranks)


def unreplaced(job: Job, round_: Round, nodes: Iterable[NodeRank]) -> tuple[NodeRank, ...]:
    """Of these nodes, those whose pod is still the one from the start of the incident."""
    origin = dict(round_.origin)
    return tuple(
        sorted(
            node
            for node in nodes
            if (pod := job.pod_at(node)) is not None and pod.uid == origin.get(node, pod.uid)
        )
    )


def _change(
    job: Job,
    round_: Round,
    strategy: WireStrategy,
    actions: tuple[str, ...],
    faults: tuple[Fault, ...],
    nodes: tuple[NodeRank, ...],
    extra: str,
) -> Signal:
    return Signal(
        uuid=round_.uuid,
        incident=job.incident,
        type="changeStrategy",
        actions=actions,
        faults=faults,
        strategy=strategy,
        nodes=nodes,
        extra=extra,
    )
