"""How one training process gets through a fault: train, stand still, be repaired, train on.

    Joining --------------------------+
       |                              v
       +--> Parked --> Repairing --> Resumed --> Training
              ^  ^        |             |           |
              |  |        v             v           |
              |  +---- Faulted <--------+-----------+
              |           v             |           |
              +-------- Parking <-------+-----------+
    and from anywhere: Leaving

The manager's numbers fence everything: what belongs to an older incident is refused here, in one
place. `worker/manager_connection.py` runs this machine beside the training thread;
`core/manager/repair_plan.py` makes the plans that it carries out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import assert_never

from taskd.model import messages as m
from taskd.model import types
from taskd.model.faults import FaultCause
from taskd.model.ids import Incident, Step
from taskd.model.types import Tick
from taskd.model.worker import (
    AbortCollectives,
    Command,
    CopiesChanged,
    DumpFinished,
    Event,
    ExecuteOrder,
    FirstStepCommitted,
    GiveUp,
    Identity,
    LocalRepairDone,
    LocalRepairFailed,
    ManagerConnected,
    Order,
    SendToManager,
    ShardKnown,
    StepFailed,
    ThreadParked,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    answer_timeout_s: float = 120.0
    """How long a rank that reported its own fault waits to be told to park."""

    nudge_s: float = 1.0
    """How often the groups are aborted again while the training thread does not come to rest."""

    order_timeout_s: float = 900.0
    """How long a parked rank waits for an order before it gives up."""

    dump_timeout_s: float = 600.0
    """How long writing the last checkpoint may take."""

    def __post_init__(self) -> None:
        for name in ("answer_timeout_s", "nudge_s", "order_timeout_s", "dump_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Joining:
    """A replacement on its way to its first step. It has no state yet, but may have its plan."""

    identity: Identity
    incident: Incident
    plan: m.Repair | None = None
    copies: tuple[m.Copy, ...] = ()
    """What its node has kept, perhaps of its own former life."""
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Training:
    identity: Identity
    incident: Incident
    proof: m.Committed | None = None
    """The step that ended the last incident: the manager may not have heard of it."""
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Faulted:
    """It has reported a fault of its own and waits for the incident that comes of it."""

    identity: Identity
    incident: Incident
    report: m.WorkerFailed | m.RepairFailed
    at: ThreadParked | None
    deadline: float


@dataclass(frozen=True, slots=True)
class Parking:
    """Told to park; the training thread is on its way out of its step."""

    identity: Identity
    incident: Incident
    deadline: float


@dataclass(frozen=True, slots=True)
class Parked:
    identity: Identity
    incident: Incident
    at: ThreadParked
    deadline: float


@dataclass(frozen=True, slots=True)
class Repairing:
    identity: Identity
    incident: Incident
    plan: m.Repair
    deadline: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """Repaired; the proof is the first committed step."""

    identity: Identity
    incident: Incident
    repair: LocalRepairDone
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Dumping:
    identity: Identity
    incident: Incident
    deadline: float


@dataclass(frozen=True, slots=True)
class Leaving:
    identity: Identity
    incident: Incident
    report: m.Dumped | None = None
    deadline: float = inf


State = Joining | Training | Faulted | Parking | Parked | Repairing | Resumed | Dumping | Leaving

LEGAL: dict[type[State], set[type[State]]] = {
    Joining: {Joining, Parked, Repairing, Leaving},
    Training: {Training, Faulted, Parking, Leaving},
    Faulted: {Faulted, Parking, Parked, Leaving},
    Parking: {Parking, Parked, Leaving},
    Parked: {Parked, Repairing, Dumping, Leaving},
    Repairing: {Parking, Faulted, Resumed, Leaving},
    Resumed: {Training, Faulted, Parking, Leaving},
    Dumping: {Leaving},
    Leaving: set(),
}


Outcome = types.Outcome[State, Command]


def step(state: State, event: Event, now: float, config: WorkerConfig) -> Outcome:
    """Decide. Same state, same event, same time: same answer."""
    if isinstance(state, Leaving):
        return _again(state, event)
    if _is_stale(state, event):
        return Outcome(state, because=f"{type(event).__name__} is from an older incident")
    match event:
        case ManagerConnected(step=at):
            return Outcome(state, _hello(state, at), "the manager must know what is true here")
        case ShardKnown(shard=shard, replica=replica, step=at):
            described = replace(state.identity, shard=shard, replica=replica)
            if described == state.identity:
                return Outcome(state, because="what this rank holds was known")
            state = replace(state, identity=described)
            return Outcome(state, _hello(state, at), "what this rank holds is known now")
        case m.Park():
            return _park(state, event, now, config)
        case m.Repair():
            return _repair(state, event, now, config)
        case m.Dump():
            return _dump(state, event, now, config)
        case m.Leave(life=life) if life not in (-1, state.identity.incarnation):
            return Outcome(state, because=f"life {life} of this rank is meant")
        case m.Leave(incident=incident, because=because):
            commands = (AbortCollectives(incident, because), ExecuteOrder(event))
            return Outcome(Leaving(state.identity, incident), commands, because)
        case StepFailed():
            return _failed(state, event, now, config)
        case ThreadParked():
            return _stood(state, event, now, config)
        case CopiesChanged(copies=copies):
            return _listed(state, copies)
        case LocalRepairDone():
            return _mended(state, event)
        case LocalRepairFailed():
            return _broke(state, event, now, config)
        case FirstStepCommitted():
            return _stepped(state, event)
        case DumpFinished():
            return _wrote(state, event)
        case Tick():
            return _late(state, now, config)
        case _:
            assert_never(event)


def _is_stale(state: State, event: Event) -> bool:
    fenced = (
        m.Park | m.Repair | m.Dump | m.Leave | LocalRepairDone | LocalRepairFailed | DumpFinished
    )
    return isinstance(event, fenced) and event.incident < state.incident


# The manager's orders


def _park(state: State, told: m.Park, now: float, config: WorkerConfig) -> Outcome:
    me, incident = state.identity, told.incident
    if incident == state.incident:
        if isinstance(state, Parked):
            return Outcome(state, (_where(state),), "asked again")
        if isinstance(state, Joining):
            return Outcome(state, (_empty_handed(state),), "asked again")
        return Outcome(state, because=f"incident {incident} is known")
    match state:
        case Joining():
            # It holds nothing that it would have to put down first.
            joining = Joining(me, incident, copies=state.copies)
            return Outcome(joining, (_empty_handed(joining),), "it has not begun to train")
        case Parked(at=stood) | Faulted(at=ThreadParked() as stood):
            parked = Parked(me, incident, stood, now + config.order_timeout_s)
            return Outcome(
                parked, (AbortCollectives(incident, told.because), _where(parked)), told.because
            )
        case Training() | Resumed() | Repairing() | Parking() | Faulted():
            parking = Parking(me, incident, now + config.nudge_s)
            return Outcome(parking, (AbortCollectives(incident, told.because),), told.because)
        case Dumping():
            return Outcome(state, because="the last checkpoint is being written")
        case Leaving():
            return Outcome(state)
        case _:
            assert_never(state)


def _repair(state: State, plan: m.Repair, now: float, config: WorkerConfig) -> Outcome:
    match state:
        case _ if not _is_member(state.identity, plan):
            return Outcome(state, because="the plan does not count on this life of this rank")
        case Joining():
            joining = Joining(state.identity, plan.incident, plan, state.copies)
            return Outcome(joining, because="the plan is there before the first step")
        case Parked() if plan.incident == state.incident:
            return _carry_out(state.identity, plan, now)
        case Resumed() if plan.incident == state.incident:
            return Outcome(state, (_said_repaired(state),), "that plan has been carried out")
        case _:
            return Outcome(state, because="no plan can be carried out now")


def _carry_out(me: Identity, plan: m.Repair, now: float) -> Outcome:
    repairing = Repairing(me, plan.incident, plan, now + plan.timeout_s)
    because = f"{plan.strategy}: {len(plan.members)} ranks resume at step {plan.resume}"
    return Outcome(repairing, (ExecuteOrder(plan),), because)


def _is_member(me: Identity, plan: m.Repair) -> bool:
    return any(one.rank == me.rank and one.incarnation == me.incarnation for one in plan.members)


def _dump(state: State, order: m.Dump, now: float, config: WorkerConfig) -> Outcome:
    if not isinstance(state, Parked) or order.incident != state.incident:
        return Outcome(state, because="only a parked rank can write a checkpoint")
    if all(one.rank != state.identity.rank for one in order.members):
        return Outcome(state, because="others write it")
    dumping = Dumping(state.identity, state.incident, now + config.dump_timeout_s)
    return Outcome(dumping, (ExecuteOrder(order),), f"writing step {order.step}")


# The training thread's words


def _failed(state: State, failed: StepFailed, now: float, config: WorkerConfig) -> Outcome:
    if not isinstance(state, Training | Resumed):
        return Outcome(state, because="a fault is being dealt with already")
    me = state.identity
    report = m.WorkerFailed(me.rank, me.incarnation, state.incident, failed.kind, failed.evidence)
    faulted = Faulted(me, state.incident, report, None, now + config.answer_timeout_s)
    return Outcome(faulted, (SendToManager(report),), f"{failed.kind}: {failed.evidence}")


def _stood(state: State, stood: ThreadParked, now: float, config: WorkerConfig) -> Outcome:
    limit = now + config.order_timeout_s
    match state:
        case Parking() | Parked():
            parked = Parked(state.identity, state.incident, stood, limit)
            return Outcome(parked, (_where(parked),), f"stands at step {stood.step}")
        case Joining(plan=plan):
            if plan is not None:
                return _carry_out(state.identity, plan, now)
            parked = Parked(state.identity, state.incident, stood, limit)
            return Outcome(parked, (_where(parked),), "ready to be given state")
        case Faulted():
            return Outcome(replace(state, at=stood), because="stands, and has not been told yet")
        case Training() | Resumed():
            outcome = _failed(
                state, StepFailed(FaultCause.COMMUNICATION, "the step was left"), now, config
            )
            assert isinstance(outcome.state, Faulted)
            return replace(outcome, state=replace(outcome.state, at=stood))
        case Repairing() | Dumping() | Leaving():
            return Outcome(state, because="an order is on its way to the training thread")
        case _:
            assert_never(state)


def _listed(state: State, copies: tuple[m.Copy, ...]) -> Outcome:
    because = "what the node keeps is known anew"
    match state:
        case Joining():
            return Outcome(replace(state, copies=copies), because=because)
        case Parked(at=stood) | Faulted(at=ThreadParked() as stood):
            return Outcome(replace(state, at=replace(stood, copies=copies)), because=because)
        case _:
            return Outcome(state, because="it will be looked at when this rank stands")


def _mended(state: State, mended: LocalRepairDone) -> Outcome:
    if not isinstance(state, Repairing) or mended.incident != state.incident:
        return Outcome(state, because="that plan was given up")
    resumed = Resumed(replace(state.identity, without=state.plan.without), state.incident, mended)
    return Outcome(resumed, (_said_repaired(resumed),), f"goes on at step {mended.step}")


def _broke(state: State, broke: LocalRepairFailed, now: float, config: WorkerConfig) -> Outcome:
    if not isinstance(state, Repairing) or broke.incident != state.incident:
        return Outcome(state, because="that plan was given up")
    me = state.identity
    report = m.RepairFailed(me.rank, me.incarnation, state.incident, broke.because)
    faulted = Faulted(me, state.incident, report, None, now + config.answer_timeout_s)
    return Outcome(faulted, (SendToManager(report),), broke.because)


def _stepped(state: State, stepped: FirstStepCommitted) -> Outcome:
    if not isinstance(state, Resumed):
        return Outcome(state, because="steps are counted by the beacon")
    me = state.identity
    proof = m.Committed(me.rank, me.incarnation, state.incident, stepped.step)
    because = f"step {stepped.step} is committed: incident {state.incident} is over"
    return Outcome(Training(me, state.incident, proof), (SendToManager(proof),), because)


def _wrote(state: State, wrote: DumpFinished) -> Outcome:
    if not isinstance(state, Dumping):
        return Outcome(state, because="nothing was to be written")
    report = m.Dumped(state.identity.rank, wrote.incident, wrote.step, wrote.because)
    because = wrote.because or f"step {wrote.step} is written"
    return Outcome(
        Leaving(state.identity, state.incident, report), (SendToManager(report),), because
    )


# Time, and what is said twice


def _late(state: State, now: float, config: WorkerConfig) -> Outcome:
    if now < state.deadline:
        return Outcome(state, because="not yet")
    match state:
        case Parking():
            nudged = replace(state, deadline=now + config.nudge_s)
            because = "the training thread has not come to rest"
            return Outcome(nudged, (AbortCollectives(state.incident, because),), because)
        case Faulted() | Parked():
            because = f"no order came in time while {type(state).__name__.lower()}"
            return Outcome(Leaving(state.identity, state.incident), (GiveUp(because),), because)
        case Repairing():
            late = _broke(state, LocalRepairFailed(state.incident, "it took too long"), now, config)
            return replace(
                late, commands=(AbortCollectives(state.incident, late.because), *late.commands)
            )
        case Dumping():
            wrote = DumpFinished(state.incident, Step(0), "writing took too long")
            late = _wrote(state, wrote)
            return replace(late, commands=(*late.commands, GiveUp(late.because)))
        case Joining() | Training() | Resumed() | Leaving():
            return Outcome(state, because="this state may last")
        case _:
            assert_never(state)


def _again(state: Leaving, event: Event) -> Outcome:
    if isinstance(event, ManagerConnected) and state.report is not None:
        return Outcome(state, (SendToManager(state.report),), "said again")
    return Outcome(state, because="this process is leaving")


def _hello(state: State, at: Step) -> tuple[Command, ...]:
    """Everything that a manager which has just started would have to hear."""
    me = state.identity
    phase, more = "training", tuple[Command, ...]()
    match state:
        case Joining():
            phase = "joining"
        case Faulted(report=report):
            more = (SendToManager(report),)
        case Parked(at=stood):
            phase, more = "parked" if stood.whole else "joining", (_where(state),)
        case Resumed():
            more = (_said_repaired(state),)
        case Training(proof=m.Committed() as proof):
            more = (SendToManager(proof),)
        case Training() | Parking() | Repairing() | Dumping() | Leaving():
            pass
        case _:
            assert_never(state)
    hello = m.WorkerHello(
        me.rank,
        me.node,
        me.incarnation,
        me.pid,
        state.incident,
        at,
        phase,
        protected=True,
        shard=me.shard,
        replica=me.replica,
        without=me.without,
    )
    return (SendToManager(hello), *more)


def _where(parked: Parked) -> SendToManager:
    me, stood = parked.identity, parked.at
    return SendToManager(
        m.Parked(
            me.rank,
            me.incarnation,
            parked.incident,
            stood.step,
            stood.whole,
            stood.undo,
            stood.copies,
        )
    )


def _empty_handed(joining: Joining) -> SendToManager:
    me = joining.identity
    nothing = m.Parked(me.rank, me.incarnation, joining.incident, Step(0), whole=False)
    return SendToManager(replace(nothing, copies=joining.copies))


def _said_repaired(resumed: Resumed) -> SendToManager:
    me, mended = resumed.identity, resumed.repair
    return SendToManager(
        m.Repaired(
            me.rank,
            me.incarnation,
            resumed.incident,
            mended.step,
            mended.groups_s,
            mended.state_s,
        )
    )


__all__ = [
    "LEGAL",
    "Dumping",
    "Faulted",
    "Joining",
    "Leaving",
    "Order",
    "Outcome",
    "Parked",
    "Parking",
    "Repairing",
    "Resumed",
    "State",
    "Training",
    "WorkerConfig",
    "step",
]
