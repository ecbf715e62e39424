"""The documented installation: the `sed` line, `manager.py` and `train_start.sh`, verbatim."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.integration.ascend import documented_venv
from tests.integration.run.run_job import TRAIN, script

DEADLINE_S = 120.0

SED = (
    "sed -i '/import os/i import taskd.python.adaptor.patch' "
    "$(pip3 show torch | grep Location | awk -F ' ' '{print $2}')/torch/distributed/run.py"
)

MANAGER = """
    from taskd.api import init_taskd_manager, start_taskd_manager
    import os

    job_id=os.getenv("MINDX_TASK_ID")
    node_nums=1         # Total number of nodes (set by yourself)
    proc_per_node=2     # Number of training processes on each node (set by yourself)

    init_taskd_manager({"job_id":job_id, "node_nums": node_nums, "proc_per_node": proc_per_node})
    start_taskd_manager()
"""

TRAIN_START = """
    TASKD_SO_PATH="$(pip show taskd | awk '/^Location: / {print $2"/taskd/python/cython_api/libs/libtaskd.so"}')"
    export LD_PRELOAD=$TASKD_SO_PATH:$LD_PRELOAD
    export TASKD_PROCESS_ENABLE="on"
    # PyTorch
    if [[ "${RANK}" == 0 ]]; then
       export MASTER_ADDR=${POD_IP}
        python manager.py &           # Determined by the current path.
    fi
    # MindSpore
    if [[ "${MS_SCHED_HOST}" == "${POD_IP}" ]]; then
        python manager.py &   # Determined by the current path.
    fi
    GPUS_PER_NODE=2; NNODES=1; NODE_RANK=$RANK; MASTER_PORT=29400
    DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT --max_restarts 32767"
    torchrun $DISTRIBUTED_ARGS train.py
    code=$?
    wait
    exit $code
"""  # noqa: E501 - as documented


EXIT = """
    sys.stdout.flush()
    os._exit(0)
"""
"""torch by itself sometimes aborts while the interpreter shuts down, also in a plain script."""


@pytest.fixture(scope="module")
def job_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documented")
    binaries = documented_venv.make(folder)
    subprocess.run(SED, shell=True, check=True, env=_env(binaries))
    (folder / "manager.py").write_text(textwrap.dedent(MANAGER))
    (folder / "train_start.sh").write_text(textwrap.dedent(TRAIN_START))
    script(folder, TRAIN + EXIT)
    return folder


def _env(binaries: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    return {**kept, "PATH": f"{binaries}:{os.environ['PATH']}", **more}


def _start(job_folder: Path, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    command = documented_venv.alone(command)
    job = subprocess.Popen(
        command,
        cwd=job_folder,
        env=_env(job_folder / "venv/bin", TASKD_LOG_PATH=str(job_folder / "log"), **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = job.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        out, err = job.communicate()
    return subprocess.CompletedProcess(command, job.returncode, out, err)


def test_sed_edits_only_the_copy_of_torch(job_folder: Path) -> None:
    line = "import taskd.python.adaptor.patch"
    (edited,) = job_folder.glob("venv/lib/*/site-packages/torch/distributed/run.py")
    assert line in edited.read_text()
    assert line not in (documented_venv.SITE / "torch/distributed/run.py").read_text()


@pytest.mark.parametrize(("die", "token"), [("", ""), ("1.0.1", "s3cret")])
def test_documented_job_trains_and_recovers(job_folder: Path, die: str, token: str) -> None:
    env = {"RANK": "0", "POD_IP": "127.0.0.1", "MINDX_TASK_ID": "documented", "DIE": die}
    if token:
        env["TASKD_TOKEN"] = token
    done = _start(job_folder, ["bash", "train_start.sh"], **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"attempt {1 if die else 0}" in done.stdout
    assert "ld.so" not in done.stderr


def test_line_of_the_retired_package_does_the_same(job_folder: Path) -> None:
    (edited,) = job_folder.glob("venv/lib/*/site-packages/torch/distributed/run.py")
    text, line = edited.read_text(), SED.replace("taskd.python.adaptor.patch", "mindx_elastic.api")
    edited.write_text((documented_venv.SITE / "torch/distributed/run.py").read_text())
    try:
        subprocess.run(line, shell=True, check=True, env=_env(job_folder / "venv/bin"))
        assert "import mindx_elastic.api" in edited.read_text()
        assert "taskd" not in edited.read_text()
        env = {"RANK": "0", "POD_IP": "127.0.0.1", "MINDX_TASK_ID": "retired", "DIE": "1.0.1"}
        done = _start(job_folder, ["bash", "train_start.sh"], **env)
    finally:
        edited.write_text(text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attempt 1" in done.stdout


def test_torchrun_without_a_manager_uses_torchs_agent(job_folder: Path) -> None:
    command = ["torchrun", "--nproc_per_node=2", "--master_port=29400", "train.py"]
    done = _start(job_folder, command)
    assert done.returncode == 0, done.stderr
    assert "attempt 0" in done.stdout
    assert "torch's own agent runs this job" in done.stdout + done.stderr


def test_torchrun_uses_torchs_agent_if_taskd_is_switched_off(job_folder: Path) -> None:
    command = ["torchrun", "--standalone", "--nproc_per_node=2", "train.py"]
    done = _start(job_folder, command, TASKD_PROCESS_ENABLE="off")
    assert done.returncode == 0, done.stderr
    assert "TASKD_PROCESS_ENABLE is off" in done.stdout + done.stderr


def test_torch_reports_a_failing_job(job_folder: Path) -> None:
    (job_folder / "train.py").rename(job_folder / "good.py")
    script(job_folder, "raise ValueError('no data')")
    try:
        env = {"RANK": "0", "POD_IP": "127.0.0.1", "MINDX_TASK_ID": "documented"}
        done = _start(job_folder, ["bash", "train_start.sh"], **env)
    finally:
        (job_folder / "good.py").rename(job_folder / "train.py")
    assert done.returncode == 1
    assert "train.py FAILED" in done.stderr
    assert "ValueError: no data" in done.stderr
