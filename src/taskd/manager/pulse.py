"""The nodes' heartbeats, judged by `core/liveness`: hung ranks and silent nodes become events.

A node that misses its beats is asked before it is called silent: its bus answers as long as it
lives, whatever its agent is busy with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf

from taskd.core import liveness
from taskd.core.liveness import Back, Beat, Gone, Hung, LivenessConfig, Silent, Tick, Verdict
from taskd.edge.bus import Bus
from taskd.edge.clock import monotonic
from taskd.model.ids import NodeRank, agent
from taskd.model.job import Event, NodeSilent, RankHung
from taskd.model.messages import KeptAlive, NodeBeat

log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""How long a node that has missed its beats may take to answer."""


class Pulse:
    def __init__(self, bus: Bus, happened: Callable[[Event], None], config: LivenessConfig) -> None:
        self._bus, self._happened, self._config = bus, happened, config
        self._state = liveness.State()
        self._timer: asyncio.TimerHandle | None = None
        self._asking: dict[NodeRank, asyncio.Task[None]] = {}

    def heard(self, beat: NodeBeat) -> None:
        self._take(Beat(beat))

    def gone(self, node: NodeRank) -> None:
        """Its link is broken, which is judged elsewhere."""
        self._take(Gone(node))

    def _take(self, event: liveness.Event) -> None:
        found = liveness.step(self._state, event, monotonic(), self._config)
        moved = found.state.deadline != self._state.deadline
        self._state = found.state
        for verdict in found.verdicts:
            self._tell(verdict)
        if moved:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            if self._state.deadline < inf:
                loop = asyncio.get_running_loop()
                # The loop's clock is the monotonic one.
                self._timer = loop.call_at(self._state.deadline, self._take, Tick())

    def _tell(self, verdict: Verdict) -> None:
        match verdict:
            case Hung(rank, _, evidence):
                log.warning("hung: %s", evidence)
                self._happened(RankHung(rank, evidence))
            case Silent(node, evidence):
                log.warning("silent: %s", evidence)
                self._asking[node] = asyncio.create_task(self._ask(node, evidence))
            case Back(node):
                if (asking := self._asking.pop(node, None)) is not None:
                    asking.cancel()

    async def _ask(self, node: NodeRank, evidence: str) -> None:
        if not await self._bus.send(agent(node), KeptAlive(), timeout_s=ANSWER_S):
            self._happened(NodeSilent(node, f"{evidence}, and no answer in {ANSWER_S:g} s"))
