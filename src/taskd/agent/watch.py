"""How the node's ranks are getting on, read from their beacons and from the kernel.

A rank shows its progress in a page of shared memory (`edge/beacon.py`), so looking costs neither
side a message. Only for one that stands still the kernel is asked what its process is doing, and
the process itself where its threads are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from taskd.agent.probes import Probes
from taskd.edge import beacon
from taskd.edge.clock import Clock, monotonic
from taskd.model.ids import Incarnation, Rank, Step
from taskd.model.messages import Progress

JUDGED = ("training", "between steps")
UNEASY_S = 0.2
STILL_S = 0.5
"""From here on the kernel is asked."""
STUCK_S = 0.5
"""From here on a rank that never stood nearly as long is asked for its stacks."""
FORGET = 0.8
AT_WORK = 0.1
"""The part of a processor that counts as being at work."""
STACK_CHARS = 4000

_TICKS = os.sysconf("SC_CLK_TCK")
_STOPPED, _WILLING = ("T", "t"), ("R", "D")
"""Letters of /proc: stopped; and running or waiting for a processor or a disk."""

Life = tuple[Rank, Incarnation]


@dataclass
class _Watched:
    pid: int
    page: int
    stacks: Path
    ask_stacks: Callable[[], None]
    moved_at: float = 0.0
    idle_s: float = 0.0
    longest_s: float = 0.0
    uneasy: bool = False
    cpu_s: float | None = None
    since: float = 0.0
    asked: bool = False
    told: bool = False


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
        self._watched[life] = _Watched(pid, page, stacks, ask_stacks)

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
            watched.cpu_s, watched.asked, watched.told = None, False, False
        watched.idle_s = idle_s
        judged = sight.phase in JUDGED
        watched.uneasy = judged and idle_s > max(UNEASY_S, 2 * watched.longest_s)
        busy = stopped = False
        if judged and idle_s > STILL_S:
            busy, stopped = self._ask_kernel(watched, now)
        return Progress(
            *life,
            Step(sight.step),
            idle_s,
            sight.waiting,
            sight.entered,
            judged=judged,
            busy=busy,
            stopped=stopped,
            stack=self._stack(watched, idle_s) if judged and not stopped else "",
        )

    def _ask_kernel(self, watched: _Watched, now: float) -> tuple[bool, bool]:
        """Whether it is at work, and whether it is stopped."""
        try:
            state, cpu_s = _process(watched.pid)
        except (OSError, ValueError, IndexError):
            return False, False
        if watched.cpu_s is None:
            watched.cpu_s, watched.since = cpu_s, now
            return (
                True,
                state in _STOPPED,
            )  # until it has been seen twice, nothing is held against it
        used = (cpu_s - watched.cpu_s) / max(now - watched.since, 1e-3)
        return used > AT_WORK or state in _WILLING, state in _STOPPED

    def _stack(self, watched: _Watched, idle_s: float) -> str:
        if idle_s < max(STUCK_S, 3 * watched.longest_s) or watched.told:
            return ""
        if not watched.asked:
            watched.asked = True
            watched.ask_stacks()
            return ""
        try:
            text = watched.stacks.read_text(errors="replace")
        except OSError:
            return ""
        watched.told = bool(text)
        return text[-STACK_CHARS:]


def _process(pid: int) -> tuple[str, float]:
    """The state letter of a process, and the processor time that it has used."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS
