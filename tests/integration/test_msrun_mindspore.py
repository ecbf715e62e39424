"""MindSpore's own `msrun` on the CPU, which imports our agent by itself: `make mindspore`."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.integration.documented_venv import ROOT, alone

VENV = ROOT / ".venvs/mindspore"
DEADLINE_S = 300.0

pytestmark = [
    pytest.mark.skipif(not (VENV / ".ready").exists(), reason="`make mindspore` installs it"),
    pytest.mark.timeout(2 * DEADLINE_S),
]

MANAGER = """
    from taskd.api import init_taskd_manager, start_taskd_manager

    init_taskd_manager({"job_id": "ms", "node_nums": 1, "proc_per_node": 2})
    start_taskd_manager()
"""

TRAIN = """
    import os, signal
    import numpy as np
    import mindspore as ms
    from mindspore import Tensor, nn, ops
    from mindspore.communication import get_rank, init

    ms.set_device("CPU")
    init()
    net, reduce = nn.Dense(4, 4), ops.AllReduce()
    for step in range(3):
        reduce(net(Tensor(np.ones((2, 4), np.float32)))).asnumpy()
        if os.environ.get("DIE") and get_rank() == 1 and step == 1 and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    open(f"finished.{get_rank()}", "w").close()
"""

START = """
    if [[ "$MANAGER" == on ]]; then python manager.py & fi
    export MS_ENABLE_TFT='{RSC:1}'
    msrun --worker_num=2 --local_worker_num=2 --master_port=8118 --join=True train.py
    code=$?
    wait
    exit $code
"""


def job(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    for name, text in (("manager.py", MANAGER), ("train.py", TRAIN), ("start.sh", START)):
        (folder / name).write_text(textwrap.dedent(text))
    settings = {"PATH": f"{VENV / 'bin'}:{os.environ['PATH']}", "TASKD_LOG_PATH": str(folder)}
    command = alone(["bash", "start.sh"])
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **settings, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def finished(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("finished.*"))


def test_a_healthy_job_ends_with_0(tmp_path: Path) -> None:
    done = job(tmp_path, MANAGER="on")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert finished(tmp_path) == ["finished.0", "finished.1"]
    assert done.stdout.count("Start worker process") == 2


def test_a_killed_worker_is_seen_and_the_job_restarted(tmp_path: Path) -> None:
    done = job(tmp_path, MANAGER="on", DIE="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert finished(tmp_path) == ["finished.0", "finished.1"]
    # MindSpore's scheduler may need a second attempt to have forgotten the dead.
    assert done.stdout.count("Start worker process") >= 4
    assert "rank 1 exited" in done.stdout


def test_without_a_manager_it_ends_with_the_reason(tmp_path: Path) -> None:
    done = job(tmp_path, MANAGER="off", TASKD_AGENT_JOIN_TIMEOUT_S="3")
    assert done.returncode != 0
    assert "no manager in 3 s" in done.stdout + done.stderr
    assert finished(tmp_path) == []
