"""What an agent sees of its ranks: their beacons, and the kernel's data about idle ranks."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from taskd.agent.watch import Watch
from taskd.model.ids import Incarnation, Rank
from taskd.model.messages import Progress
from taskd.runtime.beacon import Beacon

KEY = Rank(3), Incarnation(1)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    code = "import signal; print(flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING:
        os.sched_yield()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_progress_is_read_from_beacon(tmp_path: Path) -> None:
    clock = Clock()
    watch = Watch(str(tmp_path), clock)
    watch.add(KEY, os.getpid(), tmp_path / "stacks", lambda: None)
    assert [(seen.phase, seen.busy) for seen in watch.look()] == [("loading", True)]
    beacon = Beacon(watch.beacon(KEY), clock)
    beacon.phase("training", 2)
    beacon.stepped(7)
    beacon.collectives(15, 14)
    clock.now += 0.25
    (seen,) = watch.look()
    assert (seen.rank, seen.incarnation, seen.step, seen.collective) == (3, 1, 7, 15)
    assert (seen.waiting, seen.phase, seen.idle_s) == (True, "training", 0.25)
    beacon.stepped(8)
    beacon.collectives(17, 17)
    beacon.phase("parked", 2)
    (seen,) = watch.look()
    assert (seen.collective, seen.phase) == (2, "parked"), "collectives of this step"
    assert watch.remove(KEY) == 8
    assert watch.look() == ()
    assert not Path(watch.beacon(KEY)).exists()


def test_sleeping_process_and_stopped_process_are_distinguished(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    clock = Clock()
    watch = Watch(str(tmp_path), clock)
    watch.add(KEY, sleeper.pid, tmp_path / "stacks", lambda: None)
    Beacon(watch.beacon(KEY), clock).phase("training", 0)
    seen: list[Progress] = []
    for _ in range(4):
        clock.now += 1.0
        seen += watch.look()
    assert (seen[-1].busy, seen[-1].stopped) == (False, False)
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert watch.look()[0].stopped


@pytest.mark.parametrize("phase", ["", "starting", "parked", "repairing", "leaving"])
def test_stopped_process_is_seen_in_every_phase(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], phase: str
) -> None:
    """Also before it has written its beacon: phase "" here."""
    clock = Clock()
    watch = Watch(str(tmp_path), clock)
    watch.add(KEY, sleeper.pid, tmp_path / "stacks", lambda: None)
    if phase:
        Beacon(watch.beacon(KEY), clock).phase(phase, 0)
    clock.now += 1.0
    assert not any(seen.stopped for seen in watch.look())
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    (seen,) = watch.look()
    assert (seen.rank, seen.stopped) == (3, True)
    assert watch.slow, "the next heartbeat must come soon"
    os.kill(sleeper.pid, signal.SIGCONT)
    os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED)
    assert not any(seen.stopped for seen in watch.look())


@pytest.mark.parametrize("phase", ["starting", "training", "leaving"])
def test_process_in_a_debugger_is_neither_stopped_nor_judged(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], phase: str
) -> None:
    clock, asked = Clock(), list[None]()
    watch = Watch(str(tmp_path), clock)
    watch.add(KEY, sleeper.pid, tmp_path / "stacks", lambda: asked.append(None))
    Beacon(watch.beacon(KEY), clock).phase(phase, 0)
    attach, detach = 16, 17
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(attach, sleeper.pid, None, None) != 0:
        pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
    os.waitpid(sleeper.pid, os.WUNTRACED)
    clock.now += 5.0
    assert not any(seen.stopped or seen.judged for seen in watch.look())
    assert not asked, "a signal would interrupt the debugger"
    libc.ptrace(detach, sleeper.pid, None, None)


def test_computing_process_is_busy(tmp_path: Path) -> None:
    clock = Clock()
    watch = Watch(str(tmp_path), clock)
    watch.add(KEY, os.getpid(), tmp_path / "stacks", lambda: None)
    Beacon(watch.beacon(KEY), clock).phase("training", 0)
    clock.now += 1.0
    watch.look()
    before = os.times()
    while sum(os.times()[:2]) - sum(before[:2]) < 0.3:
        pass
    clock.now += 1.0
    assert watch.look()[0].busy


def test_stacks_are_requested_once_and_sent_once(tmp_path: Path) -> None:
    clock = Clock()
    asked = []
    watch = Watch(str(tmp_path), clock)
    stacks = tmp_path / "stacks"
    text = "Stack (most recent call first):\n  in read()\n"
    watch.add(KEY, os.getpid(), stacks, lambda: asked.append(stacks.write_text(text)))
    beacon = Beacon(watch.beacon(KEY), clock)
    beacon.phase("training", 0)
    beacon.collectives(3, 2)  # it waits for others, so one dump is enough
    sent = []
    for _ in range(5):
        clock.now += 0.6
        sent.append(watch.look()[0].stack)
    assert len(asked) == 1
    assert [each for each in sent if each] == [text]
    beacon.stepped(1)
    clock.now += 0.1
    assert watch.look()[0].stack == ""
