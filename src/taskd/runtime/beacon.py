"""The page in shared memory in which a training process publishes its progress.

One file of 80 bytes per rank. The agent creates it, names it in `TASKD_BEACON` and reads it when it
needs to: no message is sent while all is well. All numbers are little-endian and on 8-byte
boundaries, so that each is written and read atomically:

    offset  type  meaning
         0  u64   MAGIC, written last: until then the page is not valid
         8  u64   steps committed
        16  u64   collectives entered
        24  u64   collectives ended; fewer than entered: the rank waits for other ranks
        32  u64   incident in which it trains
        40  f64   monotonic clock, in seconds, of the last progress
        48  u64   phase: index into PHASES
        56  u64   pid
        64  u64   steps of the whole training; 0: not known
        72  u64   collectives entered when the last step was committed

The monotonic clock is the same in all processes of a machine.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from math import isfinite

from taskd.runtime.clock import Clock, monotonic

MAGIC = 0x31_4E4F43_41454254  # "TBEACON1", read backwards
SIZE = 80
LARGEST = (1 << 63) - 1
PHASES = ("starting", "training", "between steps", "parked", "repairing", "leaving")

_ALL = struct.Struct("<QQQQQdQQQQ")
_MAGIC, _STEP, _ENTERED, _ENDED, _INCIDENT, _MOVED, _PHASE, _PID, _TOTAL, _BEFORE_STEP = range(10)
"""Which of the numbers it is."""


@dataclass(frozen=True, slots=True)
class BeaconReading:
    """What the agent reads."""

    step: int
    entered: int
    ended: int
    incident: int
    moved_at: float
    phase: str
    pid: int
    total: int = 0
    before_step: int = 0
    """Collectives entered when the last step was committed."""

    @property
    def waiting(self) -> bool:
        return self.ended < self.entered


class Beacon:
    """The writer's side. Without a path it writes into private memory."""

    def __init__(self, path: str, clock: Clock = monotonic) -> None:
        self._clock = clock
        if path:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(file, SIZE)
                page = mmap.mmap(file, SIZE)
            finally:
                os.close(file)
        else:
            page = mmap.mmap(-1, SIZE)
        self._entered = 0
        _ALL.pack_into(page, 0, 0, 0, 0, 0, 0, clock(), 0, os.getpid(), 0, 0)
        self._show(page)
        self._words[_MAGIC] = MAGIC
        os.register_at_fork(after_in_child=self._detach)

    def _detach(self) -> None:
        """A forked child must not write the progress of its parent."""
        self._show(mmap.mmap(-1, SIZE))

    def _show(self, page: mmap.mmap) -> None:
        """Write to this page from now on, one number at a time."""
        self._words, self._times = memoryview(page).cast("Q"), memoryview(page).cast("d")

    def total(self, steps: int) -> None:
        self._words[_TOTAL] = max(0, min(steps, LARGEST))

    def stepped(self, step: int) -> None:
        self._words[_STEP] = step
        self._words[_BEFORE_STEP] = self._entered
        self._times[_MOVED] = self._clock()

    def collectives(self, entered: int, ended: int) -> None:
        self._entered = entered
        self._words[_ENDED] = ended
        self._words[_ENTERED] = entered
        self._times[_MOVED] = self._clock()

    def phase(self, name: str, incident: int) -> None:
        self._words[_INCIDENT] = incident
        self._words[_PHASE] = PHASES.index(name)
        self._times[_MOVED] = self._clock()


def read(page: bytes | mmap.mmap) -> BeaconReading | None:
    """The reader's side. None: the process has not written its beacon yet."""
    if len(page) < SIZE:
        return None
    values = _ALL.unpack_from(page)
    magic, step, entered, ended, incident, moved_at, phase, pid, total, before = values
    if magic != MAGIC or phase >= len(PHASES) or not isfinite(moved_at):
        return None
    if max(step, entered, ended, incident, pid, total, before) > LARGEST:
        return None  # not what our own writer writes: such numbers fit no message
    name = PHASES[phase]
    return BeaconReading(step, entered, ended, incident, moved_at, name, pid, total, before)
