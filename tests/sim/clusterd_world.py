"""clusterd, a job's client, its ranks and a cluster in one thread, with virtual time.

clusterd is the real machine behind a journal; it may be killed at any moment and must come back as
it was. The world checks every order against the truth at the moment it is given.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from taskd.core.clusterd.machine import NEW, Outcome, RecoveryConfig, State, step
from taskd.core.clusterd.states import Ended, HandedOver, Idle, Killing
from taskd.model.clusterd import (
    Command,
    Event,
    FaultReport,
    JobConfig,
    JobRegistered,
    PodsSeen,
    Signal,
    Unsubscribed,
)
from taskd.model.ids import JobId
from taskd.model.strategies import Strategy, parse_strategies
from taskd.model.types import Tick
from tests.sim.clusterd_client import REPAIRS, Client
from tests.sim.clusterd_cluster import Cluster
from tests.sim.clusterd_truth import AWAY, DEAD, ERRING, TRAINING, Truth

MAX_STEPS = 20_000
START = 1.0e6
TROUBLE_S = 2_000.0
THEMES = ("anything", "platform", "hot switch", "operations", "elastic", "anything")
"""Events that a seed meets more often than others do."""
PLATFORM = {"platform": 0.9, "hot switch": 0.5}


class World:
    def __init__(self, seed: int, deletes_pods: bool = False) -> None:
        self.random = random.Random(seed)
        self.theme = THEMES[seed % len(THEMES)]
        self.now = START
        self.job = self._job_config()
        if deletes_pods and self.job.cluster and not self.job.platform:
            self.job = replace(self.job, deletes_pods=True)
        self.config = self._recovery_config()
        sizes = tuple(self.random.randint(1, 3) for _ in range(self.random.randint(2, 4)))
        self.truth = Truth(sizes)
        self.client = Client(self, speaks_uuid=self.random.random() < 0.8)
        self.cluster = Cluster(self)
        self.state: State = NEW
        self.up = True
        self.journal: list[tuple[float, Event]] = []
        self.outbox: list[Command] = []
        self.story: list[str] = []
        self.states: list[State] = []
        self.edges: set[tuple[type[State], type[State]]] = set()
        self.orders: dict[tuple[int, str, str], int] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._tiebreak = count()
        self.register()
        if not self.job.cluster and self.chance(0.5):
            self.post(PodsSeen(tuple(self.truth.pods.values())))
        self.cluster.show()
        self.client.start()

    def register(self) -> None:
        self.post(JobRegistered(JobId("job"), self.job, "a seed", "job"))

    def run_again(self) -> None:
        """The user starts the job again."""
        if isinstance(self.state, Ended) and self.state.order is None and self.up:
            self.truth.ended = False
            self.truth.start()
            self.client.start()
            self.register()

    def _job_config(self) -> JobConfig:
        words = {s.value for s in Strategy if self.chance(0.6)}
        if self.theme == "elastic":
            words = words - {Strategy.RECOVER_IN_PLACE} | {Strategy.ELASTIC}
        if self.theme == "hot switch" and self.chance(0.3):
            words = {Strategy.DUMP.value}
        if self.theme == "platform":
            words |= {Strategy.RETRY, Strategy.RECOVER_IN_PLACE}
        cluster = self.theme in ("platform", "hot switch") or self.chance(0.6)
        return JobConfig(
            strategies=parse_strategies(",".join(sorted(words))),
            cluster=cluster,
            platform=cluster and self.chance(PLATFORM.get(self.theme, 0.2)),
            sub_health="hotSwitch" if self.theme == "hot switch" else "graceExit",
            rescheduling=cluster and self.chance(0.5),
            super_pod=cluster and self.chance(0.3),
            framework=self.random.choice(["pytorch", "mindspore"]),
        )

    def _recovery_config(self) -> RecoveryConfig:
        if self.random.random() < 0.5:
            return RecoveryConfig()
        return RecoveryConfig(flush_s=1.0, release_s=10.0, convergence_s=3.0, pickup_s=5.0)

    # Time

    def run(self, until: float) -> None:
        end = self.now + until
        for _ in range(MAX_STEPS):
            deadline = self.state.deadline if self.up else float("inf")
            if self._agenda and self._agenda[0][0] <= max(deadline, self.now):
                at, _, happen = heapq.heappop(self._agenda)
                if at > end:
                    return
                self.now = max(self.now, at)
                happen()
            elif deadline <= end:
                self.now = max(self.now, deadline)
                self.post(Tick())
            else:
                return
        raise AssertionError("\n".join(["no end", *self.story[-60:]]))

    def later(self, within_s: float, happen: Callable[[], None]) -> None:
        at = self.now + self.random.uniform(0, within_s)
        heapq.heappush(self._agenda, (at, next(self._tiebreak), happen))

    @property
    def troubled(self) -> bool:
        return self.now < START + 2 * TROUBLE_S

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pace(self) -> float:
        """Mostly fast; sometimes late, or so late that a deadline passes."""
        return self.random.choices([5.0, 200.0, 2500.0], [90, 9, 1])[0]

    # clusterd

    def post(self, event: Event) -> Outcome | None:
        """Journal, then decide, then act. None: clusterd is not running."""
        if not self.up:
            return None
        self.journal.append((self.now, event))
        before = self.state
        outcome = step(before, event, self.now, self.config)
        self.state = outcome.state
        self.states.append(outcome.state)
        self.story.append(
            f"{self.now - START:9.2f} {event} -> {type(outcome.state).__name__}: {outcome.because}"
            f" [{int(outcome.answer)}]"
        )
        if isinstance(event, FaultReport) and outcome.answer == 0:
            self.truth.reported |= {fault.rank for fault in event.faults}
        if isinstance(before, HandedOver | Killing) and isinstance(outcome.state, Idle):
            # clusterd takes everything for new; faults that are still there are reported again.
            self.truth.reported.clear()
        self._check_step(before, outcome)
        self.outbox.extend(outcome.commands)
        if self.chance(0.004):
            self.crash()
        else:
            self._act()
        return outcome

    def post_later(self, within_s: float, event: Event) -> None:
        def happen() -> None:
            self.post(event)

        self.later(within_s, happen)

    def _act(self) -> None:
        commands, self.outbox = self.outbox, []
        for command in commands:
            self.story.append(f"{'':14}{command}")
            self.perform(command)

    def perform(self, command: Command) -> None:
        if isinstance(command, Signal):
            self.client.hear(command)
        else:
            self.cluster.perform(command)

    def crash(self) -> None:
        """Writes that were decided and not done are done after the restart, possibly twice."""
        self.story.append(f"{self.now - START:9.2f} clusterd is killed")
        self.up = False
        self.client.lose_stream()
        self.later(20.0, self.restart)

    def restart(self) -> None:
        restored: State = NEW
        for at, event in self.journal:
            restored = step(restored, event, at, self.config).state
        self.check(restored == self.state, "the journal tells another story")
        self.up = True
        self.story.append(f"{self.now - START:9.2f} clusterd is back")
        self.post(Unsubscribed())
        self._act()

    # The network: reports of the client

    def report(self, event: Event, heard: Callable[[Outcome], None], tries: int = 40) -> None:
        """Sent until it is answered: late, lost, and sometimes twice.

        With its sender a report dies, too: the connection is gone.
        """
        life = self.client.generation

        def arrive() -> None:
            if self.client.generation != life:
                return
            outcome = None if self.chance(0.1) else self.post(event)
            if outcome is not None:
                heard(outcome)
            elif tries:
                self.later(5.0, lambda: self.report(event, heard, tries - 1))

        def echo() -> None:
            if self.client.generation == life:
                self.post(event)

        self.later(self.pace() if self.client.speaks_uuid else 5.0, arrive)
        if self.client.speaks_uuid and self.chance(0.2):
            self.later(self.random.choice([5.0, 60.0, 600.0]), echo)

    # The checks

    def _check_step(self, before: State, outcome: Outcome) -> None:
        new_incident = outcome.state.job.incident != before.job.incident
        if type(before) is not type(outcome.state) or new_incident:
            self.edges.add((type(before), type(outcome.state)))
        self.check(outcome.state.job.incident >= before.job.incident, "incidents only grow")
        resting = isinstance(outcome.state, Idle) or outcome.state.deadline < float("inf")
        names = ("Shrunk", "Ended")
        self.check(resting or type(outcome.state).__name__ in names, "a state without a deadline")
        for command in outcome.commands:
            if isinstance(command, Signal) and command.sequence > before.job.sequence:
                self._check_order(command)

    def _check_order(self, signal: Signal) -> None:
        if signal.type != "changeStrategy":
            return
        key = (signal.incident, signal.strategy, signal.extra)
        given = self.orders.setdefault(key, signal.sequence)
        self.check(given == signal.sequence, f"decided twice: {key}")
        if signal.strategy in REPAIRS:
            busy = self.truth.all_of(TRAINING)
            self.check(not busy, f"{signal.strategy} while ranks {busy} train")
            broken = self.truth.reported & set(self.truth.all_of(DEAD, ERRING, AWAY))
            forgotten = broken - {fault.rank for fault in signal.faults}
            self.check(not forgotten, f"{signal.strategy} forgets ranks {forgotten}")

    def check(self, holds: bool, what: str) -> None:
        assert holds, "\n".join([what, *self.story[-80:]])
