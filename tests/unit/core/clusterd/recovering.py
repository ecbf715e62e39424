"""Drives clusterd's machine by hand, one event at a time, for its tests."""

from __future__ import annotations

from typing import TypeVar

from taskd.core.clusterd.machine import NEW, Outcome, RecoveryConfig, State, step
from taskd.core.clusterd.states import Ended, Idle
from taskd.model.clusterd import (
    Command,
    Event,
    FaultReport,
    JobConfig,
    JobRegistered,
    Pod,
    PodsSeen,
    ResultReport,
    Signal,
    StopReport,
    StrategiesReport,
    Subscribed,
)
from taskd.model.faults import Fault, FaultKind
from taskd.model.ids import JobId, NodeRank, Rank
from taskd.model.strategies import parse_strategies
from taskd.model.types import Tick

ALL = "retry,recover-in-place,recover,elastic-training,dump"
OFFERS = ("retry", "recover", "downgrade", "dump", "exit")
C = TypeVar("C")


class Machine:
    """`pods` are the ranks of each pod or, without a cluster, of each machine."""

    def __init__(
        self,
        strategies: str = ALL,
        pods: tuple[int, ...] = (),
        config: RecoveryConfig | None = None,
        *,
        cluster: bool | None = None,
        platform: bool = False,
        sub_health: str = "ignore",
        rescheduling: bool = False,
        framework: str = "pytorch",
        no_backup_nic: bool = False,
    ) -> None:
        self.state: State = NEW
        self.now = 1_000.0
        self.config = config or RecoveryConfig()
        self.outcome = Outcome(self.state)
        self.job_config = JobConfig(
            strategies=parse_strategies(strategies),
            cluster=bool(pods) if cluster is None else cluster,
            platform=platform,
            sub_health=sub_health,
            rescheduling=rescheduling,
            framework=framework,
            no_backup_nic=no_backup_nic,
        )
        self.pods = self._pods(pods)
        self.register()
        if pods:
            self.see_pods()
        self.send(Subscribed())

    def _pods(self, sizes: tuple[int, ...]) -> dict[int, Pod]:
        pods, first = {}, 0
        for node, size in enumerate(sizes):
            ranks = tuple(Rank(rank) for rank in range(first, first + size))
            devices = tuple(str(i) for i in range(size))
            uid = f"pod{node}"
            pods[node] = Pod(NodeRank(node), uid, uid, f"host{node}", ranks, devices)
            first += size
        return pods

    def send(self, *events: Event) -> Outcome:
        for event in events:
            self.outcome = step(self.state, event, self.now, self.config)
            self.state = self.outcome.state
        return self.outcome

    def register(self) -> Outcome:
        return self.send(JobRegistered(JobId("job"), self.job_config, "seed", "job"))

    def wait(self, seconds: float) -> Outcome:
        self.now += seconds
        return self.send(Tick())

    def see_pods(self, *extra: Pod, phase: str = "Running") -> Outcome:
        return self.send(PodsSeen((*self.pods.values(), *extra), phase))

    def replace_pods(self, *nodes: int) -> Outcome:
        for node in nodes:
            old = self.pods[node]
            uid = f"{old.uid}'"
            self.pods[node] = Pod(old.node_rank, uid, uid, "elsewhere", old.ranks, old.devices)
        return self.see_pods()

    @property
    def uuid(self) -> str:
        assert not isinstance(self.state, Idle | Ended)
        return self.state.round.uuid

    # The events of a round

    def fault(self, *ranks: int, kind: FaultKind = FaultKind.ORDINARY) -> Outcome:
        return self.send(FaultReport(tuple(Fault(Rank(rank), kind) for rank in ranks)))

    def stopped(self, code: int = 0, faults: tuple[Fault, ...] = ()) -> Outcome:
        return self.send(StopReport(code, self.uuid, faults=faults))

    def offers(self, *words: str) -> Outcome:
        return self.send(StrategiesReport(words or OFFERS, self.uuid))

    def reports(self, code: int, strategy: str, *isolate: int) -> Outcome:
        ranks = tuple(Rank(rank) for rank in isolate)
        return self.send(ResultReport(code, strategy, ranks, self.uuid))

    # The orders

    def said(self, kind: type[C]) -> list[C]:
        return [command for command in self.outcome.commands if isinstance(command, kind)]

    @property
    def order(self) -> Signal:
        (signal,) = self.said(Signal)
        return signal

    def commands(self) -> tuple[Command, ...]:
        return self.outcome.commands


def at(machine: Machine, state: type[State]) -> None:
    assert isinstance(machine.state, state), f"{machine.state}: {machine.outcome.because}"
