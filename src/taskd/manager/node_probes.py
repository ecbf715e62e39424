"""Knocks at the doors of nodes whose link is broken: a killed agent is known at once, not by time.

A link breaks when its agent dies, but also when a connection is cut or a proxy starts anew; those
come back. `bus/liveness_port.py` can tell the two apart on most networks. Where it cannot,
`sense.py` waits for the node to return, as long as it would without us.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from taskd.bus import liveness_port as door
from taskd.model.ids import NodeRank
from taskd.model.manager import Event, NodeGone
from taskd.model.messages import AgentHello

log = logging.getLogger(__name__)

ANSWER_S = 2.0


class NodeProbes:
    def __init__(self, happened: Callable[[Event], None]) -> None:
        self._happened = happened
        self._doors: dict[NodeRank, str] = {}
        """Those that have opened once."""
        self._away: set[NodeRank] = set()
        self._tasks: dict[NodeRank, asyncio.Task[None]] = {}

    def heard(self, hello: AgentHello) -> None:
        if hello.door and self._doors.get(hello.node) != hello.door:
            self._doors.pop(hello.node, None)
            self._start(hello.node, self._try(hello.node, hello.door))

    def linked(self, node: NodeRank) -> None:
        self._away.discard(node)
        if (task := self._tasks.pop(node, None)) is not None:
            task.cancel()

    def unlinked(self, node: NodeRank) -> None:
        self._away.add(node)
        if node in self._doors:
            self._start(node, self._stay(node, self._doors[node]))

    async def tried(self, node: NodeRank) -> None:
        """Wait for what is under way with this node."""
        if (task := self._tasks.get(node)) is not None:
            await asyncio.wait({task})

    def _start(self, node: NodeRank, work: Coroutine[Any, Any, None]) -> None:
        if (before := self._tasks.pop(node, None)) is not None:
            before.cancel()
        self._tasks[node] = asyncio.create_task(work)

    async def _try(self, node: NodeRank, address: str) -> None:
        if await door.is_reachable(address, ANSWER_S):
            self._doors[node] = address
        else:
            log.info("the door of node %s at %s cannot be reached from here", node, address)

    async def _stay(self, node: NodeRank, address: str) -> None:
        if await door.wait_for_exit(address, ANSWER_S) and node in self._away:
            self._happened(NodeGone(node, f"its agent has ended: nobody listens at {address}"))
