"""The dashboard of `taskd run --dashboard`: a process of its own that training does not depend on.

It has a lower priority than the ranks. If it cannot start or dies, it says why, and the job
continues without it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from taskd.agent.process_lifetime import command_with_parent

NICE = 10
EXIT_S = 3.0


class DashboardProcess:
    def __init__(self, job: str, listen: str, clusterd: str, env: Mapping[str, str]) -> None:
        server = [f"--server={clusterd}"] if clusterd else []
        self._arguments = ("dashboard", f"--listen={listen}", *server, "--", job)
        self._env = dict(env)
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Call it in the main thread, once the job can be found."""
        self._popen = subprocess.Popen(
            command_with_parent("taskd", *self._arguments),
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._popen.pid, NICE)

    def stop(self) -> None:
        """Let open pages show the end of the job."""
        if self._popen is None:
            return
        self._popen.terminate()
        try:
            self._popen.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
