"""One fault and one measure, the same for every contender.

The ranks write a line for each finished step into a named pipe (workload.StepWriter). `survive`
waits until all ranks train, kills one with SIGKILL, and measures the time until all ranks of a full
world have finished the same step after the kill. Times come from the ranks' own lines, so
scheduling of the driver does not add noise.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests import ROOT
from tests.bench.peers.workload import STEP_LOG, WORLD

VICTIM = 2
WARM_STEPS = 15
WARM_S = 1.5
"""A real fault hits a job that trains, not one that starts: time enough for all preparations."""
START_LIMIT_S = 60.0
SURVIVE_LIMIT_S = 45.0
EXIT_LIMIT_S = 10.0
TAIL_CHARS = 600


class TrialError(Exception):
    """The contender did not start or recover; the message has the end of its output."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One rank finished one step."""

    at_ns: int
    rank: int
    step: int
    pid: int
    world: int


@dataclass(frozen=True, slots=True)
class Outcome:
    seconds: float
    """From the fault to the first step that all ranks of a full world finished after it."""
    reduced_seconds: float | None
    """The same for the survivors alone, in a smaller world, if they trained in one."""
    steps_redone: int
    """How many steps that all ranks had finished were repeated."""


class Trial:
    """A named pipe and the processes that write to it; kills them all at the end."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="taskd-bench-")
        self.folder = Path(self._folder.name)
        self._pipe_path = self.folder / "steps"
        os.mkfifo(self._pipe_path)
        # Read and write: the pipe never reports its end while ranks come and go.
        self._pipe = os.open(self._pipe_path, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""
        self._unread: deque[bytes] = deque()
        """Lines that were received and not yet read."""
        self._started: list[subprocess.Popen[bytes]] = []
        self._alive: list[int] = []
        """One pidfd per process that we started and that still runs."""

    def start(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        name: str = "job",
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        settings = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            STEP_LOG: str(self._pipe_path),
            **(env or {}),
        }
        with (self.folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                env=settings,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        self._started.append(process)
        self._alive.append(os.pidfd_open(process.pid))
        return process

    def finished(self, limit_s: float) -> Iterator[Finished]:
        """The lines of the ranks. Raises TrialError on timeout, or if all processes have exited."""
        deadline = time.monotonic() + limit_s
        while True:
            while self._unread:
                yield Finished(*map(int, self._unread.popleft().split()))
            left = deadline - time.monotonic()
            if left <= 0 or not self._alive:
                break
            ready = select.select([self._pipe, *self._alive], [], [], left)[0]
            if self._pipe in ready:
                *lines, self._rest = (self._rest + os.read(self._pipe, 1 << 16)).split(b"\n")
                self._unread.extend(lines)
            else:
                self._forget(ready)
        why = f"no full world within {limit_s:.0f} s" if self._alive else "all processes ended"
        raise TrialError(f"{why}; {self.tail()}")

    def _forget(self, ended: list[int]) -> None:
        for pidfd in ended:
            self._alive.remove(pidfd)
            os.close(pidfd)

    def tail(self) -> str:
        """The end of the output of each process: the table shows it as the reason of a failure."""
        return "\n".join(
            f"{log.stem}: {log.read_text(errors='replace').strip()[-TAIL_CHARS:]}"
            for log in sorted(self.folder.glob("*.log"))
        )

    def __enter__(self) -> Trial:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Launchers start workers in new sessions: the environment shows which ones are ours.
        mark = f"{STEP_LOG}={self._pipe_path}".encode()
        while strays := list(_carrying(mark)):
            for pid in strays:
                _kill(pid)
        for process in self._started:
            process.kill()  # its environment may not have been readable before
            process.wait()
        self._forget(list(self._alive))
        os.close(self._pipe)
        self._folder.cleanup()


def survive(trial: Trial, fault: signal.Signals = signal.SIGKILL, spares: int = 0) -> Outcome:
    """Wait until all ranks of the contender train, hit one with the fault, and measure."""
    before = train_until_warm(trial, spares)
    hit_ns = time.monotonic_ns()
    os.kill(before[VICTIM].pid, fault)
    return watch(trial, hit_ns, before)


def train_until_warm(trial: Trial, spares: int = 0) -> dict[int, Finished]:
    """Wait until each rank has done some steps in a full world; return the last line of each.

    A spare that computes along writes lines, too, as a rank beyond the world.
    """
    last: dict[int, Finished] = {}
    steps = dict.fromkeys(range(WORLD + spares), 0)
    warm_ns = 0
    for line in trial.finished(START_LIMIT_S):
        if line.world == WORLD:
            last[line.rank] = line
            steps[line.rank] += 1
        if min(steps.values()) < WARM_STEPS:
            warm_ns = line.at_ns + int(WARM_S * 1e9)
        elif line.at_ns >= warm_ns:
            break
    return {rank: last[rank] for rank in range(WORLD)}


def watch(
    trial: Trial, hit_ns: int, before: dict[int, Finished], limit_s: float = SURVIVE_LIMIT_S
) -> Outcome:
    """Watch from the fault until a full world without the lost process has finished a step."""
    lost = before[VICTIM].pid
    full: dict[int, dict[int, int]] = {}
    reduced: dict[int, dict[int, int]] = {}
    reduced_ns: int | None = None
    for line in trial.finished(limit_s):
        if line.at_ns <= hit_ns or line.pid == lost:
            before[line.rank] = line
            continue
        if line.rank >= WORLD:
            continue
        done = (full if line.world == WORLD else reduced).setdefault(line.step, {})
        done[line.rank] = line.at_ns
        if line.world < WORLD and len(done) == WORLD - 1 and reduced_ns is None:
            reduced_ns = max(done.values())
        if line.world == WORLD and len(done) == WORLD:
            break
    everywhere = min(last.step for last in before.values())
    return Outcome(
        seconds=(max(done.values()) - hit_ns) / 1e9,
        reduced_seconds=None if reduced_ns is None else (reduced_ns - hit_ns) / 1e9,
        steps_redone=max(0, everywhere - line.step + 1),
    )


def _carrying(mark: bytes) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has exited, or belongs to another user


def _kill(pid: int) -> None:
    """Returns when it has exited: its environment can no longer be read some time before."""
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], EXIT_LIMIT_S)
        finally:
            os.close(pidfd)
