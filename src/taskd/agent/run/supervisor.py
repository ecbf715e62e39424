"""Keeps a helper process of the launcher alive: the manager, restarted whenever it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from taskd.errors import Permanent
from taskd.runtime.clock import Clock, monotonic

log = logging.getLogger(__name__)


class CannotStart(Permanent):
    """A process that we need ends as soon as it is started."""


@dataclass
class Supervisor:
    name: str
    module: str
    arguments: tuple[str, ...]
    env: dict[str, str]
    brief_s: float = 2.0
    """A life shorter than this counts as a failed start."""
    most_failures: int = 5
    is_over: Callable[[], bool] = lambda: False
    """Whether its work is done, so that its end is no accident."""
    clock: Clock = monotonic

    restarts: int = 0
    _popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Needs no event loop, so that it can come early. Must be called in the main thread."""
        command = [
            sys.executable,
            "-m",
            "taskd.agent.die_with_parent",
            str(os.getpid()),
            self.module,
        ]
        self._popen = subprocess.Popen(
            [*command, *self.arguments],
            env=self.env,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    async def keep(self) -> None:
        """Restart it whenever it dies. Raises CannotStart when that does not help."""
        failures = 0
        while True:
            assert self._popen is not None
            born = self.clock()
            code = await _exit_of(self._popen)
            if code >= 0 and self.is_over():
                return
            failures = failures + 1 if self.clock() - born < self.brief_s else 0
            if failures >= self.most_failures:
                raise CannotStart(
                    f"the {self.name} has ended {failures} times at once, code {code}"
                )
            log.warning("the %s has ended (%s); starting it again", self.name, code)
            self.restarts += 1
            self.start()

    async def stop(self, leave_s: float, grace_s: float = 5.0) -> None:
        """Let it end by itself, then ask it to, then kill it."""
        if self._popen is None:
            return
        for patience_s, signum in ((leave_s, signal.SIGTERM), (grace_s, signal.SIGKILL)):
            try:
                async with asyncio.timeout(patience_s):
                    await _exit_of(self._popen)
                break
            except TimeoutError:
                self._popen.send_signal(signum)
        await _exit_of(self._popen)
        self._popen = None


async def _exit_of(popen: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process that we started, without a thread and without polling."""
    if popen.poll() is None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        pidfd = os.pidfd_open(popen.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
    return popen.wait()
