"""How nodes and ranks join: the first start, and how a restarted manager rebuilds its view.

The start handshake is Ascend's: an agent sends its restart budget (201) and receives permission
(210). Our own agents also send which workers run already. Until its view is complete, a restarted
manager decides nothing: faults and orders wait in Gathering.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from taskd.core.manager import clusterd_signals, strategy_actions
from taskd.core.manager.incident_record import add_faults, mark_phase, without_fault
from taskd.core.manager.job_view import NodeView, ProcessState, RankView, mark_alive
from taskd.core.manager.repair import growth
from taskd.core.manager.states import (
    FIRST_RANK,
    Awaiting,
    Ending,
    Gathering,
    Inherited,
    Job,
    JobConfig,
    Outcome,
    Repairing,
    Reported,
    Restarting,
    State,
    Stopping,
    Training,
    then,
    with_job,
)
from taskd.core.rank_sets import RankSet
from taskd.model.clusterd import FaultReport
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import Incarnation, NodeRank, Position, Rank, Role, agent, worker
from taskd.model.manager import Command, SendMessage
from taskd.model.messages import (
    AgentHello,
    AgentRegistered,
    Body,
    KeptAlive,
    Leave,
    Member,
    Park,
    ReplaceWorkers,
    RestartJob,
    RestartsLeft,
    StartWorkers,
    Unknown,
    WorkerHello,
    WorkerRegistered,
)

DEAD = ProcessState.DEAD
INCARNATIONS_PER_TERM = 10_000
"""More than any rank has in the term of one leader."""

# The first start


def start_requested(
    state: State, src: Position, remaining: int, now: float, config: JobConfig
) -> Outcome:
    """An agent requests permission to start its ranks."""
    node = node_of(src)
    job = state.job
    if remaining > 0 and not config.mindspore:
        job = replace(job, restarts_left=min(job.restarts_left, remaining))
    state = replace(state, job=job)
    requests = {**job.start_requests, node: remaining}
    if isinstance(state, Awaiting):
        job = replace(job, start_requests=requests)
        return strategy_actions.carry_out(job, state.order, now, config)
    if job.start_withheld:
        state = with_job(state, start_requests=requests)
        return Outcome(state, because=f"node {node} may not start yet: clusterd withholds starts")
    return permit_start(state, node)


def permit_start(state: State, node: NodeRank) -> Outcome:
    """Ascend's agents always get permission. Ours only start ranks that are in no repair plan."""
    job = state.job
    ours = job.view.nodes.get(node, NodeView(node)).ours
    views = job.view.on(node)
    if ours and (not views or any(view.process is not ProcessState.ABSENT for view in views)):
        return Outcome(state, because=f"the ranks of node {node} start with the next repair plan")
    state = with_job(state, permitted=job.permitted | {node})
    if not ours:
        # They do not confirm the start of their ranks: the permission counts as the start.
        view = mark_alive(job.view, RankSet(view.rank for view in views))
        state = with_job(state, view=view)
    if ours and job.attempt:
        members = tuple(Member(view.rank, node, view.incarnation) for view in views)
        late = RestartJob(job.incident, job.attempt, members, job.with_store().store)
        return Outcome(
            state, (SendMessage(agent(node), late),), f"node {node} joins attempt {job.attempt}"
        )
    start = StartWorkers(job.restarts_left)
    return Outcome(state, (SendMessage(agent(node), start),), f"node {node} may start")


def node_of(src: Position) -> NodeRank:
    return NodeRank(int(src.server_rank)) if src.server_rank.isdigit() else NodeRank(0)


# Hellos


def agent_hello(state: State, hello: AgentHello, now: float, config: JobConfig) -> Outcome:
    job = state.job
    left = job.restarts_left
    if hello.remaining > 0:
        left = min(left, max(0, hello.remaining - hello.attempt))
    bad_nodes = job.bad_nodes | ({hello.node} if hello.condemned else set())
    attempt = max(job.attempt, hello.attempt)
    if isinstance(state, Gathering):
        state = node_heard(state, hello.node)
    state = with_job(state, attempt=attempt, restarts_left=left, bad_nodes=bad_nodes)
    match state:
        case Awaiting():
            return strategy_actions.carry_out(state.job, state.order, now, config)
        case Training():
            return growth.offer_growth(state, now, config)
        case Repairing() | Restarting():
            return Outcome(state, _repeat_order(state, hello.node))
        case Ending():
            end = strategy_actions.end(state.job, state.exit_code, state.because, now, config)
            repeated = tuple(
                c for c in end.commands if isinstance(c, SendMessage) and c.to == agent(hello.node)
            )
            return Outcome(state, repeated)
        case _:
            return Outcome(state)


def _repeat_order(state: Repairing | Restarting, node: NodeRank) -> tuple[Command, ...]:
    """The agent may have missed the order, or may have been restarted since."""
    job = state.job
    here = tuple(
        Member(view.rank, node, view.incarnation)
        for view in job.view.on(node)
        if view.rank in job.world and view.process is ProcessState.STARTING
    )
    if not here:
        return ()
    if isinstance(state, Restarting):
        restart = RestartJob(job.incident, job.attempt, here, job.store)
        return (SendMessage(agent(node), restart),)
    return (SendMessage(agent(node), ReplaceWorkers(job.incident, here, job.store)),)


def worker_hello(state: State, hello: WorkerHello, config: JobConfig) -> Outcome:
    state = _adopt_progress(state, hello)
    job, sender = state.job, worker(hello.node, hello.rank)
    match state:
        case Repairing() if _is_member(state, hello):
            return Outcome(
                state, (SendMessage(sender, strategy_actions.repair_message(state, config)),)
            )
        case Stopping() if hello.rank in state.running and _needs_park_order(hello, job):
            return Outcome(
                state, (SendMessage(sender, Park(job.incident, "the order to park is repeated")),)
            )
        case _ if hello.rank not in job.world:
            leave = _send_away(job, hello.rank)
            because = f"rank {hello.rank} leaves: the job continues without it"
            return Outcome(state, (leave,), because)
        case _:
            return Outcome(state)


def _adopt_progress(state: State, hello: WorkerHello) -> State:
    """After a restart of the manager, the ranks know the current incident and who takes part."""
    known = state.job.incident
    if isinstance(state, Gathering) and hello.phase != "joining" and hello.incident >= known:
        world = RankSet(state.job.view.ranks) - hello.without
        # Ranks that disagree are in the middle of a repair: then no rank is left out.
        world = world if hello.incident > known else world | state.job.world
        state = with_job(state, world=world)
    return with_job(state, incident=max(known, hello.incident))


def _needs_park_order(hello: WorkerHello, job: Job) -> bool:
    """It has not received the order to park; or it is joining, and then it does not repeat a lost
    reply by itself."""
    return hello.incident < job.incident or hello.phase == "joining"


def _is_member(state: Repairing, hello: WorkerHello) -> bool:
    return hello.rank in state.unrepaired and any(
        member.rank == hello.rank and member.incarnation == hello.incarnation
        for member in state.plan.members
    )


def rank_started(state: State, rank: Rank, now: float, config: JobConfig) -> Outcome:
    match state:
        case Gathering():
            return Outcome(replace(state, job=without_fault(state.job, rank)))
        case Repairing() if not state.job.starting():
            return Outcome(replace(state, job=mark_phase(state.job, "forked", now)))
        case Restarting():
            unstarted = state.unstarted - {rank}
            if unstarted:
                return Outcome(replace(state, unstarted=unstarted))
            return strategy_actions.restarted(
                mark_phase(state.job, "forked", now), state.order, now, config
            )
        case _:
            return Outcome(state)


# The view of a manager that starts


def detect_restart(
    state: Gathering, src: Position, body: Body, now: float, config: JobConfig
) -> Gathering:
    """Called before each message is applied: does it show that ranks ran before this manager?"""
    if state.rebuilding or not _ran_before(state.job, src, body):
        return state
    deadline = min(state.deadline, now + config.rebuild_timeout_s)
    return replace(state, deadline=deadline, rebuilding=True, awaited=FIRST_RANK)


def check_complete(state: Gathering, now: float, config: JobConfig) -> Outcome:
    """Called after each message: is the view complete?"""
    if state.rebuilding and state.inherited is not None and state.inherited.unheard:
        # A node that was cut off may still run ranks that have moved to a node not heard yet.
        return Outcome(state)
    views = state.job.view.ranks
    for rank in state.job.world.from_rank(state.awaited):
        if _is_unknown(state, views[rank]):
            return Outcome(replace(state, awaited=rank))
    return view_complete(_without_absent(state, now, config), now, config)


def _is_unknown(state: Gathering, view: RankView) -> bool:
    silent = state.rebuilding and view.process is ProcessState.ALIVE and not view.said_hello
    # Of a rank that has moved, its former node only knows that it has ended.
    moved = state.inherited is not None and view.process is DEAD
    is_missing = view.process is ProcessState.ABSENT or moved
    return silent or (is_missing and not _all_nodes_known(state))


def _all_nodes_known(state: Gathering) -> bool:
    """Every node has said hello or is lost: a rank that is on none of them is lost."""
    inherited = state.inherited
    return state.rebuilding and inherited is not None and not inherited.unheard


def _without_absent(state: Gathering, now: float, config: JobConfig) -> Gathering:
    """The ranks that no node has named were on a node that is lost."""
    inherited, views = state.inherited, [state.job.view.ranks[r] for r in sorted(state.job.world)]
    absent = [view for view in views if view.process is ProcessState.ABSENT]
    gone = [view for view in views if view.process in (ProcessState.ABSENT, DEAD)]
    if inherited is None or not gone:
        return state
    reasons = inherited.lost
    last = max(reasons, default=NodeRank(0))
    faults = []
    for view in absent:
        unnamed = FaultCause.LOST, "no remaining node runs it"
        cause, evidence = reasons.get(view.node, reasons.get(last, unnamed))
        faults.append(Fault.of(view.rank, cause, evidence, now))
    # Its last incarnation is not known, or only an older one that has ended on its former node: the
    # next one must be newer than any that may still live.
    floor = Incarnation(INCARNATIONS_PER_TERM * (inherited.epoch - 1))
    homes = _homes(state.job, gone, reasons, config)
    newer = {
        view.rank: replace(
            view,
            incarnation=max(view.incarnation, floor),
            process=DEAD,
            node=homes[view.rank],
        )
        for view in gone
    }
    ranks = state.job.view.ranks.update(newer)
    job = replace(state.job, view=replace(state.job.view, ranks=ranks))
    return replace(state, job=add_faults(job, tuple(faults)) if faults else job)


def _homes(
    job: Job, gone: list[RankView], lost: Iterable[NodeRank], config: JobConfig
) -> dict[Rank, NodeRank]:
    """Where each rank counts as lost: where it was, unless other ranks have taken its place."""
    usable = {n for n, view in job.view.nodes.items() if view.present and n not in job.bad_nodes}
    taken = Counter(v.node for v in job.view.ranks.values() if v.process is ProcessState.ALIVE)
    homes = dict[Rank, NodeRank]()
    for view in gone:
        node = view.node
        if node in usable and taken[node] >= config.ranks_per_node:
            free = [n for n in sorted(usable) if taken[n] < config.ranks_per_node]
            node = next(iter((*free, *sorted(lost))), node)
        taken[node] += 1
        homes[view.rank] = node
    return homes


def nodes_registered(
    state: State, nodes: frozenset[NodeRank], epoch: int, now: float, config: JobConfig
) -> Outcome:
    if not isinstance(state, Gathering) or epoch < 2:
        return Outcome(state, because="this is the first manager of the job")
    heard = {node for node, view in state.job.view.nodes.items() if view.present}
    state = replace(state, inherited=Inherited(nodes - heard, epoch))
    because = f"epoch {epoch}: the job has {len(nodes)} nodes, {len(heard)} of them have joined"
    return then(Outcome(state, because=because), check_complete(state, now, config))


def node_found_lost(
    state: Gathering,
    node: NodeRank,
    cause: FaultCause,
    evidence: str,
    now: float,
    config: JobConfig,
) -> Outcome:
    inherited = state.inherited
    if inherited is None:
        return Outcome(state)
    lost = {**inherited.lost, node: (cause, evidence)}
    known = replace(inherited, unheard=inherited.unheard - {node}, lost=lost)
    return check_complete(replace(state, inherited=known, awaited=FIRST_RANK), now, config)


def node_heard(state: Gathering, node: NodeRank) -> Gathering:
    inherited = state.inherited
    if inherited is None:
        return state
    lost = {other: why for other, why in inherited.lost.items() if other != node}
    known = replace(inherited, unheard=inherited.unheard - {node}, lost=lost)
    return replace(state, inherited=known, awaited=FIRST_RANK)


def _ran_before(job: Job, src: Position, body: Body) -> bool:
    """The message is about ranks that this manager process never permitted to start."""
    if src.role not in (Role.AGENT, Role.WORKER) or node_of(src) in job.permitted:
        return False
    match body:
        case AgentHello(workers=workers, attempt=attempt):
            return bool(workers or attempt)
        case AgentRegistered() | WorkerRegistered() | RestartsLeft() | KeptAlive() | Unknown():
            return False
        case _:
            return True


def view_complete(state: Gathering, now: float, config: JobConfig) -> Outcome:
    deferred, settled_at = state.deferred, now + config.settled_s
    job = replace(state.job, rebuilt=state.rebuilding, settled_at=settled_at)
    outcome = Outcome(Training(job), because=f"all {len(job.world)} ranks are known")
    if job.faults:
        reports = (FaultReport(job.known_faults()),)
        # The deferred orders were given because of these faults: do not report them again.
        outcome = Outcome(
            Reported(job, now, now + config.report_timeout_s),
            () if deferred else reports,
            "a rank is lost",
        )
    strays = tuple(map(partial(_send_away, job), job.view.alive() - job.world))
    outcome = then(outcome, Outcome(outcome.state, strays))
    for signal in deferred:
        outcome = then(outcome, clusterd_signals.execute_signal(outcome.state, signal, now, config))
    return outcome


def _send_away(job: Job, rank: Rank) -> SendMessage:
    view = job.view.ranks[rank]
    because = "the job continues without this rank"
    return SendMessage(worker(view.node, rank), Leave(job.incident, because, view.incarnation))


def join_timed_out(state: Gathering, now: float, config: JobConfig) -> Outcome:
    views = state.job.view.ranks
    missing = tuple(r for r in sorted(state.job.world) if views[r].process is ProcessState.ABSENT)
    if state.rebuilding and state.inherited is not None:
        return view_complete(_without_absent(state, now, config), now, config)
    if state.rebuilding:
        silent = tuple(
            Fault.of(r, FaultCause.SILENT, "its node did not reconnect", now) for r in missing
        )
        job = add_faults(state.job, silent) if silent else state.job
        return view_complete(replace(state, job=job), now, config)
    nodes = sorted({views[rank].node for rank in missing})
    because = f"nodes {', '.join(map(str, nodes))} did not start their ranks in time"
    return strategy_actions.end(state.job, 1, because, now, config)
