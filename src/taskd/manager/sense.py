"""The world to events: what the bus brings, who is linked, which node stays away too long.

Everything ends in one inbox, in the order in which it came.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from taskd.bus.endpoint import Bus, PeerJoined, PeerLeft
from taskd.core.manager import message_check as credible
from taskd.manager.heartbeats import HeartbeatMonitor
from taskd.manager.node_probes import NodeProbes
from taskd.manager.operation_orders import Operations
from taskd.manager.pace_reports import StragglerMonitor
from taskd.manager.profiling_orders import ProfilingControl
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

log = logging.getLogger(__name__)

WAITING = 10_000
"""So many messages may wait to be dealt with. Beyond, the bus keeps them, and its senders wait."""


class Sense:
    def __init__(self, bus: Bus, config: ManagerConfig) -> None:
        self._bus, self._config = bus, config
        self.inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._room = asyncio.Semaphore(WAITING)
        self.progress: dict[int, Progress] = {}
        """The newest of each rank. `pulse` makes events of what they mean together."""
        self._absent: dict[NodeRank, asyncio.TimerHandle] = {}
        self.recording = ProfilingControl(
            bus, config.profiling_switch, StragglerMonitor(config.stragglers)
        )
        self._pulse = HeartbeatMonitor(bus, self.inbox.put_nowait, config.liveness, config.silence)
        self.on_beat: Callable[[], None] = lambda: None
        self.operations: Operations | None = None
        """Set by the manager where there is a clusterd that could ask for any."""
        self._knocking = NodeProbes(self.inbox.put_nowait)

    async def hear(self) -> None:
        while True:
            received = await self._bus.receive()
            if doubt := credible.problem_in(received.src, received.body):
                kind = type(received.body).__name__
                log.warning("%s of %s is not believed: %s", kind, received.src, doubt)
                continue
            self.recording.heard(received.src, received.body)
            if self.operations is not None:
                self.operations.heard(received.src, received.body)
            if isinstance(received.body, NodeHeartbeat):
                self.progress.update({item.rank: item for item in received.body.progress})
                self._pulse.heard(received.body)
                self.on_beat()
            elif isinstance(received.body, EndJob):
                self.inbox.put_nowait(StopRequested(received.body.exit_code, received.body.because))
            else:
                if isinstance(received.body, AgentHello):
                    self._knocking.heard(received.body)
                await self._room.acquire()
                self.inbox.put_nowait(MessageReceived(received.src, received.body))

    def taken(self) -> None:
        """One message that was heard has been dealt with."""
        self._room.release()

    async def watch(self) -> None:
        async for change in self._bus.changes():
            match change:
                case PeerJoined(peer) if (node := _node(peer)) is not None:
                    if timer := self._absent.pop(node, None):
                        timer.cancel()
                    self._knocking.linked(node)
                    self.inbox.put_nowait(NodeConnected(node))
                case PeerLeft(peer) if (node := _node(peer)) is not None:
                    self._pulse.gone(node)
                    self.inbox.put_nowait(NodeDisconnected(node))
                    self._await_return(node)
                    self._knocking.unlinked(node)
                case _:
                    pass

    def _await_return(self, node: NodeRank) -> None:
        silence_s = self._config.node_silence_s
        evidence = f"no link to node {node} for {silence_s:g} s"
        loop = asyncio.get_running_loop()
        if timer := self._absent.pop(node, None):
            timer.cancel()
        gone = NodeSilent(node, evidence)
        self._absent[node] = loop.call_later(silence_s, self.inbox.put_nowait, gone)


def _node(peer: Position) -> NodeRank | None:
    """A node is linked by its proxy, or, where there is none, by its agent."""
    if peer.role not in (Role.PROXY, Role.AGENT) or not peer.server_rank.isdecimal():
        return None
    return NodeRank(int(peer.server_rank))
