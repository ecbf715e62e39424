"""Identifiers: ranks, nodes, jobs, incidents, and positions on the bus."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

Rank = NewType("Rank", int)
"""A training process within the job: torch's global rank."""

NodeRank = NewType("NodeRank", int)
"""A machine or pod within the job."""

JobId = NewType("JobId", str)

Incident = NewType("Incident", int)
"""Counts the incidents of one job. It only grows; messages of an older incident are stale."""

Incarnation = NewType("Incarnation", int)
"""Counts the processes of one rank: 0 for the first, 1 for its replacement, and so on."""

Step = NewType("Step", int)
"""Counts committed training steps: at step 7 the optimizer has finished seven times."""

ALL = "All"
"""The wildcard in a destination's ranks."""

NO_PROCESS = "-1"
"""The process rank of a role that has none."""


class Role(StrEnum):
    MANAGER = "Mgr"
    PROXY = "Proxy"
    AGENT = "Agent"
    WORKER = "Worker"

    @property
    def level(self) -> int:
        """Messages to a higher level go upstream, to a lower one downstream."""
        return {Role.MANAGER: 3, Role.PROXY: 2}.get(self, 1)


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """An address on the bus. The ranks are text, as on the wire: numbers, `All`, comma lists."""

    role: str
    server_rank: str
    process_rank: str = NO_PROCESS

    def __str__(self) -> str:
        if self.role in (Role.WORKER, Role.PROXY):
            return f"{self.role}:{self.server_rank}/{self.process_rank}"
        return f"{self.role}:{self.server_rank}"


def manager() -> Position:
    return Position(Role.MANAGER, "0")


def agent(node: int) -> Position:
    return Position(Role.AGENT, str(node))


def worker(node: int, rank: int) -> Position:
    return Position(Role.WORKER, str(node), str(rank))


EVERY_AGENT = Position(Role.AGENT, ALL)
EVERY_WORKER = Position(Role.WORKER, ALL, ALL)
