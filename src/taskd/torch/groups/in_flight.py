"""Collectives that have started and not ended: those of gloo, and those that a device carries out.

After an abort the memory of a step may be used again only when gloo has let go of it. A thread of
gloo either ends within moments or, because gloo loses a wake-up, sleeps until its timeout; the
kernel knows which.

NCCL and similar libraries only queue the work on the host. So the gate before the update waits
here until the device has done it, and a thread asks the library now and then whether it has lost a
peer: a device that waits for one reports nothing by itself. `all_groups.py` owns one of each.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from taskd.torch.groups.works import DeviceWork, GlooWork

POLL_GLOO_S = 0.005
"""How often gloo's threads are looked at while they do not report their end."""
POLL_DEVICE_S = 0.1
"""How often a device library is asked for errors; its own watchdog is not faster."""
TASKS = "/proc/self/task"
GLOO_THREAD = "pt_gloo_runloop"


class GlooCollectives:
    """The collectives that gloo holds the memory of."""

    def __init__(self) -> None:
        self._works: set[GlooWork] = set()
        """Changed by single calls of its methods, which are atomic: no lock in each collective."""
        self._is_awaited = False
        self._all_ended = threading.Condition()

    def add(self, work: GlooWork) -> None:
        self._works.add(work)

    def remove(self, work: GlooWork) -> None:
        self._works.discard(work)
        if self._is_awaited and not self._works:
            with self._all_ended:
                self._all_ended.notify_all()

    def current(self) -> list[GlooWork]:
        return list(self._works.copy())

    def wait(self) -> bool:
        """After an abort: wait until gloo uses no memory any more. False: some never end."""
        before: dict[int, str] = {}
        with self._all_ended:
            self._is_awaited = True
            try:
                while self._works:
                    if not self._all_ended.wait(POLL_GLOO_S):
                        now = _gloo_threads()
                        if _are_asleep(before, now):
                            self._works.clear()
                            return False
                        before = now
            finally:
                self._is_awaited = False
        return True


class DeviceCollectives:
    """The collectives of this step that a device may not have finished."""

    def __init__(self, find_error: Callable[[], None]) -> None:
        """`find_error` asks the libraries whether they have lost a peer, and breaks the groups."""
        self._find_error = find_error
        self._works: list[DeviceWork] = []
        self._watch: threading.Thread | None = None
        self._never = threading.Event()

    def add(self, work: DeviceWork) -> None:
        self._works.append(work)
        if self._watch is None:
            self._watch = threading.Thread(target=self._poll, name="taskd-devices", daemon=True)
            self._watch.start()

    def wait(self) -> bool:
        """Wait until the device has done them all, or an abort frees it. False: there were none."""
        if not self.queue_waits():
            return False
        if torch.accelerator.is_available():
            torch.accelerator.current_stream().synchronize()
        self._find_error()
        return True

    def queue_waits(self) -> bool:
        """What is queued from here on waits on the device for them. False: there were none."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        return bool(works)

    def clear(self) -> None:
        """The step has ended."""
        self._works.clear()

    def _poll(self) -> None:
        while not self._never.wait(POLL_DEVICE_S):
            self._find_error()


def _gloo_threads() -> dict[int, str]:
    """Every thread of gloo by its id, with text that changes whenever it runs."""
    found = {}
    for name in os.listdir(TASKS):
        try:
            with open(f"{TASKS}/{name}/comm") as file:
                if file.read().strip() != GLOO_THREAD:
                    continue
            with open(f"{TASKS}/{name}/status") as file:
                lines = file.read().splitlines()
        except OSError:
            continue  # it has ended
        activity = [line for line in lines if "State" in line or "ctxt_switches" in line]
        found[int(name)] = " ".join(activity)
    return found


def _are_asleep(before: dict[int, str], now: dict[int, str]) -> bool:
    """No thread has run in between, and none is about to."""
    return before == now and all("S (sleeping)" in activity for activity in now.values())
