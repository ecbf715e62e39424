"""The manager's inputs: bus messages, connections of nodes, and nodes that do not come back.

All of them become events in one inbox, in the order of arrival.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from taskd.bus.admission import LOG_RATE, LOGGED_HOSTS
from taskd.bus.endpoint import Bus, PeerJoined, PeerLeft
from taskd.core.manager import message_check
from taskd.manager.node_liveness import HeartbeatMonitor, NodeProbes
from taskd.manager.operation_orders import Operations
from taskd.manager.profiling_control import ProfilingControl, StragglerMonitor
from taskd.manager.reports.node_evidence import NodeEvidence
from taskd.manager.settings import ManagerConfig
from taskd.model.ids import NodeRank, Position, Role
from taskd.model.manager import (
    Event,
    MessageReceived,
    NodeConnected,
    NodeDisconnected,
    NodeSilent,
    StopRequested,
)
from taskd.model.messages import AgentHello, EndJob, NodeHeartbeat, Progress
from taskd.runtime.clock import monotonic
from taskd.runtime.limits.rate_limit import Buckets

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""How many messages may wait in the inbox. Beyond that the bus keeps them, and senders wait."""


class Sense:
    def __init__(self, bus: Bus, config: ManagerConfig) -> None:
        self._bus, self._config = bus, config
        self.inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_WAITING)
        self._rejected = Buckets(LOG_RATE, LOGGED_HOSTS, monotonic)
        self.progress: dict[int, Progress] = {}
        """The newest progress of each rank; the heartbeat monitor derives events from it."""
        self.evidence = NodeEvidence()
        self._timers: dict[NodeRank, asyncio.TimerHandle] = {}
        self.profiling = ProfilingControl(
            bus, config.profiling_switch, StragglerMonitor(config.stragglers)
        )
        silence, job = config.silence, config.job
        # A cluster can replace the only node.
        is_replaceable = job.nodes == 1 and job.rescheduling
        alone_s = silence.stalled_s if is_replaceable else job.node_timeout_s
        silence = replace(silence, alone_s=alone_s)
        self._heartbeats = HeartbeatMonitor(bus, self.inbox.put_nowait, config.liveness, silence)
        self.on_heartbeat: Callable[[], None] = lambda: None
        self.operations: Operations | None = None
        """Set by the manager if there is a clusterd that can request operations."""
        self._probes = NodeProbes(self.inbox.put_nowait)

    def repair_begins(self) -> None:
        self._heartbeats.repair_begins()

    async def receive(self) -> None:
        while True:
            received = await self._bus.receive()
            if problem := message_check.problem_in(received.src, received.body):
                kind = type(received.body).__name__
                if self._rejected.take(str(received.src)):
                    log.warning("%s: %s rejected: %.200s", received.src, kind, problem)
                continue
            self.profiling.handle(received.src, received.body)
            if self.operations is not None:
                self.operations.handle(received.src, received.body)
            if isinstance(received.body, NodeHeartbeat):
                for item in received.body.progress:
                    if item.phase != "loading":
                        self.progress[item.rank] = with_stack(item, self.progress.get(item.rank))
                if (facts := received.body.facts) is not None:
                    self.evidence.take(received.body.node, facts, monotonic())
                self._heartbeats.handle(received.body)
                self.on_heartbeat()
            elif isinstance(received.body, EndJob):
                self.inbox.put_nowait(StopRequested(received.body.exit_code, received.body.because))
            else:
                if isinstance(received.body, AgentHello):
                    self._probes.agent_joined(received.body)
                await self._room.acquire()
                self.inbox.put_nowait(MessageReceived(received.src, received.body))

    def message_handled(self) -> None:
        """One received message has been handled."""
        self._room.release()

    async def watch_connections(self) -> None:
        async for change in self._bus.changes():
            match change:
                case PeerJoined(peer) if (node := _node(peer)) is not None:
                    if timer := self._timers.pop(node, None):
                        timer.cancel()
                    self._probes.node_connected(node)
                    self.inbox.put_nowait(NodeConnected(node))
                case PeerLeft(peer) if (node := _node(peer)) is not None:
                    self._heartbeats.node_left(node)
                    self.inbox.put_nowait(NodeDisconnected(node))
                    self._await_return(node)
                    self._probes.node_disconnected(node)
                case _:
                    pass

    def _await_return(self, node: NodeRank) -> None:
        silence_s = self._config.node_silence_s
        evidence = f"node {node} was disconnected for {silence_s:g} s"
        loop = asyncio.get_running_loop()
        if timer := self._timers.pop(node, None):
            timer.cancel()
        gone = NodeSilent(node, evidence)
        self._timers[node] = loop.call_later(silence_s, self.inbox.put_nowait, gone)


def with_stack(new: Progress, old: Progress | None) -> Progress:
    """A rank that looks stuck sends its stacks once: keep them until it moves again."""
    if old is None or new.stack or new.incarnation != old.incarnation or new.idle_s < old.idle_s:
        return new
    return replace(new, stack=old.stack)


def _node(peer: Position) -> NodeRank | None:
    """A node is connected by its proxy or, without a proxy, by its agent."""
    if peer.role not in (Role.PROXY, Role.AGENT) or not peer.server_rank.isdecimal():
        return None
    return NodeRank(int(peer.server_rank))
