"""Which nodes and ranks are alive: heartbeats, probes over the bus, and the agents' liveness ports.

`watchdog.py` finds hung ranks in the heartbeats, `silent_nodes.py`
silent nodes; what they find becomes an event of the manager's machine. A node whose heartbeat is
late is probed over the bus, and the state of its TCP connection is inspected.

When a node disconnects, its liveness port is probed, so that the death of an agent is known at
once and not after a timeout. A connection also breaks when a cable is cut or a proxy restarts;
those nodes come back. `bus/liveness_port.py` can tell the difference on most networks. Where it
cannot, `sense.py` waits for the node to return, as it would without the probe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from math import inf
from typing import Any, assert_never

from taskd.bus import liveness_port
from taskd.bus.endpoint import Bus
from taskd.core.manager.watch import silent_nodes as silence
from taskd.core.manager.watch import watchdog
from taskd.core.manager.watch.silent_nodes import (
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
from taskd.core.manager.watch.wait_bounds import LivenessConfig
from taskd.core.manager.watch.watchdog import Hung, Stalled, Warned
from taskd.model.ids import NodeRank, agent
from taskd.model.manager import Event, JobStalled, NodeBack, NodeGone, NodeSilent, RankHung
from taskd.model.messages import AgentHello, KeptAlive, NodeHeartbeat
from taskd.model.types import Tick
from taskd.runtime.clock import monotonic

log = logging.getLogger(__name__)

ANSWER_S = 2.0


class HeartbeatMonitor:
    def __init__(
        self,
        bus: Bus,
        emit: Callable[[Event], None],
        ranks: LivenessConfig,
        nodes: SilenceConfig,
    ) -> None:
        self._bus, self._emit, self._ranks, self._nodes = bus, emit, ranks, nodes
        self._waits, self._beats = watchdog.State(), silence.State()
        self._timer: asyncio.TimerHandle | None = None
        self._probes: dict[NodeRank, set[asyncio.Task[None]]] = {}

    def repair_begins(self) -> None:
        self._waits = replace(self._waits, repaired_at=monotonic())

    def handle(self, beat: NodeHeartbeat) -> None:
        self._step(BeatReceived(beat.node))
        found = watchdog.step(self._waits, beat, monotonic(), self._ranks)
        self._waits = found.state
        for command in found.commands:
            match command:
                case Hung(rank, incarnation, evidence, stopped):
                    log.warning("hung: %s", evidence)
                    self._emit(RankHung(rank, incarnation, evidence, stopped))
                case Stalled(behind, evidence):
                    log.error("stalled: %s", evidence)  # shown by `taskd run`, with all stacks
                    self._emit(JobStalled(behind, evidence))
                case Warned(evidence):
                    log.warning("waiting: %s", evidence)

    def node_left(self, node: NodeRank) -> None:
        """The node is disconnected: `sense.py` and NodeProbes handle that."""
        self._step(NodeLeft(node))

    def _step(self, event: silence.Event) -> None:
        outcome = silence.step(self._beats, event, monotonic(), self._nodes)
        self._beats = outcome.state
        for command in outcome.commands:
            self._perform(command)
        self._arm()

    def _arm(self) -> None:
        deadline = self._beats.deadline
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return  # a tick that is too early costs less than a new timer per heartbeat
            self._timer.cancel()
        self._timer = None
        if deadline < inf:
            # The event loop uses the monotonic clock, too.
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._step(Tick())

    def _perform(self, command: Command) -> None:
        match command:
            case ProbeNode(node):
                probe = asyncio.create_task(self._probe(node))
                self._probes.setdefault(node, set()).add(probe)
            case InspectConnection(node):
                self._step(ConnectionInspected(node, self._bus.tcp_state_of(agent(node))))
            case NodeIsSilent(node, evidence):
                log.warning("silent: %s", evidence)
                self._stop_probing(node)
                self._emit(NodeSilent(node, evidence))
            case NodeIsBack(node, reported):
                self._stop_probing(node)
                if reported:
                    log.warning("node %s: sends heartbeats again", node)
                    self._emit(NodeBack(node))
            case _:
                assert_never(command)

    def _stop_probing(self, node: NodeRank) -> None:
        for probe in self._probes.pop(node, ()):
            probe.cancel()

    async def _probe(self, node: NodeRank) -> None:
        timeout_s = max(self._nodes.stalled_s, self._nodes.unknown_s)
        if await self._bus.send(agent(node), KeptAlive(), timeout_s=timeout_s):
            self._step(ProbeAnswered(node))
            self._probes.pop(node, None)  # this also answers the earlier probes


class NodeProbes:
    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._ports: dict[NodeRank, str] = {}
        """The liveness ports that were reachable."""
        self._disconnected: set[NodeRank] = set()
        self._tasks: dict[NodeRank, asyncio.Task[None]] = {}

    def agent_joined(self, hello: AgentHello) -> None:
        if hello.liveness_port and self._ports.get(hello.node) != hello.liveness_port:
            self._ports.pop(hello.node, None)
            self._start(hello.node, self._check_port(hello.node, hello.liveness_port))

    def node_connected(self, node: NodeRank) -> None:
        self._disconnected.discard(node)
        if (task := self._tasks.pop(node, None)) is not None:
            task.cancel()

    def node_disconnected(self, node: NodeRank) -> None:
        self._disconnected.add(node)
        if node in self._ports:
            self._start(node, self._wait_for_exit(node, self._ports[node]))

    async def wait_for_probe(self, node: NodeRank) -> None:
        """Wait for the probe of this node that is running."""
        if (task := self._tasks.get(node)) is not None:
            await asyncio.wait({task})

    def _start(self, node: NodeRank, work: Coroutine[Any, Any, None]) -> None:
        if (before := self._tasks.pop(node, None)) is not None:
            before.cancel()
        self._tasks[node] = asyncio.create_task(work)

    async def _check_port(self, node: NodeRank, address: str) -> None:
        if await liveness_port.is_reachable(address, ANSWER_S):
            self._ports[node] = address
        else:
            log.info("node %s: liveness port %s is unreachable from here", node, address)

    async def _wait_for_exit(self, node: NodeRank, address: str) -> None:
        if await liveness_port.wait_for_exit(address, ANSWER_S) and node in self._disconnected:
            why = f"its agent has ended: its liveness port {address} is closed"
            self._emit(NodeGone(node, why))
