"""One training process in virtual time: the real machine, and a model of its training thread.

The thread computes, enters the step's collective, leaves it when all ranks have entered, passes the
gate, updates, commits; it dies, hangs or is aborted at any of these points. Used by
`tests/sim/job_world.py`, which knows the real state of all processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core.worker import machine, states
from taskd.model import messages as m
from taskd.model.faults import FaultCause
from taskd.model.ids import Incident, NodeRank, Step
from taskd.model.types import Tick
from taskd.model.worker import (
    AbortCollectives,
    DumpFinished,
    Event,
    ExecuteOrder,
    FirstStepCommitted,
    GiveUp,
    Identity,
    LocalRepairDone,
    LocalRepairFailed,
    ManagerConnected,
    SendToManager,
    StepFailed,
    ThreadParked,
)

if TYPE_CHECKING:
    from tests.sim.job_world import World

CONFIG = states.WorkerConfig()
PACE_S = 0.2


class Process:
    def __init__(self, world: World, me: Identity, attempt: int, incident: Incident) -> None:
        self.world, self.me, self.attempt = world, me, attempt
        joining = attempt in world.begun
        kind = states.Joining if joining else states.Training
        self.machine: states.State = kind(me, incident)
        self.held: int | None = None if joining else 0
        self.group: object = None
        self.thread = "booting"
        self.plan: m.Repair | None = None
        self.aborted = self.hung = False
        self.alive = True
        world.later(PACE_S, self._boot)

    @property
    def rank(self) -> int:
        return self.me.rank

    def __str__(self) -> str:
        return f"rank {self.rank}.{self.me.incarnation}"

    # The connection to the manager

    def step_machine(self, event: Event) -> None:
        if not self.alive or not self.world.protected:
            return
        outcome = machine.step(self.machine, event, self.world.now, CONFIG)
        self.world.note(f"{self} {_name(event)} -> {_name(outcome.state)}: {outcome.because}")
        self.machine = outcome.state
        for command in outcome.commands:
            match command:
                case SendToManager(body):
                    self.world.to_manager(self.me.node, str(self), body)
                case AbortCollectives():
                    self.aborted = True
                    self._wake()
                case ExecuteOrder(order):
                    self._order(order)
                case GiveUp(because):
                    self.world.exits(self, 1, because)
        deadline = self.machine.deadline
        if deadline < float("inf"):
            self.world.at(deadline, lambda: self._tick(deadline))

    def _tick(self, deadline: float) -> None:

        if self.alive and self.machine.deadline == deadline:
            self.step_machine(Tick())

    def heard(self, body: m.Body) -> None:
        if isinstance(body, m.RequestHello):
            self.step_machine(ManagerConnected(Step(self.held or 0)))
        elif isinstance(body, m.Park | m.Repair | m.Dump | m.Leave):
            self.step_machine(body)

    def _order(self, order: m.Repair | m.Dump | m.Leave) -> None:
        match order:
            case m.Repair():
                self.plan, self.thread, self.aborted = order, "meeting", False
                self.world.later(PACE_S, self._meet)
            case m.Dump():
                done = DumpFinished(order.incident, order.step, "")
                self.world.later(1.0, lambda: self._written(done))
            case m.Leave():
                self.world.later(PACE_S, lambda: self.world.exits(self, 0, "it leaves"))

    def _written(self, done: DumpFinished) -> None:
        self.step_machine(done)
        self.world.later(PACE_S, lambda: self.world.exits(self, 0, "its dump is written"))

    # The training thread

    def _boot(self) -> None:
        if not self.alive or self.hung:
            return
        self.step_machine(ManagerConnected(Step(self.held or 0)))
        if isinstance(self.machine, states.Joining):
            self.world.later(PACE_S, self._stand)
        else:
            self.thread = "starting"
            self.world.form_start(self.attempt)

    def start(self, group: object) -> None:
        self.group = group
        self.compute()

    def compute(self) -> None:
        self.thread = "computing"
        self.world.later(PACE_S, self._enter)

    def _enter(self) -> None:
        if not self._is_at("computing"):
            return
        if self.aborted:
            self._stand()
            return
        assert self.held is not None
        self.thread = "entered"
        self.world.entered(self)

    def reduced(self, group: object, step: int) -> None:
        """All ranks had entered, so the result may be here; or it was aborted just before."""
        if not self._is_at("entered") or self.group is not group or self.held != step:
            return
        if step >= self.world.steps:
            self.world.exits(self, 0, "it has finished")
            return
        self.thread = "reduced"
        self.world.later(PACE_S / 4, self._gate)

    def fail(self, group: object, why: str) -> None:
        if not self.world.protected and self._is_at("entered"):
            self.world.exits(self, 1, why)
        elif self._is_at("entered") and self.group is group and not self.aborted:
            self.step_machine(StepFailed(FaultCause.COMMUNICATION, why))
            self._stand()

    def _gate(self) -> None:
        if self._is_at("reduced"):
            if self.aborted:
                self._stand()
            else:
                self.thread = "updating"
                self.world.later(PACE_S / 4, self._commit)

    def _commit(self) -> None:
        if not self._is_at("updating"):
            return
        assert self.held is not None
        self.held += 1
        self.world.committed(self)
        if isinstance(self.machine, states.Resumed):
            self.step_machine(FirstStepCommitted(Step(self.held)))
        if self.aborted:
            self._stand()
        else:
            self.compute()

    def _stand(self) -> None:
        if not self.alive or self.hung:
            return
        self.thread, self.aborted = "standing", False
        self.step_machine(ThreadParked(Step(self.held or 0), whole=self.held is not None))

    def _wake(self) -> None:
        if self.thread == "entered":
            self.world.later(PACE_S / 10, self._leave_collective)
        elif self.thread == "meeting":
            self.world.later(PACE_S / 10, self._give_up)

    def _leave_collective(self) -> None:
        if self._is_at("entered") and self.aborted:
            self._stand()

    # Repair

    def _meet(self) -> None:
        if self._is_at("meeting") and self.plan is not None:
            self.world.meets(self)

    def _give_up(self) -> None:
        if self._is_at("meeting") and self.plan is not None:
            incident, self.plan = self.plan.incident, None
            self.step_machine(LocalRepairFailed(incident, "aborted, or a peer is lost"))
            self._stand()

    def cannot_meet(self, plan: m.Repair) -> None:
        if self.plan is not None and self.plan.incident == plan.incident:
            self._give_up()

    def repaired(self, plan: m.Repair, group: object) -> None:
        if not self._is_at("meeting") or self.plan is None or self.plan.incident != plan.incident:
            return
        self.held, self.group, self.plan = plan.resume, group, None
        self.step_machine(LocalRepairDone(plan.incident, plan.resume))
        self.compute()

    def _is_at(self, thread: str) -> bool:
        return self.alive and not self.hung and self.thread == thread

    @property
    def node(self) -> NodeRank:
        return self.me.node


def _name(value: object) -> str:
    return type(value).__name__
