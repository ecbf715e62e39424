"""What a rank without progress is doing: stopped, working, spinning in a loop, or doing nothing.

A rank that saves a checkpoint, evaluates or compiles completes no step for a long time, but it does
something: its stack changes, it reads or writes, it takes memory, or its children work. A rank that
waits for its own children, such as the workers of a DataLoader, counts as busy, because they may
wait for a slow disk; but not if a signal has stopped one of them. A rank that waits for an answer
over a Python socket counts as busy, too. A rank that spins in the same few lines of Python does
none of this. A computation inside a native call looks the same as being stuck in that call; such a
rank counts as working until much later. On a busy machine a rank may do nothing because it gets no
CPU: the time that a thread of it has waited for one is measured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from taskd.agent.worker_stacks import StackDump, StackFile

BUSY_SHARE = 0.1
"""The share of a CPU from which on a process counts as busy."""
MIN_BYTES, MIN_FAULTS = 64 * 1024, 100
"""I/O and page faults between two looks; background threads alone may cause less than this."""
SAME_STACKS = 6
"""So many dumps with a stack that was seen before mean: it spins in a loop."""
SETTLE_S = 0.05
"""A dump is not read sooner, because it is written in several pieces."""
BACKOFF = 0.05
"""The longer a rank has no progress, the less often it is asked: after this share of the time."""
ANSWER_S = 0.5
"""How long a rank may take to write its first dump. Until then it counts as busy."""

_WAITS_FOR_CHILD = re.compile(
    r'File "[^"]*/(?:torch/utils/data/dataloader|multiprocessing/\w+|concurrent/futures/process|'
    r'subprocess|joblib/[\w/]+|loky/[\w/]+)\.py"'
)
"""Where a process waits for one that it has started."""

_WAITS_FOR_PEERS = re.compile(
    r'\s*File "[^"]*/(?:torch/distributed|torch/nn/parallel|taskd/torch(?!/startup/start_mark))'
    r'/[^"]*"'
)
"""The innermost call, when a process waits for other ranks in a collective. The start mark waits
for the store: in a replacement, for one that the other ranks do not wait for."""

_WAITS_FOR_SERVICE = re.compile(r'\s*File "[^"]*/(?:socket|ssl)\.py"')
"""The innermost call, when a process waits for an answer over the network."""

_TICKS = os.sysconf("SC_CLK_TCK")
_STOPPED, _TRACED, _RUNNING = "T", "t", "R"
_RUNNABLE = (_RUNNING, "D")
"""Process states of /proc: stopped by a signal; stopped by a debugger; running or waiting for a
CPU; and the same or waiting for a disk."""


@dataclass(frozen=True, slots=True)
class Counters:
    """The kernel's counters of a process."""

    state: str
    cpu_s: float
    faults: int
    """Pages of memory that it allocated or touched for the first time."""
    bytes: int
    """Read and written."""
    children: int
    """How many processes it has started that have not been waited for."""
    stopped_children: int
    """How many of them a signal has stopped."""
    children_s: float
    """CPU time of its descendants."""


@dataclass(frozen=True, slots=True)
class CpuWait:
    """How long a thread has run, and has waited for a CPU."""

    ran_ns: int
    waited_ns: int
    """Without a wait that still lasts."""
    is_ready: bool
    """It runs, or waits for a CPU."""


@dataclass
class ProcessActivity:
    """Of one rank, from the moment when its progress stops until it continues."""

    pid: int
    stacks: StackFile
    ask_stacks: Callable[[], None]
    in_step: bool = True
    """False: any change of its stack is a sign of work, not only a stack that was never seen."""
    began: float = 0.0
    busy: bool = False
    stopped: bool = False
    traced: bool = False
    """A debugger has stopped it."""
    spinning: bool = False
    waits_for_peers: bool = False
    """Its stack shows that it waits in a collective. Outside of steps, its beacon does not."""
    active_at: float = 0.0
    """When any activity was last seen; 0: never since its progress stopped."""
    starved_s: float = 0.0
    """How long one of its threads, since then, has been ready to run and has got no CPU."""
    text: str = ""
    """The first stack dump."""
    _first: Counters | None = None
    _last: Counters | None = None
    _last_look: float = 0.0
    _cpu_waits: dict[str, CpuWait] = field(default_factory=dict)
    """Of its threads, at the last look."""
    _known_stacks: set[str] = field(default_factory=set)
    _same: int = 0
    _asked_at: float | None = None
    _answered: bool = False
    _waits_for_child: bool = False
    _waits_for_service: bool = False
    _last_stack: str = ""

    def look(self, now: float) -> None:
        try:
            counters = read_counters(self.pid)
        except (OSError, ValueError, IndexError):
            return  # the process has exited, which is noticed elsewhere
        first, last = self._first, self._last
        self.stopped = counters.state == _STOPPED
        self.traced = counters.state == _TRACED
        if first is None or last is None:
            self._first, self.began = counters, now
            self.busy = True  # nothing can be said before it has been looked at twice
        else:
            used = (counters.cpu_s - first.cpu_s) / max(now - self.began, 1e-3)
            self.busy = (
                used > BUSY_SHARE
                or counters.state in _RUNNABLE
                or (self._waits_for_child and counters.children > counters.stopped_children == 0)
                or self._waits_for_service
                or self._is_unread(now)
            )
            if (
                counters.bytes - last.bytes > MIN_BYTES
                or counters.faults - last.faults > MIN_FAULTS
                or counters.children_s > last.children_s
            ):
                self._is_active(now)
        waits = read_cpu_waits(self.pid)
        if last is not None:
            self.starved_s += starved_s(self._cpu_waits, waits, now - self._last_look)
        self._last, self._last_look, self._cpu_waits = counters, now, waits

    def read_stacks(self, now: float, repeat: bool) -> None:
        """Ask for the stacks and read the dump: once, or repeatedly."""
        if self._asked_at is not None and not self._answered and now - self._asked_at > SETTLE_S:
            dump = self.stacks.read()
            if dump is not None:
                self.text = self.text or dump.text
                self._answered = True
                self._compare(dump, now)
        if self._asked_at is None or (repeat and self._answered and self._is_due(now)):
            self._asked_at, self._answered = now, False
            self.ask_stacks()

    def _is_unread(self, now: float) -> bool:
        """Its first dump is still to come, and may show that it waits for a child."""
        return not self.text and (self._asked_at is None or now < self._asked_at + ANSWER_S)

    def _is_due(self, now: float) -> bool:
        assert self._asked_at is not None
        return now - self._asked_at >= BACKOFF * (now - self.began)

    def _compare(self, dump: StackDump, now: float) -> None:
        self._waits_for_child = _WAITS_FOR_CHILD.search(dump.main_stack) is not None
        self.waits_for_peers = _WAITS_FOR_PEERS.match(dump.main_stack) is not None
        self._waits_for_service = _WAITS_FOR_SERVICE.match(dump.main_stack) is not None
        known = dump.main_stack in self._known_stacks or not self._known_stacks
        if not self.in_step and dump.main_stack != self._last_stack != "":
            known = False
        self._known_stacks.add(dump.main_stack)
        self._last_stack = dump.main_stack
        if not known:
            self._is_active(now)
        elif dump.in_python:
            self._same += 1
        else:
            self._same = 0
        self.spinning = self._same >= SAME_STACKS

    def _is_active(self, now: float) -> None:
        self.active_at, self._same, self.spinning, self.starved_s = now, 0, False, 0.0


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process. One that a debugger has stopped does not count."""
    try:
        return _stat(pid)[0] == _STOPPED
    except (OSError, IndexError):
        return False  # it has exited


def read_counters(pid: int) -> Counters:
    fields = _stat(pid)
    children = _children(pid)
    work_s = sum(map(_tree_s, children))
    return Counters(
        fields[0],
        _cpu_s(fields),
        int(fields[7]),
        _bytes(pid),
        len(children),
        sum(map(is_stopped, children)),
        work_s,
    )


def _stat(pid: int | str) -> list[str]:
    """The fields after the process name; the state is the first. Also of `PID/task/THREAD`."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _cpu_s(fields: list[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0  # not every kernel counts I/O, and not every user may read it
    counters = dict(line.split(": ") for line in lines)
    return int(counters.get("rchar", 0)) + int(counters.get("wchar", 0))


def _children(pid: int) -> list[int]:
    """Of all its threads: the kernel lists a child with the thread that has forked it."""
    children = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            children += Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    except OSError:
        pass  # a thread or the process has ended meanwhile
    return [int(child) for child in children]


def read_cpu_waits(pid: int) -> dict[str, CpuWait]:
    """Of each thread of the process. Empty where the kernel does not count them."""
    waits = {}
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            task = f"{pid}/task/{thread}"
            with suppress(OSError, ValueError, IndexError):  # the thread has ended meanwhile
                counted = Path(f"/proc/{task}/schedstat").read_text().split()
                is_ready = _stat(task)[0] == _RUNNING
                waits[thread] = CpuWait(int(counted[0]), int(counted[1]), is_ready)
    return waits


def starved_s(before: dict[str, CpuWait], now: dict[str, CpuWait], passed_s: float) -> float:
    """How long the thread that has waited longest for a CPU between two looks has waited.

    The kernel counts a wait when it ends: a thread that is ready to run, and has neither run nor
    waited by the kernel's count, has waited all the time.
    """
    longest_s = 0.0
    for thread, wait in now.items():
        if thread in before:
            longest_s = max(longest_s, (wait.waited_ns - before[thread].waited_ns) / 1e9)
            if wait.is_ready and wait == before[thread]:
                return passed_s
    return min(longest_s, passed_s)


def _tree_s(pid: int) -> float:
    """The CPU time of a process and its descendants."""
    try:
        return _cpu_s(_stat(pid)) + sum(map(_tree_s, _children(pid)))
    except (OSError, ValueError, IndexError):
        return 0.0
