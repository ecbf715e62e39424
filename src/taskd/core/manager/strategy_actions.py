"""Which strategies are possible now, and how the manager carries out the one clusterd decides.

Called once all living ranks are parked. `repair_plan.py` makes the plan of a repair from the
situation at that moment, not from the situation at the fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from taskd.core.manager.incident_record import close_incident, mark_phase
from taskd.core.manager.job_view import ProcessState, mark_alive, mark_starting, node_lost
from taskd.core.manager.repair import growth
from taskd.core.manager.repair.rank_placement import lost_ranks, missing_ranks, place
from taskd.core.manager.repair.repair_plan import (
    Impossible,
    Placement,
    Plan,
    complete_step,
    needs,
    plan,
    shrink,
)
from taskd.core.manager.states import (
    Awaiting,
    Deciding,
    Dumping,
    Ending,
    Job,
    JobConfig,
    Outcome,
    Repairing,
    Restarting,
    then,
)
from taskd.core.rank_sets import RankSet
from taskd.errors import DO_NOT_REPLACE
from taskd.model.clusterd import ResultReport, Signal
from taskd.model.faults import FaultCause
from taskd.model.ids import EVERY_WORKER, Incarnation, NodeRank, Rank, Step, agent, worker
from taskd.model.manager import Command, SendMessage
from taskd.model.messages import (
    Body,
    Dump,
    EndJob,
    ExitAgent,
    Leave,
    Member,
    Repair,
    ReplaceWorkers,
    RestartAgent,
    RestartJob,
    StartWorkers,
)
from taskd.model.strategies import Strategy, WireStrategy, by_user_name

IN_PLACE = Strategy.RECOVER_IN_PLACE
ISOLATED, RETRY_FAILED, FAILED, DUMP_FAILED = 201, 405, 406, 407
"""Codes of ReportRecoverStatus, see model/codes.py."""
FAILURE_CODES: dict[str, int] = {
    WireStrategy.RETRY: RETRY_FAILED,
    WireStrategy.DUMP: DUMP_FAILED,
}


def feasible(job: Job, config: JobConfig) -> tuple[WireStrategy, ...]:
    """The strategies that clusterd can choose from; `recover` includes recover-in-place."""
    holders = job.holders() if job.protected() else ()
    lost = lost_ranks(job)
    needed = needs(job.view.ranks[rank] for rank in job.world)
    has_state = complete_step(holders, needed) is not None
    offered = []
    if job.hopeless:
        return (WireStrategy.DUMP, WireStrategy.EXIT) if has_state else (WireStrategy.EXIT,)
    if has_state and not lost:
        offered.append(WireStrategy.RETRY)
    if _can_replace(job, lost, config) and (has_state or job.restarts_left > 0):
        offered.append(WireStrategy.RECOVER)
    if has_state and isinstance(shrink(holders, lost), Plan):
        offered.append(WireStrategy.DOWNGRADE)
    if has_state:
        offered.append(WireStrategy.DUMP)
    return (*offered, WireStrategy.EXIT)


def carry_out(job: Job, order: Signal, now: float, config: JobConfig) -> Outcome:
    """Carry out clusterd's decision. All ranks are parked."""
    job = mark_phase(job, "decided", now)
    if (
        job.open_incident is not None
        and job.open_incident.dumped_step is not None
        and order.strategy == WireStrategy.EXIT
    ):
        return end_after_dump(job, now, config)
    if job.open_incident is not None:
        chosen = IN_PLACE if order.extra == IN_PLACE else by_user_name(order.strategy)
        job = replace(job, open_incident=replace(job.open_incident, strategy=chosen))
    match order.strategy:
        case WireStrategy.RETRY | WireStrategy.CONTINUE:
            if job.broken():
                return strategy_failed(
                    job, order, f"ranks {join_ranks(job.broken())} are lost", now, config
                )
            return _repair(job, order, plan(job.holders()), now, config)
        case WireStrategy.RECOVER:
            return _recover(job, order, now, config)
        case WireStrategy.DOWNGRADE:
            job = growth.note_shrink(job, now, config)
            return _repair(job, order, shrink(job.holders(), lost_ranks(job)), now, config)
        case WireStrategy.UPGRADE:
            return _grow(job, order, now, config)
        case WireStrategy.DUMP:
            return _dump(job, order, now, config)
        case WireStrategy.EXIT:
            known = job.open_incident.because if job.open_incident is not None else ""
            why = known or order.because or "clusterd decided to end the job"
            if job.bad_nodes:
                nodes = join_ranks(job.bad_nodes)
                why = f"nodes {nodes} have failed a stress test, or compute wrong gradients"
            if job.hopeless:
                return end(job, _exit_code(job), job.hopeless, now, config)
            return end(job, 1, f"no strategy is left: {why}", now, config)
        case other:
            return strategy_failed(job, order, f"unknown strategy {other!r}", now, config)


def end_after_dump(job: Job, now: float, config: JobConfig) -> Outcome:
    """The surviving ranks have written a checkpoint; the next start continues from it."""
    step = job.open_incident.dumped_step if job.open_incident is not None else None
    because = (
        f"step {step} is written to {config.dump_dir}: start the job again to continue from it"
    )
    if job.hopeless:
        because = f"{job.hopeless}; {because}"
    return end(job, _exit_code(job), because, now, config)


def _exit_code(job: Job) -> int:
    return DO_NOT_REPLACE if job.hopeless and not job.may_pass else 1


def strategy_failed(
    job: Job, order: Signal, because: str, now: float, config: JobConfig
) -> Outcome:
    """The strategy failed; clusterd falls back to the next one."""
    code = FAILURE_CODES.get(order.strategy, FAILED)
    if job.open_incident is not None:
        job = replace(job, open_incident=replace(job.open_incident, because=because))
    report = ResultReport(code, order.strategy, uuid=job.uuid, info=because)
    return Outcome(Deciding(job, now + config.decide_timeout_s), (report,), because)


def recovered(
    job: Job, order: Signal, now: float, config: JobConfig, outcome: str = "recovered"
) -> Outcome:
    because = f"incident {job.incident} is over: {len(job.world)} ranks train"
    why = because
    if outcome == "restarted":
        because += ", all of them restarted; steps since the last checkpoint are done again"
        why = job.open_incident.because if job.open_incident is not None else ""
    # Ascend's clusterd expects ranks only in the report of a shrink.
    missing = () if job.ascend else tuple(RankSet(job.view.ranks) - job.world)
    report = ResultReport(0, order.strategy, missing, uuid=job.uuid, info=because)
    job = replace(
        close_incident(job, outcome, why or because),
        faults={},
        stalled=False,
        settled_at=now + config.settled_s,
    )
    training = growth.training_state(job, now, config)
    return then(Outcome(training, (report,), because), growth.offer_growth(training, now, config))


def restarted(job: Job, order: Signal, now: float, config: JobConfig) -> Outcome:
    """For clusterd this is a recovery; `taskd status` shows that steps may be lost."""
    return recovered(job, order, now, config, "restarted")


def end(job: Job, exit_code: int, because: str, now: float, config: JobConfig) -> Outcome:
    """End the job: all agents are ordered to end."""
    job = close_incident(job, "ended" if exit_code else "finished", because)
    staying = frozenset(node for node, view in job.view.nodes.items() if view.present)
    messages: tuple[Command, ...] = tuple(
        SendMessage(
            agent(node), EndJob(exit_code, because) if job.view.nodes[node].ours else ExitAgent()
        )
        for node in sorted(staying)
        # An Ascend agent ends by itself after its ranks; this order would make it fail.
        if job.view.nodes[node].ours or exit_code
    )
    ending = Ending(job, exit_code, because, staying, now + config.end_timeout_s)
    return Outcome(ending, messages, because)


def dismiss_nodes(job: Job, order: Signal, config: JobConfig) -> tuple[Job, tuple[Command, ...]]:
    """Nodes leave if the cluster will bring them back; otherwise their agents are still needed."""
    if not (config.rescheduling or job.ascend):
        return job, ()
    named = [node for node in order.nodes if node in job.view.nodes]
    leaving = [node for node in named if not _has_come_back(job, node)]
    view = job.view
    for node in leaving:
        view = node_lost(view, node, FaultCause.LOST, "clusterd ordered its node to leave").view
    messages = tuple(SendMessage(agent(node), ExitAgent()) for node in leaving)
    return replace(job, view=view), messages


def _has_come_back(job: Job, node: NodeRank) -> bool:
    """The node was lost in this incident; the one that has joined since then is its successor."""
    causes = {job.faults[view.rank].cause for view in job.view.on(node) if view.rank in job.faults}
    lost = {FaultCause.LOST, FaultCause.SILENT}
    return job.view.nodes[node].present and bool(causes) and causes <= lost


def repair_message(state: Repairing, config: JobConfig) -> Repair:
    return Repair(
        state.job.incident,
        state.order.strategy,
        state.plan.members,
        state.plan.resume,
        state.plan.sources,
        state.job.store,
        config.repair_timeout_s,
        tuple(RankSet(state.job.view.ranks) - state.job.world),
        state.plan.helpers,
        own_sources=state.plan.own_sources,
        own_since=state.plan.own_since,
        shards=state.plan.shards,
        turn=state.plan.turn,
        sections=state.plan.sections,
    )


# The strategies


def _recover(job: Job, order: Signal, now: float, config: JobConfig) -> Outcome:
    in_place = order.extra == IN_PLACE
    placements = place(job, lost_ranks(job), in_place=in_place)
    if placements is None and in_place:
        return strategy_failed(job, order, "the node of a lost rank is lost, too", now, config)
    if placements is None:
        deadline = now + config.node_timeout_s
        return Outcome(Awaiting(job, order, deadline), because="waiting for a node to come back")
    made = plan(job.holders(), placements)
    if not job.protected():
        return _restart(job, order, now, config)
    if isinstance(made, Impossible):
        return _restart(job, order, now, config, made.because)
    if job.stalled and job.restarts_left > 0:
        why = "no rank continued after the last repair, and the next would end in the same way"
        return _restart(job, order, now, config, why)
    return _repair(job, order, made, now, config)


def _grow(job: Job, order: Signal, now: float, config: JobConfig) -> Outcome:
    placements = place(job, missing_ranks(job), in_place=False)
    if placements is None and job.offered:
        job = growth.note_growth(job, now)
        return strategy_failed(job, order, "the node that came back is lost again", now, config)
    if placements is None:
        deadline = now + config.node_timeout_s
        return Outcome(Awaiting(job, order, deadline), because="waiting for a node to come back")
    return _repair(
        growth.note_growth(job, now), order, plan(job.holders(), placements), now, config
    )


def _repair(
    job: Job, order: Signal, made: Plan | Impossible, now: float, config: JobConfig
) -> Outcome:
    if isinstance(made, Impossible):
        return strategy_failed(job, order, made.because, now, config)
    isolated = tuple(sorted(job.world - {member.rank for member in made.members}))
    job = replace(
        job.with_store(),
        world=RankSet(member.rank for member in made.members),
        view=mark_starting(job.view, _locations(made.replaced)),
        faults={r: f for r, f in job.faults.items() if r not in isolated},
        plan_sent=True,
    )
    state = Repairing(job, order, made, job.world, job.world, now + config.repair_timeout_s)
    # The processes first: starting them takes longest.
    commands: list[Command] = [
        SendMessage(agent(node), ReplaceWorkers(job.incident, members, job.store))
        for node, members in _by_node(made.replaced).items()
    ]
    commands.append(SendMessage(EVERY_WORKER, repair_message(state, config)))
    alive = (rank for rank in isolated if job.view.ranks[rank].process is ProcessState.ALIVE)
    leaving = dict.fromkeys((*made.leaving, *alive))
    commands += (_leave(job, rank, made.because) for rank in leaving)
    if order.strategy == WireStrategy.DOWNGRADE:
        commands.append(
            ResultReport(ISOLATED, order.strategy, isolated, uuid=job.uuid, info=made.because)
        )
    return Outcome(state, tuple(commands), made.because)


def _leave(job: Job, rank: Rank, because: str) -> SendMessage:
    view = job.view.ranks[rank]
    return SendMessage(worker(view.node, rank), Leave(job.incident, because, view.incarnation))


def _restart(job: Job, order: Signal, now: float, config: JobConfig, missing: str = "") -> Outcome:
    """`missing`: why ranks that could be repaired are restarted instead."""
    if job.restarts_left < 1:
        return strategy_failed(job, order, "the restart budget is used up", now, config)
    views = job.view.ranks
    wanted = [Placement(rank, view.node, view.incarnation) for rank, view in sorted(views.items())]
    placements = place(job, wanted, in_place=False)
    if placements is None:
        # A node that has never joined starts its ranks with this attempt when it joins.
        late = {rank for rank, view in views.items() if view.process is ProcessState.ABSENT}
        placements = place(
            job, [placement for placement in wanted if placement.rank not in late], in_place=False
        )
    if placements is None:
        return strategy_failed(
            job, order, "a node is missing, and no spare node is left", now, config
        )
    members = tuple(
        Member(placement.rank, placement.node, placement.incarnation) for placement in placements
    )
    job = replace(
        job.with_store(),
        world=RankSet(views),
        attempt=job.attempt + 1,
        restarts_left=job.restarts_left - 1,
        plan_sent=True,
        view=mark_starting(job.view, _locations(members)),
    )
    nodes = job.view.nodes
    messages = tuple(
        SendMessage(agent(node), _restart_message(job, node, of_node))
        for node, of_node in _by_node(members).items()
    )
    job = replace(job, start_requests={}, permitted=job.permitted | set(job.start_requests))
    # Ascend's agents do not confirm that they have started their ranks.
    unstarted = RankSet(member.rank for member in members if nodes[member.node].ours)
    state = Restarting(job, order, unstarted, now + config.restart_timeout_s)
    because = f"attempt {job.attempt}: all {len(members)} ranks restart"
    if missing:
        because = f"{because} from the script's last checkpoint: {missing}"
        if job.open_incident is not None:
            job = replace(job, open_incident=replace(job.open_incident, because=missing))
            state = replace(state, job=job)
    outcome = Outcome(state, messages, because)
    if unstarted:
        return outcome
    job = replace(job, view=mark_alive(job.view, RankSet(_locations(members))))
    return then(outcome, restarted(job, order, now, config))


def _restart_message(job: Job, node: NodeRank, members: tuple[Member, ...]) -> Body:
    if job.view.nodes[node].ours:
        return RestartJob(job.incident, job.attempt, members, job.store)
    if node in job.start_requests:
        # An agent of Ascend that has no ranks yet waits for this message, and for no other.
        return StartWorkers(job.restarts_left)
    return RestartAgent(job.restarts_left)


def _dump(job: Job, order: Signal, now: float, config: JobConfig) -> Outcome:
    step = _dump_step(job)
    if step is None:
        return strategy_failed(
            job, order, "the surviving ranks do not hold a complete step", now, config
        )
    # A rank at another step also writes if it can reach a copy: perhaps that of a lost rank.
    writers = tuple(h for h in job.holders() if step in {at for _, at in h.offers()})
    members = tuple(Member(h.rank, h.node, h.incarnation) for h in writers)
    job = job.with_store()
    dump = Dump(job.incident, step, config.dump_dir, members, job.store)
    message = SendMessage(EVERY_WORKER, dump)
    unwritten = RankSet(member.rank for member in members)
    state = Dumping(job, order, unwritten, now + config.dump_timeout_s)
    return Outcome(state, (message,), f"{len(members)} ranks write step {step}")


# Helpers


def _can_replace(job: Job, lost: list[Placement], config: JobConfig) -> bool:
    if job.fruitless >= config.fruitless_limit:
        return False
    return config.rescheduling or place(job, lost, in_place=False) is not None


def _dump_step(job: Job) -> Step | None:
    if not job.protected():
        return None
    needed = needs(job.view.ranks[rank] for rank in job.world)
    return complete_step(job.holders(), needed)


def _locations(members: Iterable[Member]) -> dict[Rank, tuple[NodeRank, Incarnation]]:
    return {member.rank: (member.node, member.incarnation) for member in members}


def _by_node(members: Iterable[Member]) -> dict[NodeRank, tuple[Member, ...]]:
    grouped: dict[NodeRank, tuple[Member, ...]] = {}
    for member in members:
        grouped[member.node] = (*grouped.get(member.node, ()), member)
    return grouped


def join_ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
