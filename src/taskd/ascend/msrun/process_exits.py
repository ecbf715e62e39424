"""How the processes of a job are ended, by pid, whether they are our children or not."""

from __future__ import annotations

import os
import select
import shutil
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from taskd.ascend.toolkit import constants
from taskd.ascend.toolkit.run_log import run_log
from taskd.runtime.clock import monotonic

TORCH_EXTENSIONS_CACHE_DIR = os.path.join(os.path.expanduser("~"), ".cache", "torch_extensions")


def clean_before_restart() -> None:
    """Remove torch's cache of compiled extensions: a killed compiler leaves its lock in there."""
    shutil.rmtree(TORCH_EXTENSIONS_CACHE_DIR, ignore_errors=True)


def grace_exit_pids(pids: Mapping[Any, int]) -> None:
    """Ask these processes to end."""
    if not isinstance(pids, Mapping):
        raise ValueError(f"the processes must be a dict, got {type(pids).__name__}")  # noqa: TRY004
    _signal(pids.values(), signal.SIGTERM)


def force_exit_pids(pids: Mapping[Any, int] | Iterable[int]) -> None:
    """End these processes."""
    _signal(_numbers(pids), signal.SIGKILL)


def all_pid_stopped(pids: Mapping[Any, int] | Iterable[int]) -> bool:
    return not any(_is_running(pid) for pid in _numbers(pids))


def stop_pids(pids: Mapping[Any, int] | Iterable[int]) -> None:
    """Wait for these processes to end, and end those that do not within 10 minutes."""
    wait_for_exits(_numbers(pids), constants.GRACE_TIME_OUT)
    force_exit_pids(pids)


def wait_for_exits(pids: Iterable[int], timeout_s: float) -> bool:
    """Whether all of them, children or not, have ended in time. Nobody is asked twice: the
    kernel tells each end at once."""
    deadline = monotonic() + timeout_s
    waiting = select.poll()
    handles = set()
    try:
        for pid in filter(_is_running, pids):
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            handles.add(handle)
            waiting.register(handle, select.POLLIN)
        left = set(handles)
        while left:
            remaining_s = deadline - monotonic()
            if remaining_s <= 0:
                return False
            for handle, _ in waiting.poll(remaining_s * 1000):
                waiting.unregister(handle)
                left.discard(handle)
        return True
    finally:
        for handle in handles:
            os.close(handle)


def _is_running(pid: int) -> bool:
    """A zombie has stopped, even if its parent has not noticed yet."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return line.rpartition(")")[2].split()[0] not in "ZX"


def _numbers(pids: Mapping[Any, int] | Iterable[int]) -> list[int]:
    return list(pids.values() if isinstance(pids, Mapping) else pids)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        if not Path(f"/proc/{pid}").exists():  # Also 0 and -1, which mean many processes.
            continue
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            run_log.warning("process %d has ended before it was sent %s", pid, number.name)
