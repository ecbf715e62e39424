"""The manager's state machine: how it reacts to messages of nodes and ranks and to clusterd.

`step` is the only entry point. The states are in `states.py`, the view of nodes and ranks in
`job_view.py`, the open incident in `incident_record.py`, the reactions in `joining.py`,
`rank_faults.py`, `clusterd_signals.py`, `parking.py`, `strategy_actions.py`, `growth.py` and
`resume.py`. `LEGAL` lists the allowed transitions: the simulator fails when `step` takes one that
is not listed, or never takes one that is.

Stale messages are dropped in one place: `_handle_message` ignores what belongs to an older
incident or to a former incarnation of a rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from taskd.core.manager import clusterd_signals, joining, rank_faults, strategy_actions
from taskd.core.manager.job_view import (
    RankFinished,
    RankStarted,
    StaleIncarnation,
    ViewUpdate,
    apply_message,
    node_lost,
)
from taskd.core.manager.repair import growth, parking, resume, shard_keepers
from taskd.core.manager.states import (
    Awaiting,
    Deciding,
    Dumping,
    Ended,
    Ending,
    Gathering,
    Job,
    JobConfig,
    Outcome,
    Paused,
    Repairing,
    Reported,
    Restarting,
    Resuming,
    State,
    Stopping,
    Suspecting,
    Training,
    initial_job,
    then,
    with_job,
)
from taskd.core.manager.strategy_actions import join_ranks, strategy_failed
from taskd.core.manager.watch import bad_nodes
from taskd.model.clusterd import FaultReport, Signal
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import ALL, NodeRank, Position, Role, agent, worker
from taskd.model.manager import (
    Event,
    Finish,
    JobStalled,
    MessageReceived,
    NodeBack,
    NodeConnected,
    NodeDisconnected,
    NodeGone,
    NodeSilent,
    NodesMarkedBad,
    NodesRegistered,
    RankHung,
    SendMessage,
    SignalReceived,
    StopRequested,
    Subscribed,
)
from taskd.model.messages import (
    AgentHello,
    Body,
    Committed,
    Dumped,
    EndWorkers,
    Leave,
    Member,
    Parked,
    RanksFailed,
    Repaired,
    RepairFailed,
    RequestHello,
    RestartsLeft,
    WorkerFailed,
    WorkerHello,
)
from taskd.model.strategies import WireStrategy
from taskd.model.types import Tick

BY_ORDER: set[type[State]] = {
    *(Stopping, Deciding, Paused, Awaiting, Repairing, Restarting, Dumping, Ending)
}
"""The states that an order of clusterd can lead to from any state: when no rank is left to stop,
or when a restarted manager receives an order in the middle of an incident, one step passes
through several states."""
LEGAL: dict[type[State], set[type[State]]] = {
    Gathering: {Training, Suspecting, Reported} | BY_ORDER,
    Training: {Suspecting, Reported} | BY_ORDER,
    Suspecting: {Reported} | BY_ORDER,
    Reported: {Training} | BY_ORDER,
    Stopping: BY_ORDER - {Stopping},
    Deciding: {Training, Reported} | BY_ORDER - {Deciding},
    Paused: {Reported} | BY_ORDER - {Paused},
    Awaiting: BY_ORDER - {Awaiting},
    Repairing: {Resuming, Training, Reported} | BY_ORDER - {Repairing},
    Resuming: {Training, Reported} | BY_ORDER,
    Restarting: {Training, Reported} | BY_ORDER - {Restarting},
    Dumping: {Reported} | BY_ORDER - {Dumping},
    Ending: {Ended},
    Ended: set(),
}


def begin(config: JobConfig, now: float, mindio: bool = False) -> Gathering:
    job = replace(initial_job(config), mindio=mindio)
    return Gathering(job, now + config.join_timeout_s)


def step(state: State, event: Event, now: float, config: JobConfig) -> Outcome:
    """Decide what to do. Deterministic: the same input always gives the same outcome."""
    if isinstance(state, Ended):
        return Outcome(state, because="the job has ended")
    return clusterd_signals.note_answers(_step(state, event, now, config))


def _step(state: State, event: Event, now: float, config: JobConfig) -> Outcome:
    match event:
        case MessageReceived(src, body):
            return _message_received(state, src, body, now, config)
        case NodeConnected(node):
            # Its agent sends a hello by itself; its workers do not notice that we have restarted.
            request = SendMessage(Position(Role.WORKER, str(node), ALL), RequestHello())
            others = {n: at for n, at in state.job.disconnected.items() if n != node}
            state = with_job(state, disconnected=others)
            outcome = Outcome(state, (request,), f"node {node} is connected")
            return then(outcome, _update_patience(state, now, config))
        case NodeDisconnected(node):
            return _disconnected(state, node, now, config)
        case NodesRegistered(nodes, epoch):
            return joining.nodes_registered(state, nodes, epoch, now, config)
        case NodeSilent(node, evidence) | NodeGone(node, evidence) if isinstance(state, Gathering):
            cause = FaultCause.SILENT if isinstance(event, NodeSilent) else FaultCause.LOST
            lost = _lose_node(state, node, cause, evidence, now, config)
            if not isinstance(lost.state, Gathering):
                return lost
            found = joining.node_found_lost(lost.state, node, cause, evidence, now, config)
            return then(lost, found)
        case NodeSilent(node, evidence):
            return _lose_node(state, node, FaultCause.SILENT, evidence, now, config)
        case NodeBack(node):
            return _back(state, node)
        case NodeGone(node, evidence):
            return _lose_node(state, node, FaultCause.LOST, evidence, now, config)
        case RankHung():
            return rank_faults.rank_hung(state, event, now, config)
        case JobStalled():
            return rank_faults.job_stalled(state, event, now, config)
        case NodesMarkedBad(nodes, evidence):
            return bad_nodes.mark(state, nodes, evidence, config)
        case SignalReceived(signal):
            return clusterd_signals.handle_signal(state, signal, now, config)
        case Subscribed():
            return _subscribed(state, now, config)
        case StopRequested(exit_code, because):
            if isinstance(state, Ending):
                return Outcome(state, because="the job is ending already")
            return strategy_actions.end(state.job, exit_code, because, now, config)
        case Tick():
            if now < state.deadline:
                return Outcome(state, because="the deadline has not passed yet")
            return _deadline_passed(state, now, config)
        case _:
            assert_never(event)


# Messages of nodes and ranks


def _message_received(
    state: State, src: Position, body: Body, now: float, config: JobConfig
) -> Outcome:
    if isinstance(state, Ending) and not isinstance(body, WorkerHello | AgentHello):
        return _leave_notice(state, src, body)
    if isinstance(state, Gathering):
        state = joining.detect_restart(state, src, body, now, config)
    before = state.job.view
    update = apply_message(before, src, body)
    outcome = _apply(state, update, now, config)
    keep = shard_keepers.after_message(before, update.view, body)
    outcome = then(outcome, Outcome(outcome.state, keep))
    is_stale = isinstance(body, WorkerHello) and any(
        isinstance(item, StaleIncarnation) and item.incarnation == body.incarnation
        for item in update.changes
    )
    if not is_stale:
        outcome = then(outcome, _handle_message(outcome.state, src, body, now, config))
    if isinstance(outcome.state, Gathering):
        return then(outcome, joining.check_complete(outcome.state, now, config))
    return outcome


def _handle_message(
    state: State, src: Position, body: Body, now: float, config: JobConfig
) -> Outcome:
    match body:
        case RestartsLeft(remaining):
            return joining.start_requested(state, src, remaining, now, config)
        case AgentHello():
            return joining.agent_hello(state, body, now, config)
        case WorkerHello():
            return joining.worker_hello(state, body, config)
        case WorkerFailed() if _is_current(state.job, body):
            return rank_faults.worker_failed(state, body, now, config)
        case Parked() if _is_current(state.job, body):
            return parking.rank_parked(state, body, now, config)
        case Repaired() | Committed() if _is_current(state.job, body):
            return resume.repaired(state, body, now, config)
        case RepairFailed() if _is_current(state.job, body):
            return resume.repair_failed(state, body, now, config)
        case Dumped() if body.incident == state.job.incident:
            return resume.dumped(state, body, now, config)
        case WorkerFailed() | Parked() | Repaired() | Committed() | RepairFailed() | Dumped():
            stale = f"{type(body).__name__} belongs to a former incident or incarnation"
            return Outcome(state, because=stale)
        case _:
            return Outcome(state)


def _is_current(
    job: Job, body: WorkerFailed | Parked | Repaired | Committed | RepairFailed
) -> bool:
    view = job.view.ranks.get(body.rank)
    if view is None or view.incarnation != body.incarnation:
        return False
    if isinstance(body, WorkerFailed):
        # A worker fails under the groups of the previous incident. It is stale only if the rank
        # has taken part in a later incident since.
        return body.incident >= view.incident
    return body.incident == job.incident


def _apply(state: State, update: ViewUpdate, now: float, config: JobConfig) -> Outcome:
    """Store the new view of the job, and react to what has changed in it."""
    state = with_job(state, view=update.view)
    outcome = Outcome(state)
    died = [item for item in update.changes if isinstance(item, Fault)]
    for item in update.changes:
        match item:
            case StaleIncarnation():
                outcome = then(outcome, Outcome(outcome.state, (_end_stale(state.job, item),)))
            case RankStarted(rank):
                outcome = then(outcome, joining.rank_started(outcome.state, rank, now, config))
            case Fault() | RankFinished():
                pass
    if died and not state.job.mindio:
        found = tuple(replace(item, seen_at=now) for item in died)
        outcome = then(outcome, rank_faults.handle_faults(outcome.state, found, now, config))
    if any(isinstance(item, RankFinished) for item in update.changes):
        outcome = then(outcome, resume.rank_finished(outcome.state, now, config))
    return outcome


def _lose_node(
    state: State, node: NodeRank, cause: FaultCause, evidence: str, now: float, config: JobConfig
) -> Outcome:
    before = state.job.view
    update = node_lost(before, node, cause, evidence)
    outcome = _apply(state, update, now, config)
    return then(outcome, Outcome(outcome.state, shard_keepers.after_loss(before, update.view)))


def _end_stale(job: Job, stale: StaleIncarnation) -> SendMessage:
    rank, node, incarnation = stale.rank, stale.node, stale.incarnation
    known = job.view.nodes.get(node)
    if known is not None and known.ours:
        # Its agent can end it even if it is blocked, and tells the end from a failure.
        return SendMessage(agent(node), EndWorkers((Member(rank, node, incarnation),)))
    because = "a later incarnation of this rank has been started"
    return SendMessage(worker(node, rank), Leave(job.incident, because, incarnation))


def _back(state: State, node: NodeRank) -> Outcome:
    """Its processes counted as lost, although some may live: what runs there must be known again.

    Its agent does not say hello by itself, because its connection never broke.
    """
    known = state.job.view.nodes.get(node)
    if known is None or known.present or isinstance(state, Ending):
        return Outcome(state, because=f"node {node} has joined again already")
    requests = (
        SendMessage(agent(node), RequestHello()),
        SendMessage(Position(Role.WORKER, str(node), ALL), RequestHello()),
    )
    return Outcome(state, requests, f"node {node} is back: which processes run there?")


def _disconnected(state: State, node: NodeRank, now: float, config: JobConfig) -> Outcome:
    if isinstance(state, Ending):
        return _left(state, node)
    state = with_job(state, disconnected={**state.job.disconnected, node: now})
    because = f"node {node} is disconnected; it counts as lost unless it reconnects in time"
    return then(Outcome(state, because=because), _update_patience(state, now, config))


def _update_patience(state: State, now: float, config: JobConfig) -> Outcome:
    """The time to wait for the last ranks to park depends on the connections of their nodes."""
    if isinstance(state, Stopping):
        return parking.await_parking(state, state.running, now, config)
    return Outcome(state)


# Deadlines, and the connection to clusterd


def _deadline_passed(state: State, now: float, config: JobConfig) -> Outcome:
    job = state.job
    match state:
        case Gathering():
            return joining.join_timed_out(state, now, config)
        case Training():
            return growth.offer_growth(Training(job), now, config)
        case Ended():
            return Outcome(state)
        case Suspecting():
            return _report(job, now, "a collective failed, but no rank died", now, config)
        case Reported(since=since):
            if now - since >= config.lost_contact_s:
                why = f"clusterd has not answered for {now - since:.0f} s"
                return strategy_actions.end(job, 1, why, now, config)
            return _report(job, since, "clusterd has not ordered the stop yet", now, config)
        case Stopping(running=running, limit=limit) if now < limit:
            outcome = Outcome(state)
            for node in sorted({job.view.ranks[rank].node for rank in running}):
                why = "disconnected, and its ranks did not park"
                lost = _lose_node(outcome.state, node, FaultCause.SILENT, why, now, config)
                outcome = then(outcome, lost)
            return outcome
        case Stopping(running=running):
            late = tuple(
                Fault.of(r, FaultCause.STUCK, "it did not park in time", now)
                for r in sorted(running)
            )
            return rank_faults.handle_faults(state, late, now, config)
        case Deciding():
            return _report(job, now, "clusterd has not decided in time", now, config)
        case Paused():
            order = Signal(
                uuid=job.uuid,
                incident=job.incident,
                type="changeStrategy",
                strategy=WireStrategy.CONTINUE,
            )
            return strategy_actions.carry_out(job, order, now, config)
        case Awaiting(order=order):
            return strategy_failed(job, order, "the node did not come back in time", now, config)
        case Repairing(order=order, setback=setback, unrepaired=unrepaired):
            late_ones = f"ranks {join_ranks(unrepaired)} were not repaired in time"
            return strategy_failed(job, order, setback or late_ones, now, config)
        case Resuming(order=order, uncommitted=uncommitted):
            why = f"ranks {join_ranks(uncommitted)} did not commit a step in time"
            return strategy_failed(job, order, why, now, config)
        case Restarting(order=order, unstarted=unstarted):
            why = f"ranks {join_ranks(unstarted)} did not start in time"
            return strategy_failed(job, order, why, now, config)
        case Dumping(order=order, unwritten=unwritten):
            why = f"ranks {join_ranks(unwritten)} did not write their checkpoint in time"
            return strategy_failed(job, order, why, now, config)
        case Ending(exit_code=exit_code, because=because):
            finish = Finish(exit_code, because)
            late_agents = f"agents of nodes {join_ranks(state.staying)} did not leave in time"
            return Outcome(Ended(job, exit_code, because), (finish,), late_agents)
        case _:
            assert_never(state)


def _report(job: Job, since: float, because: str, now: float, config: JobConfig) -> Outcome:
    reports = (FaultReport(job.known_faults()),)
    return Outcome(Reported(job, since, now + config.report_timeout_s), reports, because)


def _subscribed(state: State, now: float, config: JobConfig) -> Outcome:
    because = "connected to clusterd"
    if isinstance(state, Reported):
        return _report(state.job, state.since, because, now, config)
    return Outcome(state, because=because)


def _leave_notice(state: Ending, src: Position, body: Body) -> Outcome:
    if isinstance(body, RanksFailed) and not body.ranks and src.server_rank.isdigit():
        return _left(state, NodeRank(int(src.server_rank)))
    return Outcome(state)


def _left(state: Ending, node: NodeRank) -> Outcome:
    staying = state.staying - {node}
    if staying:
        return Outcome(replace(state, staying=staying))
    finish = Finish(state.exit_code, state.because)
    return Outcome(Ended(state.job, state.exit_code, state.because), (finish,), state.because)
