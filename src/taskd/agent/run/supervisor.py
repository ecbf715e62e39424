"""Keeps a process of the launcher alive: the manager, which is restarted whenever it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from taskd.agent.process_lifetime import command_with_parent
from taskd.errors import Permanent
from taskd.runtime.clock import Clock, monotonic

log = logging.getLogger(__name__)


class CannotStart(Permanent):
    """A process that we need exits again and again right after its start."""


@dataclass
class Supervisor:
    name: str
    module: str
    arguments: tuple[str, ...]
    env: dict[str, str]
    min_lifetime_s: float = 2.0
    """A process that exits sooner counts as a failed start."""
    max_failures: int = 5
    is_over: Callable[[], bool] = lambda: False
    """Whether its work is done, so that its exit is not a failure."""
    clock: Clock = monotonic
    newest: Callable[[], tuple[str, ...]] = tuple
    """Further arguments, asked for at each start: they override the others."""

    restarts: int = 0
    _popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. Needs no event loop. Call it in the main thread."""
        self._popen = subprocess.Popen(
            command_with_parent(self.module, *self.arguments, *self.newest()),
            env=self.env,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    async def keep_running(self) -> None:
        """Restart it whenever it dies. Raises CannotStart when that does not help."""
        failures = 0
        while True:
            assert self._popen is not None
            started_at = self.clock()
            code = await exit_of(self._popen)
            if code >= 0 and self.is_over():
                return
            failures = failures + 1 if self.clock() - started_at < self.min_lifetime_s else 0
            if failures >= self.max_failures:
                raise CannotStart(
                    f"the {self.name} exited {failures} times within {self.min_lifetime_s:g} s of "
                    f"its start, at last with code {code}: see its output above"
                )
            log.warning("%s exited: code=%s; starting it again", self.name, code)
            self.restarts += 1
            self.start()

    async def stop(self, exit_s: float, grace_s: float = 5.0) -> None:
        """Wait until it exits by itself, then send SIGTERM, then SIGKILL."""
        if self._popen is None:
            return
        for timeout_s, signum in ((exit_s, signal.SIGTERM), (grace_s, signal.SIGKILL)):
            try:
                async with asyncio.timeout(timeout_s):
                    await exit_of(self._popen)
                break
            except TimeoutError:
                self._popen.send_signal(signum)
        await exit_of(self._popen)
        self._popen = None

    def kill(self) -> None:
        """If it still runs: this process ends, and removes the folders that it uses."""
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()


async def exit_of(popen: subprocess.Popen[bytes]) -> int:
    """Wait until a process that we started exits, without a thread and without polling."""
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
