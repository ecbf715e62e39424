"""The job's side: a manager that follows signals and may die, be late, fail or be disconnected."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from taskd.core.clusterd.machine import Outcome
from taskd.model.clusterd import (
    Event,
    FaultReport,
    ResultReport,
    Signal,
    SignalDelivered,
    StopReport,
    StrategiesReport,
    Stream,
    Subscribed,
    Unsubscribed,
)
from taskd.model.faults import Fault, FaultKind
from taskd.model.ids import Rank
from tests.sim.clusterd_truth import AWAY, DEAD, ERRING, STANDING, TRAINING

if TYPE_CHECKING:
    from tests.sim.clusterd_world import World

REPAIRS = ("retry", "recover", "downgrade", "dump")


class Client:
    def __init__(self, world: World, speaks_uuid: bool) -> None:
        self.world = world
        self.speaks_uuid = speaks_uuid
        self.generation = 0
        """Incarnation of the manager: messages of an earlier one are lost."""
        self.task = 0
        """Number of the order: a newer order ends the work on an older one."""
        self.subscribed = False
        self.sequence = 0
        self.incident = 0
        """The incident for which the ranks are parked."""
        self.answered: dict[int, Event] = {}
        self.kinds: dict[Rank, FaultKind] = {}
        """The fault kind of each rank with a fault."""

    # Starts and ends

    def start(self) -> None:
        self.generation += 1
        self.task += 1
        self.subscribed = False
        self.sequence = self.incident = 0
        self.answered.clear()
        self._again(5.0, self._subscribe)
        self._again(5.0, self.report_faults)

    def stop(self) -> None:
        """Its pod has gone."""
        self.lose_stream()
        self.generation += 1

    def die(self) -> None:
        """A new manager starts in the same pod and finds the ranks as they are."""
        if 0 in self.world.truth.pods:
            self.stop()
            self.start()

    def lose_stream(self) -> None:
        if self.subscribed:
            self.subscribed = False
            self.world.post(Unsubscribed())
            self._again(self.world.random.choice([5.0, 5.0, 120.0]), self._subscribe)

    def _subscribe(self) -> None:
        if self.subscribed:
            return
        if not self.world.up:
            self._again(5.0, self._subscribe)
            return
        self.subscribed = True
        self.world.post(Subscribed())
        self.world.post(Subscribed(Stream.NIC))
        self.world.post(Subscribed(Stream.STRESS))

    def _again(self, within_s: float, happen: Callable[[], None]) -> None:
        generation = self.generation
        self.world.later(within_s, lambda: happen() if self.generation == generation else None)

    def notice(self) -> None:
        """A rank has died: the manager sees it sooner or later."""
        self._again(5.0, self.report_faults)

    def report_faults(self) -> None:
        """All current faults; reported until the report is answered."""
        truth = self.world.truth
        faults = [Fault(rank) for rank in truth.all_of(DEAD)]
        faults += [Fault(rank, self.kinds[rank]) for rank in truth.all_of(ERRING)]
        if faults and not truth.ended:
            self.world.report(FaultReport(tuple(faults)), self._faults_heard)

    def _faults_heard(self, outcome: Outcome) -> None:
        """Refused while the whole job is being restarted: reported again if still true."""
        if outcome.answer:
            self._again(60.0, self.report_faults)

    # Signals

    def hear(self, signal: Signal) -> None:
        if not self.subscribed:
            return
        if self.world.chance(0.04):
            self.lose_stream()
            return
        self.world.post_later(1.0, SignalDelivered(signal.sequence))
        if signal.sequence in self.answered:
            self._report(self.answered[signal.sequence])
        elif signal.sequence > self.sequence:
            self._take(signal)

    def _take(self, signal: Signal) -> None:
        self.sequence = signal.sequence
        repair = signal.type == "globalFault" or signal.strategy in REPAIRS
        if repair and signal.incident != self.incident:
            # This manager was not running when the ranks were ordered to stop.
            self.world.truth.move(STANDING, TRAINING)
        self.incident = signal.incident
        match signal.type, signal.actions[:1]:
            case "preExitProcess", _:
                self._work(signal, 5.0, lambda: self._leave(signal))
            case "stopTrain", _:
                self._work(signal, 5.0, lambda: self._stand(signal))
            case "globalFault", _:
                self._work(signal, 5.0, lambda: self._negotiate(signal))
            case "changeStrategy", _:
                within_s = 5.0 if signal.strategy == "exit" else self.world.pace()
                self._work(signal, within_s, lambda: self._follow(signal))
            case "saveAndExit", _:
                self._work(signal, 30.0, lambda: self._dump(signal))
            case "faultNodesExit", _:
                self._kill_nodes(signal)
                self._work(signal, 20.0, lambda: self._shrink(signal, isolate=False))
            case "killMaster", _:
                self.world.cluster.restart_job()
            case "hot-switch", ("hot switch",) if self.world.chance(0.2):
                refusal = StrategiesReport(("exit",), self._uuid(signal))
                self._work(signal, 5.0, lambda: self._answer(signal, refusal))
            case "hot-switch", ("new pod running",):
                self._work(signal, 5.0, lambda: self._pause_to_move(signal))
            case _:
                pass

    def _work(self, signal: Signal, within_s: float, happen: Callable[[], None]) -> None:
        self.task += 1
        task = self.task
        self._again(within_s, lambda: happen() if self.task == task else None)

    def _answer(self, signal: Signal, event: Event) -> None:
        self.answered[signal.sequence] = event
        self._report(event)

    def _report(self, event: Event) -> None:
        self.world.report(event, lambda _taken: None)

    def _uuid(self, signal: Signal) -> str:
        return signal.uuid if self.speaks_uuid else ""

    # Effects of the orders on the ranks

    def _leave(self, signal: Signal) -> None:
        for node in signal.nodes:
            for rank in self.world.truth.homes[node]:
                self.world.truth.kill(rank)
        if self.world.chance(0.7):
            self.report_faults()

    def _stand(self, signal: Signal) -> None:
        code = 0
        if self.world.chance(0.02):
            code = self.world.random.choice([404, 499])
        else:
            self.world.truth.move(STANDING, TRAINING)
        self._answer(signal, StopReport(code, self._uuid(signal)))

    def _negotiate(self, signal: Signal) -> None:
        if "fault_nodes_exit" in signal.actions:
            self._kill_nodes(signal)
        words = ["retry", "recover", "downgrade", "dump", "exit"]
        offered = tuple(word for word in words if self.world.chance(0.85))
        self._answer(signal, StrategiesReport(offered, self._uuid(signal)))

    def _kill_nodes(self, signal: Signal) -> None:
        for node in signal.nodes:
            self.world.truth.reported |= set(self.world.truth.homes[node])
            self.world.cluster.pod_fails(node)

    def _follow(self, signal: Signal) -> None:
        leave = signal.strategy == "recover" and signal.extra != "recover-in-place"
        if leave or "fault_nodes_exit" in signal.actions:
            self._kill_nodes(signal)
        match signal.strategy:
            case "retry":
                self._retry(signal)
            case "recover" if not self.world.job.cluster and self.world.chance(0.5):
                self._recover(signal, (DEAD, ERRING))
            case "recover":
                self._recover(signal)
            case "downgrade":
                self._shrink(signal, isolate=self.world.chance(0.5))
            case "upgrade":
                self._recover(signal)
            case "dump":
                self._dump(signal)
            case "exit":
                self.world.truth.ended = not self.world.job.cluster
                self.world.truth.move(DEAD, TRAINING, STANDING, ERRING, AWAY)
                self._kill_nodes(signal)
                self._start_over(signal)
            case "continue" | "migration":
                if self.world.chance(0.1) or self.world.truth.all_of(DEAD):
                    self._status(signal, 499)
                else:
                    self.world.truth.move(TRAINING, STANDING)
                    self._status(signal, 0)
            case _:
                raise AssertionError(f"an unknown order: {signal}")

    def _start_over(self, signal: Signal) -> None:
        """The agents of the remaining pods restart their processes once all pods are there."""
        truth = self.world.truth
        if truth.ended:
            if self.world.chance(0.5):
                self.world.later(500.0, self.world.run_again)
            return
        if len(truth.pods) == len(truth.homes) and self.world.chance(0.5):
            truth.move(TRAINING, DEAD)
        else:
            self._work(signal, 30.0, lambda: self._start_over(signal))

    def _retry(self, signal: Signal) -> None:
        truth = self.world.truth
        if truth.all_of(DEAD) or self.world.chance(0.2):
            self._status(signal, self.world.random.choice([405, 405, 406, 499]))
            return
        truth.move(TRAINING, STANDING, ERRING)
        self._status(signal, 0)

    def _recover(self, signal: Signal, among: tuple[str, ...] = (DEAD, ERRING, AWAY)) -> None:
        """Start new processes for lost ranks that have a place."""
        truth = self.world.truth
        if signal.strategy == "recover" and not self.speaks_uuid and truth.all_of(AWAY):
            # MindIO repairs no rank of a job that has shrunk.
            self._status(signal, 406)
            return
        homeless = [rank for rank in truth.all_of(*among) if not self._can_run(rank)]
        if homeless:
            # The scheduler may still be working on it.
            if self.world.chance(0.1):
                self._status(signal, 499)
            else:
                self._work(signal, 30.0, lambda: self._recover(signal, among))
            return
        if self.world.chance(0.15):
            self._status(signal, self.world.random.choice([405, 406, 499]))
            return
        truth.move(TRAINING, *among, STANDING)
        # A job that had shrunk says which ranks are still missing.
        missing = tuple(truth.all_of(AWAY))
        self._answer(signal, ResultReport(0, signal.strategy, missing, self._uuid(signal)))

    def _can_run(self, rank: Rank) -> bool:
        device = self.world.truth.device_of(rank)
        node = self.world.truth.node_of(rank)
        here = node in self.world.truth.pods or not self.world.job.cluster
        return here and (device is None or device.level in ("RestartBusiness", "SubHealthFault"))

    def _shrink(self, signal: Signal, isolate: bool) -> None:
        truth = self.world.truth
        if self.world.chance(0.15):
            self._status(signal, 499, "downgrade")
            return
        if isolate:
            node = truth.node_of(truth.all_of(DEAD, ERRING, STANDING)[-1])
            isolated = truth.homes[node]
            status = ResultReport(201, "downgrade", isolated, self._uuid(signal))
            self._answer(signal, status)
            return
        truth.move(AWAY, DEAD, ERRING)
        truth.move(TRAINING, STANDING)
        self._status(signal, 0, "downgrade")
        if not self.world.job.cluster:
            self._again(600.0, self._offer_to_grow)

    def _offer_to_grow(self) -> None:
        """Without a cluster, only the job knows that its ranks can be placed again."""
        if self.world.truth.all_of(AWAY):
            self._report(StrategiesReport(("upgrade",)))

    def _dump(self, signal: Signal) -> None:
        self.world.truth.move(STANDING, TRAINING)
        self._status(signal, 407 if self.world.chance(0.2) else 0, "dump")

    def _status(self, signal: Signal, code: int, strategy: str = "") -> None:
        word = strategy or signal.strategy
        if code and word != "continue":
            self.world.truth.move(STANDING, TRAINING)
        self._answer(signal, ResultReport(code, word, (), self._uuid(signal)))

    def _pause_to_move(self, signal: Signal) -> None:
        self.world.truth.move(STANDING, TRAINING)
        broken = self.world.truth.all_of(DEAD)
        offered = ("exit",) if broken or self.world.chance(0.15) else ("migration", "exit")
        self._answer(signal, StrategiesReport(offered, self._uuid(signal)))
