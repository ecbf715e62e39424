"""clusterd's signals: which ones are new, which incident each belongs to, and what each causes.

They are carried out in the order of arrival. `machine.py` passes them on; `parking.py` and
`strategy_actions.py` do the work.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.manager import strategy_actions
from taskd.core.manager.incident_record import add_faults
from taskd.core.manager.repair import parking
from taskd.core.manager.states import (
    ANSWERS_KEPT,
    SIGNALS_KEPT,
    Awaiting,
    Deciding,
    Dumping,
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
    Training,
    with_job,
)
from taskd.core.rank_sets import RankSet
from taskd.model.clusterd import (
    ExpectedReport,
    FaultReport,
    ResultReport,
    Signal,
    StopReport,
    StrategiesReport,
)
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import Incident, agent
from taskd.model.manager import NO_INCIDENT, SendMessage
from taskd.model.messages import StartWorkers, StopWorkers
from taskd.model.strategies import WireStrategy

Busy = Repairing | Resuming | Restarting | Dumping
ANSWER_TO: dict[str, type[ExpectedReport]] = {
    "stopTrain": StopReport,
    "globalFault": StrategiesReport,
    "changeStrategy": ResultReport,
    "saveAndExit": ResultReport,
    "hot-switch": StrategiesReport,
}


def handle_signal(state: State, signal: Signal, now: float, config: JobConfig) -> Outcome:
    if signal.type == "keep-alive" or isinstance(state, Ending):
        return Outcome(state, because="nothing to do")
    key = _key(signal)
    if key in state.job.handled:
        kind = ANSWER_TO.get(signal.type)
        again = tuple(r for r in state.job.answers.get(key, ()) if type(r) is kind)
        because = f"{signal.type} has been carried out already"
        return Outcome(state, again, f"{because}; it is answered again" if again else because)
    handled = (*state.job.handled, key)[-SIGNALS_KEPT:]
    state = with_job(state, handled=handled, ascend=signal.incident == NO_INCIDENT)
    if isinstance(state, Gathering):
        # It is not known yet which ranks are alive: the order could not be carried out correctly.
        state = replace(state, deferred=(*state.deferred, signal))
        return Outcome(state, because=f"{signal.type} is deferred until all ranks are known")
    return execute_signal(state, signal, now, config)


def note_answers(outcome: Outcome) -> Outcome:
    """Keep the reports that answer the last signal: clusterd repeats it if it has missed them."""
    job = outcome.state.job
    reports = tuple(c for c in outcome.commands if isinstance(c, ExpectedReport))
    if not reports or not job.handled:
        return outcome
    key = job.handled[-1]
    known = {k: kept for k, kept in job.answers.items() if k in job.handled[-ANSWERS_KEPT:]}
    answers = {**known, key: (*known.get(key, ()), *reports)[-ANSWERS_KEPT:]}
    return replace(outcome, state=with_job(outcome.state, answers=answers))


def _key(signal: Signal) -> object:
    if signal.sequence:
        return signal.uuid, signal.sequence
    return signal.uuid, signal.type, signal.actions, signal.strategy


def execute_signal(state: State, signal: Signal, now: float, config: JobConfig) -> Outcome:
    match signal.type:
        case "pauseStartAgent":
            state = with_job(state, start_withheld=True)
            return Outcome(state, because="clusterd withholds the start of ranks")
        case "continueStartAgent":
            return _release_starts(state)
        case "preExitProcess":
            return _stop_before_exit(state, signal)
        case "faultNodesExit":
            job, messages = strategy_actions.dismiss_nodes(state.job, signal, config)
            return Outcome(replace(state, job=job), messages, f"nodes {list(signal.nodes)} leave")
        case "killMaster":
            return strategy_actions.end(state.job, 1, "clusterd has ended the job", now, config)
        case "hot-switch" if "hot switch" in signal.actions and signal.incident != NO_INCIDENT:
            report = StrategiesReport((WireStrategy.EXIT,), signal.uuid)
            return Outcome(state, (report,), "the ranks cannot move while they train")
        case "stopTrain" | "globalFault" | "changeStrategy" | "saveAndExit":
            return _in_incident(state, signal, now, config)
        case other:
            return Outcome(state, because=f"signal {other!r} is unknown and ignored")


def _in_incident(state: State, signal: Signal, now: float, config: JobConfig) -> Outcome:
    numbered = _number(state.job, signal)
    if numbered is None:
        return Outcome(state, because=f"{signal.type} belongs to an older incident")
    incident, offset = numbered
    if (
        signal.strategy == WireStrategy.UPGRADE
        and isinstance(state, Training)
        and incident <= state.job.incident
    ):
        # The job is training: all ranks must stop again, under a number that they do not know yet.
        incident, offset = Incident(state.job.incident + 1), offset + 1
    state = with_job(state, offset=offset)
    if signal.type == "stopTrain":
        return parking.begin_stop(state, signal, incident, now, config)
    order = replace(signal, strategy=WireStrategy.DUMP) if signal.type == "saveAndExit" else signal
    return _continue(state, order, incident, now, config)


def _number(job: Job, signal: Signal) -> tuple[Incident, int] | None:
    """The incident number to use, and how far we are ahead of clusterd. None: it is over."""
    begins = signal.type in ("stopTrain", "saveAndExit")
    if signal.incident == NO_INCIDENT:
        if signal.uuid == job.uuid and job.uuid:
            return job.incident, 0
        return (Incident(job.incident + 1), 0) if begins else None
    incident = Incident(signal.incident + job.offset)
    if incident > job.incident:
        return incident, job.offset
    if incident == job.incident and not job.uuid and not (begins and _resumed(job)):
        return incident, job.offset
    if incident == job.incident and (not begins or signal.uuid == job.uuid):
        return incident, job.offset
    if not begins and not job.uuid:
        # This manager has restarted; the ranks have counted further than clusterd.
        return job.incident, job.incident - signal.incident
    # clusterd has lost count and begins a new round: continue our own count. A rank obeys no order
    # to park under a number that it knows.
    return (Incident(job.incident + 1), job.incident + 1 - signal.incident) if begins else None


def _continue(
    state: State, order: Signal, incident: Incident, now: float, config: JobConfig
) -> Outcome:
    """An order within an incident. This manager may have restarted since the incident began."""
    job = state.job
    same = incident == job.incident
    if same:
        state = with_job(state, uuid=order.uuid)
    if order.strategy == WireStrategy.EXIT:
        return strategy_actions.carry_out(state.job, order, now, config)
    if (
        order.strategy == WireStrategy.CONTINUE
        and isinstance(state, Training)
        and not job.protected()
    ):
        report = ResultReport(0, order.strategy, uuid=order.uuid, info="training was never paused")
        return Outcome(state, (report,), report.info)
    if isinstance(state, Deciding) and same and job.plan_sent:
        # The previous strategy failed half-way: all ranks stop again, under a number that they
        # do not know yet.
        state = with_job(state, offset=job.offset + 1)
        return parking.begin_stop(state, order, Incident(incident + 1), now, config)
    if isinstance(state, Deciding | Paused) and same:
        return parking.proceed(state.job, order, now, config)
    if isinstance(state, Awaiting | Busy | Stopping) and same:
        return Outcome(
            state, because=f"{order.type} is ignored: another order is being carried out"
        )
    if same and order.type == "changeStrategy" and (resumed := _resumed(state.job)):
        return _finish_half_done(state, order, resumed, now, config)
    return parking.begin_stop(state, order, incident, now, config)


def _resumed(job: Job) -> RankSet:
    """Ranks that are repaired under this incident already. They obey no order to park under it."""
    views = job.view.ranks
    return RankSet(
        rank
        for rank in job.running()
        if views[rank].phase in ("training", "repairing") and views[rank].incident == job.incident
    )


def _finish_half_done(
    state: State, order: Signal, resumed: RankSet, now: float, config: JobConfig
) -> Outcome:
    """The manager was restarted while this order was being carried out."""
    rest = state.job.world - resumed
    if not rest:
        return strategy_actions.recovered(state.job, order, now, config)
    why = "the manager was restarted during the repair"
    found = tuple(
        Fault.of(rank, FaultCause.COMMUNICATION, why, now)
        for rank in rest
        if rank not in state.job.faults
    )
    job = add_faults(state.job, found) if found else state.job
    reports = (FaultReport(job.known_faults()),)
    return Outcome(Reported(job, now, now + config.report_timeout_s), reports, why)


# Orders outside of incidents


def _release_starts(state: State) -> Outcome:
    budget = state.job.restarts_left
    messages = tuple(
        SendMessage(agent(node), StartWorkers(budget)) for node in sorted(state.job.start_requests)
    )
    permitted = state.job.permitted | frozenset(state.job.start_requests)
    state = with_job(state, start_withheld=False, start_requests={}, permitted=permitted)
    return Outcome(state, messages, "ranks may start again")


def _stop_before_exit(state: State, signal: Signal) -> Outcome:
    views = state.job.view.ranks
    messages = []
    for node in signal.nodes:
        here = (f.rank for f in signal.faults if f.rank in views and views[f.rank].node == node)
        messages.append(SendMessage(agent(node), StopWorkers(tuple(here))))
    return Outcome(state, tuple(messages), "the ranks stop before their device is reset")
