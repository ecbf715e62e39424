"""The nodes' heartbeats: `core/manager/hung_ranks` finds hung ranks in them,
`core/manager/silent_nodes` silent nodes.

What they find becomes an event of the job. A node that is late is asked, over the bus, and looked
at, in the kernel: these are the hands of `core/manager/silent_nodes`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import assert_never

from taskd.bus.endpoint import Bus
from taskd.core.manager import hung_ranks as liveness
from taskd.core.manager import silent_nodes as silence
from taskd.core.manager.hung_ranks import LivenessConfig
from taskd.core.manager.silent_nodes import (
    BeatReceived,
    Command,
    ConnectionInspected,
    InspectConnection,
    NodeIsBack,
    NodeIsSilent,
    NodeLeft,
    ProbeAnswered,
    ProbeNode,
    SilenceConfig,
)
from taskd.model.ids import NodeRank, agent
from taskd.model.manager import Event, NodeSilent, RankHung
from taskd.model.messages import KeptAlive, NodeHeartbeat
from taskd.model.types import Tick
from taskd.runtime.clock import monotonic

log = logging.getLogger(__name__)


class HeartbeatMonitor:
    def __init__(
        self,
        bus: Bus,
        happened: Callable[[Event], None],
        ranks: LivenessConfig,
        nodes: SilenceConfig,
    ) -> None:
        self._bus, self._happened, self._ranks, self._nodes = bus, happened, ranks, nodes
        self._paces, self._beats = liveness.State(), silence.State()
        self._timer: asyncio.TimerHandle | None = None
        self._asking: dict[NodeRank, set[asyncio.Task[None]]] = {}

    def heard(self, beat: NodeHeartbeat) -> None:
        self._take(BeatReceived(beat.node))
        found = liveness.step(self._paces, beat, monotonic(), self._ranks)
        self._paces = found.state
        for hung in found.commands:
            log.warning("hung: %s", hung.evidence)
            self._happened(RankHung(hung.rank, hung.evidence))

    def gone(self, node: NodeRank) -> None:
        """Its link is broken, which is judged elsewhere."""
        self._take(NodeLeft(node))

    def _take(self, event: silence.Event) -> None:
        outcome = silence.step(self._beats, event, monotonic(), self._nodes)
        self._beats = outcome.state
        for command in outcome.commands:
            self._perform(command)
        self._arm()

    def _arm(self) -> None:
        deadline = self._beats.deadline
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return  # it ticks too early, which costs less than a new timer for every beat
            self._timer.cancel()
        self._timer = None
        if deadline < inf:
            # The loop's clock is the monotonic one.
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._take(Tick())

    def _perform(self, command: Command) -> None:
        match command:
            case ProbeNode(node):
                asking = asyncio.create_task(self._ask(node))
                self._asking.setdefault(node, set()).add(asking)
            case InspectConnection(node):
                self._take(ConnectionInspected(node, self._bus.tcp_state_of(agent(node))))
            case NodeIsSilent(node, evidence):
                log.warning("silent: %s", evidence)
                self._stop_asking(node)
                self._happened(NodeSilent(node, evidence))
            case NodeIsBack(node):
                self._stop_asking(node)
            case _:
                assert_never(command)

    def _stop_asking(self, node: NodeRank) -> None:
        for asking in self._asking.pop(node, ()):
            asking.cancel()

    async def _ask(self, node: NodeRank) -> None:
        timeout_s = max(self._nodes.stalled_s, self._nodes.unknown_s)
        if await self._bus.send(agent(node), KeptAlive(), timeout_s=timeout_s):
            self._take(ProbeAnswered(node))
            self._asking.pop(node, None)  # the other questions are answered with it
