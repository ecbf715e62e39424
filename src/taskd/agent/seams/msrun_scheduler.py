"""MindSpore's scheduler, a child of `msrun` that our agent must not forget.

`msrun` starts it on one node before it hands over to the agent (`msrun.py`), and nobody minds it
from then on. It remembers the addresses of ranks that have died, so that a restarted job would
try to reach those; and it stays behind when the job is over. So it is started anew with all ranks,
and ended with the job. It is found through the object whose methods `msrun` has lent us.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any, Protocol, cast


class ProcessManager(Protocol):
    """What we use of `msrun` besides the functions that it lends."""

    msn_process: subprocess.Popen[bytes] | None
    """None: another node runs the scheduler."""

    def start_scheduler(self) -> None: ...


def process_manager(lent: Callable[..., Any]) -> ProcessManager | None:
    """The one that the function belongs to. None: it is nothing that we know."""
    owner = getattr(lent, "__self__", None)
    known = hasattr(owner, "msn_process") and hasattr(owner, "start_scheduler")
    return cast(ProcessManager, owner) if known else None


def renew(owner: ProcessManager) -> None:
    """A scheduler that has never heard of the ranks' former lives."""
    if owner.msn_process is not None:
        _kill(owner.msn_process)
        owner.start_scheduler()


def end(owner: ProcessManager) -> None:
    """In the mode that `msrun` chooses with an agent, ranks do not sign off when they finish, and
    it would wait for them for ever."""
    if owner.msn_process is not None:
        _kill(owner.msn_process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
