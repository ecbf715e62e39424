"""What is recorded of the job: hears the switch, tells the nodes, knows how the ranks fare.

The switch comes from clusterd (TrainingDataTrace) or from Ascend's file; whichever changed last
counts. Agents of ours pass it on to their ranks through shared memory; workers on the bus, Ascend's
among them, are told with the codes 700 to 711 and answer with 14DC. Whoever joins late is told
when he says hello, whoever does not follow is told again.
"""

from __future__ import annotations

import asyncio
import logging

from taskd.ascend.switch_file import LOOK_S, SwitchFile
from taskd.bus.endpoint import Bus
from taskd.manager.pace_reports import StragglerMonitor
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
)
from taskd.runtime.clock import monotonic, next_before

log = logging.getLogger(__name__)

INSIST_S = 30.0
"""How long a rank may take to follow before all are told again."""


class ProfilingControl:
    def __init__(self, bus: Bus, switch_file: str, stragglers: StragglerMonitor) -> None:
        self._bus, self._file = bus, SwitchFile(switch_file)
        self.wanted: Part | None = None
        """None: nobody has said anything yet."""
        self.paces: dict[Rank, Pace] = {}
        self.answers: dict[Rank, ProfilingSet] = {}
        """Of the workers on the bus."""
        self.stragglers = stragglers
        self._told_at = 0.0
        self._outbox: asyncio.Queue[Position] = asyncio.Queue()

    def set(self, parts: Part, by: str) -> None:
        if parts == self.wanted:
            return
        log.info("%s asks to record %s", by, ", ".join(names_of(parts)) or "nothing")
        self.wanted = parts
        self._tell(EVERY_AGENT, EVERY_WORKER)

    def heard(self, src: Position, body: Body) -> None:
        match body:
            case NodeHeartbeat(paces=paces):
                self.paces.update({pace.rank: pace for pace in paces})
                if paces:
                    self.stragglers.paced(paces)
            case ProfilingSet() if src.role == Role.WORKER and src.process_rank.isdecimal():
                self.answers[Rank(int(src.process_rank))] = body
            case AgentHello() | AgentRegistered() | WorkerRegistered():
                if isinstance(body, WorkerRegistered) and src.process_rank.isdecimal():
                    self.answers.setdefault(Rank(int(src.process_rank)), ProfilingSet(OFF, OFF))
                if self.wanted is not None:
                    self._outbox.put_nowait(src)
            case _:
                pass

    async def keep(self) -> None:
        """Tell whoever is to be told; now and then look at the file, and who does not follow."""
        next_look = monotonic()
        while True:
            to = await next_before(self._outbox, next_look, monotonic)
            if to is not None:
                await self._bus.send(to, order_for(self.wanted or NOTHING), sync=False)
                continue
            next_look = monotonic() + LOOK_S
            if (parts := self._file.look()) is not None:
                self.set(parts, self._file.path)
            late = monotonic() - self._told_at > INSIST_S
            if self.wanted is not None and late and not self._is_followed(self.wanted):
                self._tell(EVERY_AGENT, EVERY_WORKER)

    def tell(self) -> str:
        """For people: what is recorded, and where that fails."""
        if not self.wanted and not any(pace.recorded for pace in self.paces.values()):
            return "off"
        wanted = self.wanted or NOTHING
        text = ", ".join(names_of(wanted)) or "off"
        there = [pace.rank for pace in self.paces.values() if pace.recorded == wanted]
        there += [rank for rank in self.answers if rank not in self.paces]
        text += f" on {len(there)} ranks"
        problems = {pace.problem for pace in self.paces.values() if pace.problem}
        return "; ".join([text, *sorted(problems)])

    def _tell(self, *everybody: Position) -> None:
        self._told_at = monotonic()
        for to in everybody:
            self._outbox.put_nowait(to)

    def _is_followed(self, wanted: Part) -> bool:
        for rank, answer in self.answers.items():
            told = answer.default_domain, answer.communication
            domains = wanted & DEFAULT_DOMAIN, wanted & Part.COMMUNICATION
            if rank not in self.paces and any(
                state not in (ON if domain else OFF, FAILED)
                for state, domain in zip(told, domains, strict=True)
            ):
                return False
        return True


def order_for(parts: Part) -> SetProfiling:
    """Ascend's workers record nothing at all while their default domain is off."""
    return SetProfiling(bool(parts), bool(parts & Part.COMMUNICATION), names_of(parts))
