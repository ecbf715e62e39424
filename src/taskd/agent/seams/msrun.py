"""The seam to MindSpore's `msrun`: we decide, and call the functions of its process manager.

`msrun` imports `taskd.api.taskd_agent_api` when MS_ENABLE_TFT asks for it, registers its functions
and calls `start`, which exits the interpreter with the job's exit code.

`msrun` also starts MindSpore's scheduler on one node before it calls us, and does not look after it
from then on. The scheduler remembers the addresses of ranks that have died, so that a restarted job
would try to reach those; and it keeps running when the job is over. Therefore we restart it with
all ranks, and kill it at the end of the job. We find it through the object whose methods
`msrun` has registered.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, cast

from taskd.agent.seams.framework_actions import Callbacks, RankStatus, require
from taskd.agent.seams.hosted_agent import AgentConfig, join_and_train
from taskd.config import environ
from taskd.errors import SettingsError
from taskd.model.ids import Rank

log = logging.getLogger(__name__)

KILL, START_ALL, START_SOME, LOOK = (
    "KILL_WORKER",
    "START_ALL_WORKER",
    "START_WORKER_LIST",
    "MONITOR",
)
ALL_RANKS = [-1]
RESTARTS = 32767
"""No limit: MindSpore has no restart budget of its own."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that `msrun` does not handle, or handles in a loop that is not running now."""


def local_ranks() -> tuple[Rank, ...]:
    """This node's global ranks, from MindSpore's variables; empty if these are not set."""
    try:
        node, size = int(environ["MS_NODE_RANK"]), int(environ["MS_LOCAL_WORKER"])
    except (KeyError, ValueError):
        return ()
    return tuple(Rank(node * size + local) for local in range(size))


def monitored_ranks(look: Callable[..., Any]) -> tuple[Rank, ...]:
    """The same from MONITOR's answer: on a single machine `msrun` does not set the variables."""
    seen = look(list(ALL_RANKS))
    if not is_valid_answer(seen):
        return ()
    return tuple(sorted(Rank(item["global_rank"]) for item in seen.values()))


def is_valid_answer(seen: object) -> bool:
    """Whether MONITOR's answer is as documented; a rank without a pid has not started."""
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
    """MindSpore's functions as a `Framework`."""

    ranks: tuple[Rank, ...]
    callbacks: Callbacks
    config: AgentConfig
    msrun: ProcessManager | None = None
    started: bool = False

    def settle_s(self, ranks: tuple[Rank, ...]) -> float:
        if ranks != self.ranks:
            return self.config.settle_some_s
        return self.config.settle_all_s if self.msrun is None else 0.0

    def look(self) -> Mapping[Rank, RankStatus] | None:
        seen = self.callbacks[LOOK](list(ALL_RANKS))
        if not is_valid_answer(seen):
            log.warning("MONITOR returned an invalid answer: %.200r", seen)
            return None
        return {
            Rank(item["global_rank"]): RankStatus(item["pid"], item["status"])
            for item in seen.values()
        }

    def start(self, ranks: tuple[Rank, ...]) -> None:
        if ranks == self.ranks:
            if self.started and self.msrun is not None:
                restart_scheduler(self.msrun)
            self.started = True
            self.callbacks[START_ALL]()
        else:
            self.callbacks[START_SOME]([rank % len(self.ranks) for rank in ranks])

    def kill(self, ranks: tuple[Rank, ...], pids: tuple[int, ...]) -> None:
        all_ranks = len(pids) == len(self.ranks)
        result = self.callbacks[KILL](list(ALL_RANKS) if all_ranks else list(pids))
        if result != 0:
            log.warning("KILL_WORKER failed: pids=%s result=%r", pids, result)


def exit_on_signal(signum: int, frame: object) -> NoReturn:
    sys.exit(128 + signum)


@dataclass
class MsAgent:
    config: AgentConfig
    callbacks: Callbacks = field(default_factory=dict)

    def register_callbacks(self, operator: str, func: Callable[..., Any]) -> None:
        self.callbacks[operator] = func

    def start(self) -> NoReturn:
        """Run the node's part of the job, then exit the interpreter with its exit code."""
        require(self.callbacks, KILL, START_ALL, START_SOME, LOOK)
        ranks = local_ranks() or monitored_ranks(self.callbacks[LOOK])
        if not ranks:
            raise SettingsError(
                [
                    "the ranks of this node are unknown: set MS_NODE_RANK and MS_LOCAL_WORKER to "
                    "numbers"
                ]
            )
        msrun = process_manager_of(self.callbacks[KILL])
        framework = MindSpore(ranks, self.callbacks, self.config, msrun)
        signal.signal(signal.SIGTERM, exit_on_signal)  # until the manager can be told of it
        try:
            done = asyncio.run(
                join_and_train(self.config, framework, ranks, RESTARTS, STOP_SIGNALS)
            )
            log.info("node's part of the job is over: %s", done.because)
        finally:  # the workers have their own sessions and would outlive us
            self.callbacks[KILL](list(ALL_RANKS))
            if msrun is not None:
                stop_scheduler(msrun)
        sys.exit(done.exit_code)


# MindSpore's scheduler, a child of `msrun`


class ProcessManager(Protocol):
    """What we use of `msrun` besides its registered functions."""

    msn_process: subprocess.Popen[bytes] | None
    """The scheduler. None: another node runs it."""

    def start_scheduler(self) -> None: ...


def process_manager_of(function: Callable[..., Any]) -> ProcessManager | None:
    """The process manager whose method this is. None: the method belongs to an unknown object."""
    owner = getattr(function, "__self__", None)
    known = hasattr(owner, "msn_process") and hasattr(owner, "start_scheduler")
    return cast(ProcessManager, owner) if known else None


def restart_scheduler(owner: ProcessManager) -> None:
    """A new scheduler does not know the earlier incarnations of the ranks."""
    if owner.msn_process is not None:
        _kill(owner.msn_process)
        owner.start_scheduler()


def stop_scheduler(owner: ProcessManager) -> None:
    """With an agent, `msrun` runs ranks that do not sign off when they finish, so the scheduler
    would wait for them forever."""
    if owner.msn_process is not None:
        _kill(owner.msn_process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
