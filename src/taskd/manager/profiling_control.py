"""Profiling of the job: receives the switch, sends it to the nodes, collects the ranks' paces.

The switch comes from clusterd (TrainingDataTrace) or from Ascend's file; the last change counts.
Our agents pass it to their ranks through shared memory; workers on the bus, such as Ascend's, get
codes 700 to 711 and reply with 14DC. A process that joins later gets the switch after its hello;
one that does not follow gets it again.

`stragglers.py` judges the paces. `taskd status` shows the stragglers, and clusterd
gets them as sub-health: it journals them and, in a cluster, follows the job's
`subHealthyStrategy`.
"""

from __future__ import annotations

import asyncio
import logging

from taskd.ascend.switch_file import LOOK_S, SwitchFile
from taskd.bus.endpoint import Bus
from taskd.core.manager.watch import stragglers as straggler_machine
from taskd.core.manager.watch.stragglers import (
    Accuse,
    Clear,
    Event,
    JobDisturbed,
    PacesReported,
    Straggler,
    StragglerConfig,
)
from taskd.model.ids import EVERY_AGENT, EVERY_WORKER, Position, Rank, Role
from taskd.model.messages import (
    AgentHello,
    AgentRegistered,
    Body,
    NodeHeartbeat,
    ProfilingSet,
    SetProfiling,
    WorkerRegistered,
)
from taskd.model.profiling import (
    DEFAULT_DOMAIN,
    FAILED,
    NOTHING,
    OFF,
    ON,
    Pace,
    Part,
    names_of,
    words_of,
)
from taskd.runtime.clock import monotonic, next_before, wall
from taskd.wire._pb import control_pb2 as control

log = logging.getLogger(__name__)

RESEND_S = 30.0
"""How long a rank may take to follow the switch before it is sent again to all."""


class ProfilingControl:
    def __init__(self, bus: Bus, switch_file: str, stragglers: StragglerMonitor) -> None:
        self._bus, self._file = bus, SwitchFile(switch_file)
        self.wanted: Part | None = None
        """None: no switch has been received yet."""
        self.paces: dict[Rank, Pace] = {}
        self.answers: dict[Rank, ProfilingSet] = {}
        """The replies of the workers on the bus."""
        self.stragglers = stragglers
        self._sent_at = 0.0
        self._outbox: asyncio.Queue[Position] = asyncio.Queue()

    def set_parts(self, parts: Part, by: str) -> None:
        if parts == self.wanted:
            return
        log.info("profiling: set by %s, parts=%s", by, ",".join(names_of(parts)) or "none")
        self.wanted = parts
        self._send(EVERY_AGENT, EVERY_WORKER)

    def handle(self, src: Position, body: Body) -> None:
        match body:
            case NodeHeartbeat(paces=paces):
                self.paces.update({pace.rank: pace for pace in paces})
                if paces:
                    self.stragglers.add_paces(paces)
            case ProfilingSet() if src.role == Role.WORKER and src.process_rank.isdecimal():
                self.answers[Rank(int(src.process_rank))] = body
            case AgentHello() | AgentRegistered() | WorkerRegistered():
                if isinstance(body, WorkerRegistered) and src.process_rank.isdecimal():
                    self.answers.setdefault(Rank(int(src.process_rank)), ProfilingSet(OFF, OFF))
                if self.wanted is not None:
                    self._outbox.put_nowait(src)
            case _:
                pass

    async def run(self) -> None:
        """Send the switch where it is due; check the file and who does not follow regularly."""
        next_look = monotonic()
        while True:
            to = await next_before(self._outbox, next_look, monotonic)
            if to is not None:
                await self._bus.send(to, order_for(self.wanted or NOTHING), sync=False)
                continue
            next_look = monotonic() + LOOK_S
            if (parts := self._file.look()) is not None:
                self.set_parts(parts, self._file.path)
            late = monotonic() - self._sent_at > RESEND_S
            if self.wanted is not None and late and not self._all_follow(self.wanted):
                self._send(EVERY_AGENT, EVERY_WORKER)

    def describe(self) -> str:
        """What is recorded and where that fails, for `taskd status`."""
        if not self.wanted and not any(pace.recorded for pace in self.paces.values()):
            return "off"
        wanted = self.wanted or NOTHING
        text = ", ".join(words_of(wanted)) or "off"
        there = [pace.rank for pace in self.paces.values() if pace.recorded == wanted]
        there += [rank for rank in self.answers if rank not in self.paces]
        text += f" on {len(there)} ranks"
        problems = {pace.problem for pace in self.paces.values() if pace.problem}
        return "; ".join([text, *sorted(problems)])

    def _send(self, *receivers: Position) -> None:
        self._sent_at = monotonic()
        for to in receivers:
            self._outbox.put_nowait(to)

    def _all_follow(self, wanted: Part) -> bool:
        for rank, answer in self.answers.items():
            actual = answer.default_domain, answer.communication
            domains = wanted & DEFAULT_DOMAIN, wanted & Part.COMMUNICATION
            if rank not in self.paces and any(
                state not in (ON if domain else OFF, FAILED)
                for state, domain in zip(actual, domains, strict=True)
            ):
                return False
        return True


def order_for(parts: Part) -> SetProfiling:
    """The message for these parts. Ascend's workers need the default domain for any recording."""
    return SetProfiling(bool(parts), bool(parts & Part.COMMUNICATION), names_of(parts))


class StragglerMonitor:
    def __init__(self, config: StragglerConfig) -> None:
        self._config = config
        self._state = straggler_machine.State()

    def add_paces(self, paces: tuple[Pace, ...]) -> None:
        self._step(PacesReported(paces))

    def job_disturbed(self) -> None:
        """The job has been interrupted: steps before and after that cannot be compared."""
        self._step(JobDisturbed())

    def current(self) -> list[control.Straggler]:
        """All stragglers, in the order of their ranks."""
        behind = wall() - monotonic()
        return [
            control.Straggler(
                rank=slow.rank,
                cause=slow.cause.value,
                late_ms=slow.late_s * 1000,
                slower=slow.slower,
                since_unix_ms=round((slow.since + behind) * 1000),
                evidence=slow.evidence,
            )
            for slow in self._sorted()
        ]

    def _sorted(self) -> list[Straggler]:
        return [slow for _, slow in sorted(self._state.slow.items())]

    def _step(self, event: Event) -> None:
        outcome = straggler_machine.step(self._state, event, monotonic(), self._config)
        self._state = outcome.state
        for command in outcome.commands:
            match command:
                case Accuse(straggler):
                    log.warning("%s", straggler.evidence)
                case Clear(straggler):
                    log.info("rank %d: not a straggler any more", straggler.rank)
