"""The documented agent for PyTorch: uses functions that the caller has registered.

The seam to torchrun (`torchrun.py`) does not need it. It is for programs that drive torch's agent
themselves: `init_taskd_agent({"Framework": "PyTorch"}, agent)`, `register_func`, `start`.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from taskd.agent.run.plan import UNLIMITED_RESTARTS
from taskd.agent.seams import torch_names
from taskd.agent.seams.framework_actions import Callbacks, RankStatus, require
from taskd.agent.seams.hosted_agent import AgentConfig, join_and_train
from taskd.config import environ
from taskd.model.ids import Rank

KILL, START_ALL, RESTART, LOOK = "KILL_WORKER", "START_ALL_WORKER", "RESTART", "MONITOR"


@dataclass
class Torch:
    """Torch's worker group and the registered functions, as a `Framework`."""

    agent: Any
    ranks: tuple[Rank, ...]
    callbacks: Callbacks
    result: Any = None
    """The last result of MONITOR."""

    @property
    def group(self) -> Any:
        return torch_names.worker_group(self.agent)

    def look(self) -> Mapping[Rank, RankStatus] | None:
        self.result = self.callbacks[LOOK](self.group)
        state, failures = self.result.state.value, self.result.failures
        if state not in ("HEALTHY", "FAILED", "UNHEALTHY", "SUCCEEDED"):
            return None
        seen, codes = {}, self._codes()
        for worker in self.group.workers:
            rank, pid = Rank(worker.global_rank), worker.id if isinstance(worker.id, int) else None
            failed = failures.get(worker.global_rank)
            done = 0 if state == "SUCCEEDED" else codes.get(worker.local_rank)
            seen[rank] = RankStatus(pid, failed.exitcode if failed else done)
        return seen

    def _codes(self) -> Mapping[int, int | None]:
        """Exit codes by local rank: torch says HEALTHY until all have exited or one failed."""
        return torch_names.exit_codes(self.agent)

    def settle_s(self, ranks: tuple[Rank, ...]) -> float:
        return 0.0

    def start(self, ranks: tuple[Rank, ...]) -> None:
        if ranks == self.ranks:
            self.callbacks[START_ALL](self.group)
        else:
            self.callbacks[RESTART](self._part(ranks))

    def kill(self, ranks: tuple[Rank, ...], pids: tuple[int, ...]) -> None:
        self.callbacks[KILL](self.group if ranks == self.ranks else self._part(ranks))

    def _part(self, ranks: tuple[Rank, ...]) -> Any:
        part = copy.copy(self.group)
        part.workers = {w for w in self.group.workers if w.global_rank in ranks}
        return part


@dataclass
class PtAgent:
    agent: Any
    node: int
    upstream: str = ""
    callbacks: Callbacks = field(default_factory=dict)

    def register_callbacks(self, operator: str, func: Callable[..., Any]) -> None:
        self.callbacks[operator] = func

    def start(self) -> Any:
        return self.invoke_run("DEFAULT_ROLE")

    def invoke_run(self, role: str) -> Any:
        """Torch's RunResult on success; otherwise exits the interpreter with the exit code."""
        require(self.callbacks, KILL, START_ALL, RESTART, LOOK)
        spec = torch_names.worker_group(self.agent).spec
        size = spec.local_world_size
        ranks = tuple(Rank(self.node * size + local) for local in range(size))
        torch = Torch(self.agent, ranks, self.callbacks)
        manager = environ.get("MASTER_ADDR") or "127.0.0.1"
        config = AgentConfig(node=self.node, upstream=self.upstream, manager=manager)
        restarts = spec.max_restarts or UNLIMITED_RESTARTS
        done = asyncio.run(join_and_train(config, torch, ranks, restarts))
        if done.exit_code != 0:
            sys.exit(done.exit_code)
        return torch.result
