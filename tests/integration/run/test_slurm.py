"""The sbatch example, with stand-ins for Slurm's commands and environment."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from taskd.runtime.address import free_port

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "slurm" / "train.sbatch"
FOREVER = 1_000_000
WAIT_S = 240.0

SRUN = """#!/usr/bin/env bash
# One process per node of the allocation, all on this machine. Fails if one of them did.
[[ $1 == --kill-on-bad-exit=0 ]] && shift
pids=() code=0
for ((node = 0; node < 2; node++)); do
    SLURM_PROCID=$node "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then echo 127.0.0.1; else echo "$@" >>"$SLURM_CALLS"; fi
"""
TASKD = f"""#!/usr/bin/env bash
exec {sys.executable} -m taskd "$@"
"""


class Slurm:
    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.calls.touch()
        commands = folder / "bin"
        commands.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("taskd", TASKD)):
            path = commands / name
            path.write_text(text)
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        (folder / "run").mkdir(mode=0o700)
        self.env = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NAME": "train",
            "SLURM_JOB_NODELIST": "host[0-1]",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_CALLS": str(self.calls),
            "PET_NPROC_PER_NODE": "1",
        }

    def batch(self, steps: int) -> subprocess.Popen[str]:
        """What slurmd starts on the first node."""
        ports = {"PET_MASTER_PORT": str(free_port()), "PET_MANAGER_PORT": str(free_port())}
        return subprocess.Popen(
            [str(EXAMPLE), str(ROOT / "examples" / "train_ddp.py"), str(steps), "0.2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env={**self.env, **ports},
            start_new_session=True,
        )

    def step(self) -> int:
        """How far the job is, as `taskd status` shows it."""
        shown = subprocess.run(
            ["taskd", "status", "train-42", "--json"],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.search(r'"step": (\d+)', shown.stdout)
        return int(found[1]) if found else 0


def end(batch: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(batch.pid, signal.SIGKILL)


@pytest.mark.timeout(2 * WAIT_S + 60)
def test_warning_before_the_time_limit_writes_a_checkpoint_and_the_next_run_continues(
    tmp_path: Path,
) -> None:
    slurm = Slurm(tmp_path)
    first = slurm.batch(FOREVER)
    try:
        deadline = threading.Event()
        stop = threading.Timer(WAIT_S, deadline.set)
        stop.start()
        while slurm.step() < 5 and not deadline.is_set():
            assert first.poll() is None, first.communicate()[0]
        stop.cancel()
        first.send_signal(signal.SIGUSR1)
        out, _ = first.communicate(timeout=WAIT_S)
    finally:
        end(first)
    assert first.returncode != 0, out
    assert "the time limit is near" in out, out
    assert slurm.calls.read_text() == "requeue 42\n", out
    (written,) = (tmp_path / "taskd-train" / "dump").glob("step-*")
    assert stat.S_IMODE((tmp_path / "taskd-train" / "token").stat().st_mode) == 0o600

    steps = int(written.name.removeprefix("step-")) + 10
    second = slurm.batch(steps)
    try:
        again, _ = second.communicate(timeout=WAIT_S)
    finally:
        end(second)
    assert second.returncode == 0, again
    assert f"{steps} steps with 2 ranks" in again
    assert (written / "taskd.used.json").exists(), "it did not resume there"
    assert slurm.calls.read_text() == "requeue 42\n"
