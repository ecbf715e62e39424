"""How the node's ranks are getting on, read from their beacons and from the kernel.

A rank shows its progress in a page of shared memory (`runtime/beacon.py`), so looking costs neither
side a message. Only of one that stands still more is asked (`signs.py`): of the kernel what its
process is doing, of the process itself where its threads are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from taskd.agent.process_signs import Signs
from taskd.agent.rank_profiling import Probes
from taskd.agent.stacks import StackFile
from taskd.model.ids import Incarnation, Rank, Step
from taskd.model.messages import Progress
from taskd.runtime import beacon
from taskd.runtime.clock import Clock, monotonic

JUDGED = ("training", "between steps")
UNEASY_S = 0.2
STILL_S = 0.5
"""From here on the kernel is asked."""
STUCK_S = 0.5
"""From here on a rank that never stood nearly as long is asked for its stacks."""
FORGET = 0.8
STACK_CHARS = 4000

Life = tuple[Rank, Incarnation]


@dataclass
class _Watched:
    pid: int
    page: int
    stacks: StackFile
    ask_stacks: Callable[[], None]
    moved_at: float = 0.0
    idle_s: float = 0.0
    longest_s: float = 0.0
    uneasy: bool = False
    signs: Signs | None = None
    told: bool = False

    def look_closer(self, now: float, again: bool) -> Signs:
        if self.signs is None:
            self.signs = Signs(self.pid, self.stacks, self.ask_stacks)
        self.signs.look(now)
        if not self.signs.stopped and self.idle_s >= max(STUCK_S, 3 * self.longest_s):
            self.signs.read_stacks(now, again)
        return self.signs

    def tell_stack(self) -> str:
        """Once each time it seems stuck."""
        if self.signs is None or self.told:
            return ""
        self.told = bool(self.signs.text)
        return self.signs.text[-STACK_CHARS:]


class Watch:
    def __init__(self, folder: str, clock: Clock = monotonic) -> None:
        self._folder, self._clock = Path(folder), clock
        self._watched: dict[Life, _Watched] = {}
        self.probes = Probes(self._folder)

    def beacon(self, life: Life) -> str:
        """The path for a new life's beacon."""
        return str(self._folder / f"rank{life[0]}.{life[1]}")

    def add(self, life: Life, pid: int, stacks: Path, ask_stacks: Callable[[], None]) -> None:
        page = os.open(self.beacon(life), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._watched[life] = _Watched(pid, page, StackFile(stacks), ask_stacks)

    def remove(self, life: Life) -> None:
        self.probes.remove(life)
        watched = self._watched.pop(life, None)
        if watched is not None:
            os.close(watched.page)
            with suppress(FileNotFoundError):
                os.unlink(self.beacon(life))

    def close(self) -> None:
        for life in list(self._watched):
            self.remove(life)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def uneasy(self) -> bool:
        """Whether, at the last look, a rank stood still for unusually long."""
        return any(watched.uneasy for watched in self._watched.values())

    def look(self) -> tuple[Progress, ...]:
        """Of every rank that has put up its beacon."""
        now = self._clock()
        seen = (self._look_at(life, watched, now) for life, watched in self._watched.items())
        return tuple(progress for progress in seen if progress is not None)

    def _look_at(self, life: Life, watched: _Watched, now: float) -> Progress | None:
        sight = beacon.read(os.pread(watched.page, beacon.SIZE, 0))
        if sight is None:
            return None
        idle_s = max(0.0, now - sight.moved_at)
        if sight.moved_at != watched.moved_at:
            # Long pauses are forgotten by and by: those of the start say nothing about training.
            watched.longest_s = max(FORGET * watched.longest_s, watched.idle_s)
            watched.moved_at = sight.moved_at
            watched.signs, watched.told = None, False
        watched.idle_s = idle_s
        judged = sight.phase in JUDGED
        watched.uneasy = judged and idle_s > max(UNEASY_S, 2 * watched.longest_s)
        told = Progress(
            *life, Step(sight.step), idle_s, sight.waiting, sight.entered, judged=judged
        )
        if not judged or idle_s <= STILL_S:
            return told
        # Whoever waits for others has a good reason to stand still; one look at it is enough.
        signs = watched.look_closer(now, again=not sight.waiting)
        return replace(
            told,
            busy=signs.busy,
            stopped=signs.stopped,
            # Between two steps a script may do whatever it likes for as long as it likes.
            spinning=signs.spinning and signs.busy and sight.phase == "training",
            moving_s=max(0.0, signs.moved_at - sight.moved_at),
            stack=watched.tell_stack(),
        )
