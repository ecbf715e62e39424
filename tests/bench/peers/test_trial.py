"""The measure itself: which lines count, and that no process is left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.peers.trial import VICTIM, Finished, Trial, TrialError, watch
from tests.bench.peers.workload import WORLD

HIT_NS = 1_000_000_000
NEW_PID = 99
RANKS = range(WORLD)


@pytest.fixture
def trial() -> Iterator[Trial]:
    with Trial() as trial:
        trial.start([sys.executable, "-c", "import signal; signal.pause()"], name="quiet")
        yield trial


def write(trial: Trial, *lines: Finished) -> None:
    with (trial.folder / "steps").open("w") as pipe:
        for line in lines:
            pipe.write(f"{line.at_ns} {line.rank} {line.step} {line.pid} {line.world}\n")


def line(
    after_ms: int, rank: int, step: int, pid: int | None = None, world: int = WORLD
) -> Finished:
    return Finished(HIT_NS + after_ms * 1_000_000, rank, step, rank if pid is None else pid, world)


def all_at(step: int) -> dict[int, Finished]:
    return {rank: line(-10, rank, step) for rank in RANKS}


def new(rank: int) -> int | None:
    return NEW_PID if rank == VICTIM else None


def test_time_ends_with_the_last_rank_of_the_first_full_step(trial: Trial) -> None:
    write(trial, *(line(100 + rank, rank, 8, new(rank)) for rank in RANKS))
    outcome = watch(trial, HIT_NS, all_at(7))
    assert outcome.seconds == pytest.approx(0.103)
    assert outcome.steps_redone == 0
    assert outcome.reduced_seconds is None


def test_step_in_flight_does_not_count_as_recovery(trial: Trial) -> None:
    in_flight = [line(1, rank, 8) for rank in RANKS]
    write(trial, *in_flight, *(line(200, rank, 9, new(rank)) for rank in RANKS))
    assert watch(trial, HIT_NS, all_at(7)).seconds == pytest.approx(0.2)


def test_steps_since_the_checkpoint_count_as_repeated(trial: Trial) -> None:
    write(trial, *(line(500, rank, 6, NEW_PID + rank) for rank in RANKS))
    assert watch(trial, HIT_NS, all_at(9)).steps_redone == 4


def test_step_of_a_smaller_world_is_reported_separately(trial: Trial) -> None:
    survivors = [rank for rank in RANKS if rank != VICTIM]
    write(
        trial,
        *(line(100, rank, 8, world=WORLD - 1) for rank in survivors),
        *(line(400, rank, 9, new(rank)) for rank in RANKS),
    )
    outcome = watch(trial, HIT_NS, all_at(7))
    assert outcome.reduced_seconds == pytest.approx(0.1)
    assert outcome.seconds == pytest.approx(0.4)


def test_spare_does_not_count_as_a_rank(trial: Trial) -> None:
    write(
        trial,
        *(line(100, rank, 8) for rank in (0, 1, 3, WORLD)),
        *(line(300, rank, 9, new(rank)) for rank in RANKS),
    )
    assert watch(trial, HIT_NS, all_at(7)).seconds == pytest.approx(0.3)


def test_trial_without_recovery_times_out(trial: Trial) -> None:
    with pytest.raises(TrialError, match="no full world within 0 s"):
        watch(trial, HIT_NS, all_at(7), limit_s=0.1)


def test_trial_whose_processes_exit_fails_with_their_output() -> None:
    with Trial() as trial:
        trial.start([sys.executable, "-c", "print('out of luck')"])
        with pytest.raises(TrialError, match=r"all processes ended; job: out of luck"):
            watch(trial, HIT_NS, all_at(7))


CHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], start_new_session=True)
"""
GRANDCHILD = """
import os, signal, sys
open(sys.argv[1], "w").write(str(os.getpid()))
signal.pause()
"""


def test_trial_kills_all_descendants(tmp_path: Path) -> None:
    pid_pipe = tmp_path / "pid"
    os.mkfifo(pid_pipe)
    with Trial() as trial:
        trial.start([sys.executable, "-c", CHILD, GRANDCHILD, pid_pipe])
        pid = int(pid_pipe.read_text())
        assert Path(f"/proc/{pid}").exists()
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(") ")[2][0] in "ZX"
