"""Signs of life of a rank that shows no progress: is it stopped, at work, in a loop, or dead still?

Who saves a checkpoint, evaluates or compiles shows no step for a long time, and yet does
something: its stack is ever another one, it reads or writes, takes memory, or has children that
work. Who spins in the same few lines of Python does none of that. One that computes inside a
native call cannot be told from one that is caught in it; that is at work until much later.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from taskd.agent.stacks import Answer, StackFile

AT_WORK = 0.1
"""The part of a processor that counts as being at work."""
MUCH_BYTES, MUCH_FAULTS = 64 * 1024, 100
"""Read, written and taken between two looks; less may come from threads that go on regardless."""
SAME_AGAIN = 6
"""So many answers from places that are known make a loop."""
SETTLE_S = 0.05
"""An answer is read no sooner: it is written in several pieces."""
RARER = 0.05
"""The longer it lasts, the rarer it is asked: after this part of the time that has passed."""

_TICKS = os.sysconf("SC_CLK_TCK")
_STOPPED, _WILLING = ("T", "t"), ("R", "D")
"""Letters of /proc: stopped; and running or waiting for a processor or a disk."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What the kernel counts of a process."""

    state: str
    cpu_s: float
    faults: int
    """Pages of memory that it took or touched for the first time."""
    bytes: int
    """Read and written."""
    children_s: float
    """Processor time of its descendants."""


@dataclass
class Signs:
    """Of one rank, from the moment it stands still until it moves again."""

    pid: int
    stacks: StackFile
    ask_stacks: Callable[[], None]
    began: float = 0.0
    busy: bool = False
    stopped: bool = False
    spinning: bool = False
    moved_at: float = 0.0
    """When anything of the kind was last seen; 0: never since it stands still."""
    text: str = ""
    """The stacks that were told first."""
    _first: Counters | None = None
    _last: Counters | None = None
    _places: set[str] = field(default_factory=set)
    _same: int = 0
    _asked_at: float | None = None
    _answered: bool = False

    def look(self, now: float) -> None:
        try:
            counted = count(self.pid)
        except (OSError, ValueError, IndexError):
            return  # it is gone, which is seen elsewhere
        first, last = self._first, self._last
        self.stopped = counted.state in _STOPPED
        if first is None or last is None:
            self._first, self.began = counted, now
            self.busy = True  # until it has been seen twice, nothing is held against it
        else:
            used = (counted.cpu_s - first.cpu_s) / max(now - self.began, 1e-3)
            self.busy = used > AT_WORK or counted.state in _WILLING
            if (
                counted.bytes - last.bytes > MUCH_BYTES
                or counted.faults - last.faults > MUCH_FAULTS
                or counted.children_s > last.children_s
            ):
                self._moved(now)
        self._last = counted

    def read_stacks(self, now: float, again: bool) -> None:
        """Ask where it stands and take in what it answers: once, or `again` and again."""
        if self._asked_at is not None and not self._answered and now - self._asked_at > SETTLE_S:
            answer = self.stacks.read()
            if answer is not None:
                self.text = self.text or answer.text
                self._answered = True
                self._take(answer, now)
        if self._asked_at is None or (again and self._answered and self._is_time(now)):
            self._asked_at, self._answered = now, False
            self.ask_stacks()

    def _is_time(self, now: float) -> bool:
        assert self._asked_at is not None
        return now - self._asked_at >= RARER * (now - self.began)

    def _take(self, answer: Answer, now: float) -> None:
        known = answer.place in self._places or not self._places
        self._places.add(answer.place)
        if not known:
            self._moved(now)
        elif answer.python:
            self._same += 1
        else:
            self._same = 0
        self.spinning = self._same >= SAME_AGAIN

    def _moved(self, now: float) -> None:
        self.moved_at, self._same, self.spinning = now, 0, False


def count(pid: int) -> Counters:
    fields = _stat(pid)
    return Counters(fields[0], _cpu_s(fields), int(fields[7]), _bytes(pid), _children_s(pid))


def _stat(pid: int) -> list[str]:
    """The fields after the name: its state first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _cpu_s(fields: list[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0  # not every kernel counts, and not for everybody
    told = dict(line.split(": ") for line in lines)
    return int(told.get("rchar", 0)) + int(told.get("wchar", 0))


def _children_s(pid: int) -> float:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    total = 0.0
    for child in map(int, children):
        try:
            total += _cpu_s(_stat(child)) + _children_s(child)
        except (OSError, ValueError, IndexError):
            continue
    return total
