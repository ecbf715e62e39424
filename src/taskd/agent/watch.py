"""What the node's ranks are doing, read from shared memory and from the kernel.

A rank publishes its progress in a page of shared memory (`runtime/beacon.py`), so looking at it
costs neither side a message. Only a rank without progress is looked at more closely
(`process_activity.py`): the kernel says what its process does, and the process itself writes the
stacks of its threads. Profiling works in the same way (`runtime/files/profiling_files.py`): the
agent writes what to record, the rank writes its pace, and the rank needs no connection and no
thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from taskd.agent.process_activity import ProcessActivity, is_stopped
from taskd.agent.worker_stacks import StackFile
from taskd.model.ids import Incarnation, Rank, Step
from taskd.model.messages import Progress, SetProfiling
from taskd.model.profiling import NOTHING, Pace, parts_ordered
from taskd.runtime import beacon
from taskd.runtime.beacon import BeaconReading
from taskd.runtime.clock import Clock, monotonic
from taskd.runtime.files.profiling_files import SharedSwitch, forget, read_pace

PACED = "training"
"""The phase in which a rank without progress may be hung after a moment."""
PARKED, REPAIRING = "parked", "repairing"
LOADING = "loading"
"""The process has not created its beacon yet."""
SLOW_S = 0.2
"""A rank without progress for this long makes the node's heartbeats more frequent."""
IDLE_S = 0.5
"""A rank without progress for this long is looked at through the kernel."""
STACKS_S, ALWAYS_STACKS_S = 0.5, 1.0
"""Inside a step it is asked for its stacks after this long: the shorter time holds if it has never
been idle nearly as long before. Without them it is not known whether it waits for its own
children."""
UNPACED_STACKS_S = 3.0
"""The same outside of steps, where pauses are usual."""
FORGET = 0.8
STACK_CHARS = 4000

WorkerKey = tuple[Rank, Incarnation]


@dataclass
class _Watched:
    pid: int
    page: int
    stacks: StackFile
    ask_stacks: Callable[[], None]
    added_at: float
    moved_at: float = 0.0
    idle_s: float = 0.0
    longest_s: float = 0.0
    slow: bool = False
    activity: ProcessActivity | None = None
    stack_sent: bool = False

    def look_closer(self, now: float, phase: str, repeat: bool) -> ProcessActivity:
        if self.activity is None:
            self.activity = ProcessActivity(self.pid, self.stacks, self.ask_stacks, phase == PACED)
        self.activity.look(now)
        ask_after_s = min(max(STACKS_S, 3 * self.longest_s), ALWAYS_STACKS_S)
        if phase != PACED:
            ask_after_s = UNPACED_STACKS_S
        runs = not (self.activity.stopped or self.activity.traced)
        if runs and self.idle_s >= ask_after_s:
            self.activity.read_stacks(now, repeat)
        return self.activity

    def stack_to_send(self) -> str:
        """The stacks, once each time the rank seems stuck."""
        if self.activity is None or self.stack_sent:
            return ""
        self.stack_sent = bool(self.activity.text)
        return self.activity.text[:STACK_CHARS]


class Watch:
    def __init__(self, folder: str, clock: Clock = monotonic) -> None:
        self._folder, self._clock = Path(folder), clock
        self._watched: dict[WorkerKey, _Watched] = {}
        self.profiling = ProfilingPages(self._folder)

    def beacon(self, key: WorkerKey) -> str:
        """The path of the beacon of a new incarnation."""
        return str(self._folder / f"rank{key[0]}.{key[1]}")

    def add(self, key: WorkerKey, pid: int, stacks: Path, ask_stacks: Callable[[], None]) -> None:
        page = os.open(self.beacon(key), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._watched[key] = _Watched(pid, page, StackFile(stacks), ask_stacks, self._clock())

    def remove(self, key: WorkerKey) -> Step:
        """How many steps the rank has committed."""
        self.profiling.remove(key)
        watched = self._watched.pop(key, None)
        if watched is None:
            return Step(0)
        seen = beacon.read(os.pread(watched.page, beacon.SIZE, 0))
        os.close(watched.page)
        with suppress(FileNotFoundError):
            os.unlink(self.beacon(key))
        return Step(seen.step) if seen is not None else Step(0)

    @property
    def slow(self) -> bool:
        """Whether, at the last look, a rank had no progress for an unusually long time."""
        return any(watched.slow for watched in self._watched.values())

    def look(self) -> tuple[Progress, ...]:
        """The progress of every rank."""
        now = self._clock()
        pages = {
            key: beacon.read(os.pread(watched.page, beacon.SIZE, 0))
            for key, watched in self._watched.items()
        }
        uses_taskd = any(pages.values())
        seen = []
        for key, watched in self._watched.items():
            if (page := pages[key]) is not None:
                seen.append(self._look_at(key, watched, page, now))
            else:
                seen.append(self._look_at_loading(key, watched, uses_taskd, now))
        return tuple(seen)

    def _look_at_loading(
        self, key: WorkerKey, watched: _Watched, uses_taskd: bool, now: float
    ) -> Progress:
        """A script that may never use TaskD is left alone, unless other ranks here do use it."""
        watched.idle_s = now - watched.added_at
        progress = Progress(*key, Step(0), watched.idle_s, False, 0, phase=LOADING)
        if uses_taskd:
            return self._look_closer(watched, progress, now)
        watched.slow = is_stopped(watched.pid)
        return replace(progress, busy=True, stopped=watched.slow)

    def _look_at(
        self, key: WorkerKey, watched: _Watched, seen: BeaconReading, now: float
    ) -> Progress:
        if seen.moved_at != watched.moved_at:
            # Long pauses fade: those of the start say nothing about training.
            watched.longest_s = max(FORGET * watched.longest_s, watched.idle_s)
            watched.moved_at = seen.moved_at
            watched.activity, watched.stack_sent = None, False
        watched.idle_s = idle_s = max(0.0, now - seen.moved_at)
        entered = max(0, seen.entered - seen.before_step)
        progress = Progress(
            *key,
            Step(seen.step),
            idle_s,
            seen.waiting,
            entered,
            total=seen.total,
            phase=seen.phase,
        )
        return self._look_closer(watched, progress, now)

    def _look_closer(self, watched: _Watched, progress: Progress, now: float) -> Progress:
        paced = progress.phase == PACED
        watched.slow = paced and progress.idle_s > max(SLOW_S, 2 * watched.longest_s)
        if progress.idle_s <= IDLE_S:
            return progress
        if progress.phase == PARKED:
            watched.slow = is_stopped(watched.pid)
            return replace(progress, stopped=watched.slow)
        # A rank that waits for others has a good reason to be idle; one dump of it is enough.
        waits = progress.waiting or progress.phase == REPAIRING
        activity = watched.look_closer(now, progress.phase, repeat=not waits)
        if activity.traced:
            return replace(progress, judged=False)
        watched.slow = watched.slow or activity.stopped
        return replace(
            progress,
            waiting=progress.waiting or (not paced and activity.waits_for_peers),
            busy=activity.busy,
            stopped=activity.stopped,
            # Between two steps a script may do anything for as long as it likes.
            spinning=activity.spinning and activity.busy and paced,
            moving_s=max(0.0, activity.active_at - (now - progress.idle_s)) + activity.starved_s,
            stack=watched.stack_to_send(),
        )


class ProfilingPages:
    """Tells the node's ranks what to record, and reads their paces."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wanted = NOTHING
        self._pages: dict[WorkerKey, SharedSwitch] = {}
        self._reported: dict[WorkerKey, Pace] = {}

    def prepare(self, key: WorkerKey) -> str:
        """The path of the page of a new incarnation, which already says what to record."""
        page = SharedSwitch(str(self._folder / f"rank{key[0]}.{key[1]}.probe"))
        page.want(self._wanted)
        self._pages[key] = page
        return page.path

    def remove(self, key: WorkerKey) -> None:
        self._reported.pop(key, None)
        if (page := self._pages.pop(key, None)) is not None:
            forget(page.path)

    def order(self, order: SetProfiling) -> None:
        self._wanted = parts_ordered(order.default_domain, order.communication, order.parts)
        for page in self._pages.values():
            page.want(self._wanted)

    def look(self) -> tuple[Pace, ...]:
        """The paces that have changed since the last look."""
        changed = []
        for key, page in self._pages.items():
            pace = read_pace(page.path)
            if pace is not None and pace != self._reported.get(key):
                self._reported[key] = pace
                changed.append(pace)
        return tuple(changed)
