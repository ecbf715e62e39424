"""The seam to MindSpore's `msrun`: its process manager lends us its functions, and we decide.

`msrun` imports `taskd.api.taskd_agent_api` by itself when MS_ENABLE_TFT asks for it, registers its
functions and calls `start`, which ends the interpreter with the job's exit code. Its scheduler is
left to us too: `scheduler.py`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from taskd.agent.seams import msrun_scheduler as scheduler
from taskd.agent.seams.callbacks import Sight
from taskd.agent.seams.hosted_agent import AgentConfig, join_and_train
from taskd.config import environ
from taskd.core.agent.machine import WorkersConfig
from taskd.errors import SettingsError
from taskd.model.ids import Rank

log = logging.getLogger(__name__)

KILL, START_ALL, START_SOME, LOOK = (
    "KILL_WORKER",
    "START_ALL_WORKER",
    "START_WORKER_LIST",
    "MONITOR",
)
EVERYBODY = [-1]
RESTARTS = 32767
"""As many as may come: MindSpore has no budget of its own."""

ENDING = (signal.SIGTERM, signal.SIGINT)
"""Signals that `msrun` itself leaves to their default, or to a loop that it does not run now."""

Callbacks = dict[str, Callable[..., Any]]


def local_ranks() -> tuple[Rank, ...]:
    """This node's global ranks, from MindSpore's variables; empty if they are not there."""
    try:
        node, size = int(environ["MS_NODE_RANK"]), int(environ["MS_LOCAL_WORKER"])
    except (KeyError, ValueError):
        return ()
    return tuple(Rank(node * size + local) for local in range(size))


def shown_ranks(look: Callable[..., Any]) -> tuple[Rank, ...]:
    """The same by MONITOR's answer: on a single machine nobody sets the variables."""
    seen = look(list(EVERYBODY))
    if not is_sound(seen):
        return ()
    return tuple(sorted(Rank(item["global_rank"]) for item in seen.values()))


def is_sound(seen: object) -> bool:
    """Whether MONITOR's answer is what its contract says; a rank without a pid has not started."""
    if not isinstance(seen, dict):
        return False
    for item in seen.values():
        if not isinstance(item, dict) or not {"pid", "status", "global_rank"} <= item.keys():
            return False
        if type(item["global_rank"]) is not int:
            return False
        if not isinstance(item["pid"], int | None) or not isinstance(item["status"], int | None):
            return False
    return True


@dataclass
class MindSpore:
    """MindSpore's functions as `called.Framework`."""

    ranks: tuple[Rank, ...]
    callbacks: Callbacks
    config: AgentConfig
    msrun: scheduler.ProcessManager | None = None
    started: bool = False

    def settle_s(self, ranks: tuple[Rank, ...]) -> float:
        if ranks != self.ranks:
            return self.config.settle_some_s
        return self.config.settle_all_s if self.msrun is None else 0.0

    def look(self) -> Mapping[Rank, Sight] | None:
        seen = self.callbacks[LOOK](list(EVERYBODY))
        if not is_sound(seen):
            log.warning("MONITOR gave no sound answer: %.200r", seen)
            return None
        return {
            Rank(item["global_rank"]): Sight(item["pid"], item["status"]) for item in seen.values()
        }

    def start(self, ranks: tuple[Rank, ...]) -> None:
        if ranks == self.ranks:
            if self.started and self.msrun is not None:
                scheduler.renew(self.msrun)
            self.started = True
            self.callbacks[START_ALL]()
        else:
            self.callbacks[START_SOME]([rank % len(self.ranks) for rank in ranks])

    def kill(self, ranks: tuple[Rank, ...], pids: tuple[int, ...]) -> None:
        everybody = len(pids) == len(self.ranks)
        result = self.callbacks[KILL](list(EVERYBODY) if everybody else list(pids))
        if result != 0:
            log.warning("KILL_WORKER of %s gave %r", pids, result)


def leave(signum: int, frame: object) -> NoReturn:
    sys.exit(128 + signum)


@dataclass
class MsAgent:
    config: AgentConfig
    callbacks: Callbacks = field(default_factory=dict)

    def register_callbacks(self, operator: str, func: Callable[..., Any]) -> None:
        self.callbacks[operator] = func

    def start(self) -> NoReturn:
        """Runs the node's part of the job, then ends the interpreter with its exit code."""
        missing = [n for n in (KILL, START_ALL, START_SOME, LOOK) if n not in self.callbacks]
        if missing:
            raise SettingsError([f"{name} is not registered" for name in missing])
        ranks = local_ranks() or shown_ranks(self.callbacks[LOOK])
        if not ranks:
            raise SettingsError(["MS_NODE_RANK and MS_LOCAL_WORKER must be numbers"])
        msrun = scheduler.process_manager(self.callbacks[KILL])
        framework = MindSpore(ranks, self.callbacks, self.config, msrun)
        workers = WorkersConfig(farewell_s=self.config.farewell_s, in_ascends_words=True)
        signal.signal(signal.SIGTERM, leave)  # until the manager is there to be told of it
        try:
            over = asyncio.run(
                join_and_train(self.config, framework, ranks, RESTARTS, workers, ENDING)
            )
            log.info("the node's part of the job is over: %s", over.because)
        finally:  # its workers have sessions of their own: they would outlive us
            self.callbacks[KILL](list(EVERYBODY))
            if msrun is not None:
                scheduler.end(msrun)
        sys.exit(over.exit_code)
