"""`taskd run` against torchrun: launch to first step, killed rank to next step, and idle cost.

Both run the same unmodified script, which writes the time of each step of each rank to a file and
loads its own checkpoint after a restart. The runs alternate, so that both see the same noise.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from tests.bench.rows import Row

RANKS, ROUNDS = 4, 5
KILL_AT, STEPS = 5, 12
WATCHED_S = 10.0
SCRIPT = Path(__file__).with_name("launch_train.py")

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=3")
TASKD = (sys.executable, "-m", "taskd", "run")


@dataclass(frozen=True)
class Times:
    launch_s: float
    """From the start of the launcher to the first finished step of the last rank."""
    restart_s: float
    """From the kill to the first finished step of the last rank after it."""


def measure() -> list[Row]:
    ours: list[Times] = []
    theirs: list[Times] = []
    for _ in range(ROUNDS):
        theirs.append(_run(TORCHRUN))
        ours.append(_run(TASKD))
    share, memory = _idle()
    return [
        _row("launch to first step", [t.launch_s for t in ours], [t.launch_s for t in theirs], 0.6),
        _row(
            "killed rank to next step",
            [t.restart_s for t in ours],
            [t.restart_s for t in theirs],
            0.35,
        ),
        Row("manager idle", f"{share['manager']:.2f} %", "1 % of a core", share["manager"], 1.0),
        Row(
            "agent and proxy idle", f"{share['agent']:.2f} %", "1 % of a core", share["agent"], 1.0
        ),
        Row(
            "memory of the manager",
            f"{memory / 2**20:.0f} MiB",
            "60 MiB more than Python and gRPC",
            memory / (60 * 2**20),
            1.0,
        ),
    ]


def _row(what: str, ours: list[float], theirs: list[float], target: float) -> Row:
    mine, other = median(ours), median(theirs)
    return Row(
        f"{what}, {RANKS} ranks",
        f"{mine:.2f} s",
        f"torchrun {other:.2f} s",
        mine / other,
        target,
    )


def _run(launcher: tuple[str, ...]) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "BENCH_DIR": folder,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        began = time.monotonic()
        command = [*launcher, f"--nproc-per-node={RANKS}", str(SCRIPT), str(STEPS), str(KILL_AT)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        steps = [Path(folder, f"steps.{rank}").read_text().split() for rank in range(RANKS)]
        killed = float(Path(folder, "killed").read_text())
    times = [[float(word) for word in rank] for rank in steps]
    first = max(rank[0] for rank in times)
    after = max(min(at for at in rank if at > killed) for rank in times)
    return Times(first - began, after - killed)


def _idle() -> tuple[dict[str, float], int]:
    """Return the CPU use of idle manager and agent in percent of a core, and the memory of the
    manager beyond that of Python with gRPC."""
    with tempfile.TemporaryDirectory() as folder:
        pause = Path(folder, "pause.py")
        pause.write_text("import signal; print('up', flush=True); signal.pause()")
        job = subprocess.Popen(
            [*TASKD, f"--nproc-per-node={RANKS}", str(pause)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert job.stdout is not None
        for _ in range(RANKS):
            job.stdout.readline()
        launcher = psutil.Process(job.pid)
        manager = next(p for p in launcher.children() if "taskd.manager" in p.cmdline())
        watched = {"agent": launcher, "manager": manager}
        before = {name: sum(p.cpu_times()[:2]) for name, p in watched.items()}
        time.sleep(WATCHED_S)
        spent = {name: sum(p.cpu_times()[:2]) - before[name] for name, p in watched.items()}
        beyond = manager.memory_info().rss - _bare()
        job.terminate()
        job.wait(60)
        job.stdout.close()
    return {name: 100.0 * cpu / WATCHED_S for name, cpu in spent.items()}, beyond


def _bare() -> int:
    """Return the memory of Python with gRPC alone."""
    code = "import grpc.aio, psutil; print(psutil.Process().memory_info().rss)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)
