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

from taskd.core.manager import (
    clusterd_signals,
    growth,
    joining,
    parking,
    rank_faults,
    resume,
    strategy_actions,
)
from taskd.core.manager.job_view import (
    RankFinished,
    RankStarted,
    StaleIncarnation,
    ViewUpdate,
    apply_message,
    node_lost,
)
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
from taskd.model.clusterd import FaultReport, Signal
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import ALL, NodeRank, Position, Role, agent, worker
from taskd.model.manager import (
    Event,
    Finish,
    MessageReceived,
    NodeConnected,
    NodeDisconnected,
    NodeGone,
    NodeSilent,
    NodesMarkedBad,
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
    Leave,
    NodeMarkedBad,
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


def begin(config: JobConfig, now: float) -> Gathering:
    return Gathering(initial_job(config), now + config.join_timeout_s)


def step(state: State, event: Event, now: float, config: JobConfig) -> Outcome:
    """Decide what to do. Deterministic: the same input always gives the same outcome."""
    if isinstance(state, Ended):
        return Outcome(state, because="the job has ended")
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
        case NodeSilent(node, evidence):
            update = node_lost(state.job.view, node, FaultCause.SILENT, evidence)
            return _apply(state, update, now, config)
        case NodeGone(node, evidence):
            return _apply(
                state, node_lost(state.job.view, node, FaultCause.LOST, evidence), now, config
            )
        case RankHung():
            return rank_faults.rank_hung(state, event, now, config)
        case NodesMarkedBad(nodes, evidence):
            if config.rescheduling or state.job.ascend:
                return Outcome(state, because="the cluster replaces these nodes")
            bad_nodes = state.job.bad_nodes | nodes
            why = f"nodes {sorted(nodes)} are not used any more: {evidence}"
            # Their agents repeat it to a restarted manager.
            messages = tuple(
                SendMessage(agent(node), NodeMarkedBad(evidence)) for node in sorted(nodes)
            )
            return Outcome(with_job(state, bad_nodes=bad_nodes), messages, why)
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
    update = apply_message(state.job.view, src, body)
    outcome = _apply(state, update, now, config)
    is_stale = any(isinstance(item, StaleIncarnation) for item in update.changes)
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
            return joining.worker_hello(state, body, now, config)
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
    alive = view is not None and view.incarnation == body.incarnation
    # A worker fails under the groups of the previous incident: that message is not stale.
    return alive and (isinstance(body, WorkerFailed) or body.incident == job.incident)


def _apply(state: State, update: ViewUpdate, now: float, config: JobConfig) -> Outcome:
    """Store the new view of the job, and react to what has changed in it."""
    state = with_job(state, view=update.view)
    outcome = Outcome(state)
    died = [item for item in update.changes if isinstance(item, Fault)]
    for item in update.changes:
        match item:
            case StaleIncarnation(rank, node, incarnation):
                because = "a later incarnation of this rank has been started"
                leave = Leave(state.job.incident, because, incarnation)
                outcome = then(
                    outcome, Outcome(outcome.state, (SendMessage(worker(node, rank), leave),))
                )
            case RankStarted(rank):
                outcome = then(outcome, joining.rank_started(outcome.state, rank, now, config))
            case Fault() | RankFinished():
                pass
    if died:
        found = tuple(replace(item, seen_at=now) for item in died)
        outcome = then(outcome, rank_faults.handle_faults(outcome.state, found, now, config))
    if any(isinstance(item, RankFinished) for item in update.changes):
        outcome = then(outcome, resume.rank_finished(outcome.state, now, config))
    return outcome


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
                lost = node_lost(outcome.state.job.view, node, FaultCause.SILENT, why)
                outcome = then(outcome, _apply(outcome.state, lost, now, config))
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
