"""How one job's manager reacts: to what nodes and ranks say, and to what clusterd orders.

`step` is the only way in. The states are in `core/manager/states.py`; the reactions in `joining`
(nodes and ranks join), `faults`, `signals` (orders come), `stop`, `strategies` and `resume`; who
is alive in `core/manager/job_view.py`. `LEGAL` is the map and `step` is the territory: the
simulation fails when either has an edge that the other lacks.

One place fences stale words: `_told` drops what speaks of an older incident or of a former life.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from taskd.core.manager import clusterd_orders as signals
from taskd.core.manager import growth, joining, resume
from taskd.core.manager import parking as stopping
from taskd.core.manager import rank_faults as faults
from taskd.core.manager import strategy_actions as strategies
from taskd.core.manager.job_view import (
    RankDied,
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
from taskd.model.clusterd import Signal
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
    RankFault,
    RankHung,
    ReportFaults,
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
from taskd.model.types import Tick

BY_ORDER: set[type[State]] = {
    *(Stopping, Deciding, Paused, Awaiting, Repairing, Restarting, Dumping, Ending)
}
"""Where an order of clusterd can lead from anywhere: when nobody is left to be stopped, or a
restarted manager is told where it was, states are passed through in one step."""
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
    """Decide. Same state, same event, same time: same answer."""
    if isinstance(state, Ended):
        return Outcome(state, because="the job has ended")
    match event:
        case MessageReceived(src, body):
            return _hear(state, src, body, now, config)
        case NodeConnected(node):
            # Its agent says by itself what is true; its workers do not see that we are new.
            ask = SendMessage(Position(Role.WORKER, str(node), ALL), RequestHello())
            linked = {n: at for n, at in state.job.unlinked.items() if n != node}
            outcome = Outcome(with_job(state, unlinked=linked), (ask,), f"node {node} is linked")
            return then(outcome, _waited_for(outcome.state, now, config))
        case NodeDisconnected(node):
            return _unlinked(state, node, now, config)
        case NodeSilent(node, evidence):
            learned = node_lost(state.job.view, node, "silent", evidence)
            return _news(state, learned, now, config)
        case NodeGone(node, evidence):
            return _news(state, node_lost(state.job.view, node, "lost", evidence), now, config)
        case RankHung(rank, evidence):
            return faults.hung(state, rank, evidence, now, config)
        case NodesMarkedBad(nodes, evidence):
            if config.rescheduling or state.job.ascend:
                return Outcome(state, because="the cluster replaces these nodes")
            condemned = state.job.condemned | nodes
            why = f"nodes {sorted(nodes)} are left alone: {evidence}"
            # Their agents tell it to the managers that come after us.
            kept = tuple(
                SendMessage(agent(node), NodeMarkedBad(evidence)) for node in sorted(nodes)
            )
            return Outcome(with_job(state, condemned=condemned), kept, why)
        case SignalReceived(signal):
            return signals.ordered(state, signal, now, config)
        case Subscribed():
            return _subscribed(state, now, config)
        case StopRequested(exit_code, because):
            if isinstance(state, Ending):
                return Outcome(state, because="the job is ending already")
            return strategies.end(state.job, exit_code, because, now, config)
        case Tick():
            if now < state.deadline:
                return Outcome(state, because="it is not time yet")
            return _late(state, now, config)
        case _:
            assert_never(event)


# What nodes and ranks say


def _hear(state: State, src: Position, body: Body, now: float, config: JobConfig) -> Outcome:
    if isinstance(state, Ending) and not isinstance(body, WorkerHello | AgentHello):
        return _leave_notice(state, src, body)
    if isinstance(state, Gathering):
        state = joining.recognise(state, src, body, now, config)
    learned = apply_message(state.job.view, src, body)
    outcome = _told(_news(state, learned, now, config), learned, src, body, now, config)
    if isinstance(outcome.state, Gathering):
        return then(outcome, joining.gather(outcome.state, now, config))
    return outcome


def _told(
    outcome: Outcome, learned: ViewUpdate, src: Position, body: Body, now: float, config: JobConfig
) -> Outcome:
    match body:
        case RestartsLeft(remaining):
            return then(outcome, joining.asked(outcome.state, src, remaining, now, config))
        case AgentHello():
            return then(outcome, joining.agent_hello(outcome.state, body, now, config))
        case WorkerHello() if not any(isinstance(item, StaleIncarnation) for item in learned.news):
            return then(outcome, joining.worker_hello(outcome.state, body, now, config))
        case WorkerFailed() if _is_current(outcome.state.job, body):
            return then(outcome, faults.worker_failed(outcome.state, body, now, config))
        case Parked() if _is_current(outcome.state.job, body):
            return then(outcome, stopping.parked(outcome.state, body, now, config))
        case Repaired() | Committed() if _is_current(outcome.state.job, body):
            return then(outcome, resume.repaired(outcome.state, body, now, config))
        case RepairFailed() if _is_current(outcome.state.job, body):
            return then(outcome, resume.repair_failed(outcome.state, body, now, config))
        case Dumped() if body.incident == outcome.state.job.incident:
            return then(outcome, resume.dumped(outcome.state, body, now, config))
        case WorkerFailed() | Parked() | Repaired() | Committed() | RepairFailed() | Dumped():
            stale = f"{type(body).__name__} is of a former incident or life"
            return then(outcome, Outcome(outcome.state, because=stale))
        case _:
            return outcome


def _is_current(
    job: Job, body: WorkerFailed | Parked | Repaired | Committed | RepairFailed
) -> bool:
    view = job.view.ranks.get(body.rank)
    alive = view is not None and view.incarnation == body.incarnation
    # A worker fails under the groups of the incident before: that is no stale word.
    return alive and (isinstance(body, WorkerFailed) or body.incident == job.incident)


def _news(state: State, learned: ViewUpdate, now: float, config: JobConfig) -> Outcome:
    """Take the new picture over, and react to what is new in it."""
    state = with_job(state, view=learned.view)
    outcome = Outcome(state)
    died = [item for item in learned.news if isinstance(item, RankDied)]
    for item in learned.news:
        match item:
            case StaleIncarnation(rank, node, life):
                because = "a later life of this rank has been started"
                away = Leave(state.job.incident, because, life)
                outcome = then(
                    outcome, Outcome(outcome.state, (SendMessage(worker(node, rank), away),))
                )
            case RankStarted(rank):
                outcome = then(outcome, joining.came_up(outcome.state, rank, now, config))
            case RankDied() | RankFinished():
                pass
    if died:
        found = tuple(RankFault(item.rank, item.kind, item.evidence, now) for item in died)
        outcome = then(outcome, faults.fault(outcome.state, found, now, config))
    if any(isinstance(item, RankFinished) for item in learned.news):
        outcome = then(outcome, resume.ended(outcome.state, now, config))
    return outcome


def _unlinked(state: State, node: NodeRank, now: float, config: JobConfig) -> Outcome:
    if isinstance(state, Ending):
        return _left(state, node)
    state = with_job(state, unlinked={**state.job.unlinked, node: now})
    outcome = Outcome(state, because=f"node {node} is not linked; if it stays so, it is lost")
    return then(outcome, _waited_for(state, now, config))


def _waited_for(state: State, now: float, config: JobConfig) -> Outcome:
    """Links decide how long the last ranks to park are waited for."""
    if isinstance(state, Stopping):
        return stopping.stands(state, state.running, now, config)
    return Outcome(state)


# Time and contact


def _late(state: State, now: float, config: JobConfig) -> Outcome:
    """The state's deadline has passed."""
    job = state.job
    match state:
        case Gathering():
            return joining.never_joined(state, now, config)
        case Training():
            return growth.offer(Training(job), now, config)
        case Ended():
            return Outcome(state)
        case Suspecting():
            told = (ReportFaults(job.known_faults()),)
            reported = Reported(job, now, now + config.report_timeout_s)
            return Outcome(reported, told, "nobody died: a link has failed")
        case Reported(since=since):
            if now - since >= config.lost_contact_s:
                return strategies.end(job, 1, "clusterd has not answered for too long", now, config)
            told = (ReportFaults(job.known_faults()),)
            again = Reported(job, since, now + config.report_timeout_s)
            return Outcome(again, told, "clusterd has not ordered the stop yet")
        case Stopping(running=running, limit=limit) if now < limit:
            outcome = Outcome(state)
            for node in sorted({job.view.ranks[rank].node for rank in running}):
                lost = node_lost(outcome.state.job.view, node, "silent", "no link, and no answer")
                outcome = then(outcome, _news(outcome.state, lost, now, config))
            return outcome
        case Stopping(running=running):
            late = tuple(
                RankFault(r, "stuck", "it did not park in time", now) for r in sorted(running)
            )
            return faults.fault(state, late, now, config)
        case Deciding():
            told = (ReportFaults(job.known_faults()),)
            reported = Reported(job, now, now + config.report_timeout_s)
            return Outcome(reported, told, "clusterd has not decided in time")
        case Paused():
            order = Signal(
                uuid=job.uuid, incident=job.incident, type="changeStrategy", strategy="continue"
            )
            return strategies.carry_out(job, order, now, config)
        case Awaiting(order=order):
            return strategies.failed(job, order, "the node did not come back in time", now, config)
        case Repairing(order=order, setback=setback, unrepaired=unrepaired):
            late_ones = f"ranks {strategies.listed(unrepaired)} were not repaired in time"
            return strategies.failed(job, order, setback or late_ones, now, config)
        case Resuming(order=order, uncommitted=uncommitted):
            why = f"ranks {strategies.listed(uncommitted)} did not finish a step in time"
            return strategies.failed(job, order, why, now, config)
        case Restarting(order=order, unstarted=unstarted):
            why = f"ranks {strategies.listed(unstarted)} were not started in time"
            return strategies.failed(job, order, why, now, config)
        case Dumping(order=order, unwritten=unwritten):
            why = f"ranks {strategies.listed(unwritten)} did not write in time"
            return strategies.failed(job, order, why, now, config)
        case Ending(exit_code=exit_code, because=because):
            finish = Finish(exit_code, because)
            return Outcome(Ended(job, exit_code, because), (finish,), "not every agent has left")
        case _:
            assert_never(state)


def _subscribed(state: State, now: float, config: JobConfig) -> Outcome:
    if isinstance(state, Reported):
        told = (ReportFaults(state.job.known_faults()),)
        return Outcome(replace(state, deadline=now + config.report_timeout_s), told)
    return Outcome(state, because="clusterd listens")


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
