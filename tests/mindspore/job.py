"""A MindSpore job of two ranks under MindSpore's `msrun`, in its own network and session.

The tests run in the project's environment; the job runs in `.venvs/mindspore`, which has no torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests import ROOT
from tests.integration.ascend.documented_venv import alone

HERE = Path(__file__).parent
VENV = ROOT / ".venvs/mindspore"
DEADLINE_S = 150.0

MANAGER = """
    from taskd.api import init_taskd_manager, start_taskd_manager
    import os

    job_id=os.getenv("MINDX_TASK_ID")
    node_nums=int(os.getenv("NODES"))   # Total number of nodes (set by yourself)
    proc_per_node=2//node_nums          # Number of training processes on each node

    init_taskd_manager({"job_id":job_id, "node_nums": node_nums, "proc_per_node": proc_per_node})
    start_taskd_manager()
"""

TRAIN_START = """
    # MindSpore
    if [[ "${MS_SCHED_HOST}" == "${POD_IP}" ]]; then
        python manager.py &   # Determined by the current path.
    fi
    export MS_ENABLE_TFT='{RSC:1}'
    $MSRUN --worker_num=2 --local_worker_num=2 --master_port=8118 --join=True --log_dir=log \\
        $TRAIN . &
    msrun=$!
    echo $msrun > msrun.pid
    wait $msrun
    code=$?
    wait
    exit $code
"""

TWO_NODES = """
    python manager.py &
    export MS_ENABLE_TFT='{RSC:1}' MS_WORKER_NUM=2 MS_LOCAL_WORKER=1
    for node in 1 0; do
        MS_NODE_RANK=$node msrun --worker_num=2 --local_worker_num=1 --node_rank=$node \\
            --master_addr=127.0.0.1 --master_port=8118 --join=True --log_dir=log$node $TRAIN . &
        msruns="$msruns $!"
    done
    code=0
    for msrun in $msruns; do
        wait $msrun || code=$?
    done
    wait
    exit $code
"""
"""The same job on two nodes, which are one machine here; the second uses another proxy port."""

Action = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    output: str
    left: list[str]
    """The command lines of processes that are still running after the job."""

    @property
    def starts(self) -> int:
        return self.output.count("Start worker process")

    @property
    def log(self) -> str:
        """For a failed assertion: TaskD's log lines, and the end of the output."""
        taskd = [line for line in self.output.splitlines() if ".py:" in line]
        return "\n".join([*taskd, self.output[-3000:]])


def run(
    folder: Path,
    *,
    manager: bool = True,
    nodes: int = 1,
    on: Mapping[str, Action] | None = None,
    **env: str,
) -> Done:
    """Run the job to its end. An action of `on` runs when its text first appears in the output."""
    (folder / "manager.py").write_text(textwrap.dedent(MANAGER))
    start = TRAIN_START if nodes == 1 else TWO_NODES
    (folder / "train_start.sh").write_text(textwrap.dedent(start))
    mark = f"TASKD_TEST_MARK={folder}"
    settings = {
        "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}",
        "TASKD_LOG_PATH": str(folder / "taskd_log"),
        "TASKD_TEST_MARK": str(folder),
        "TRAIN": str(HERE / "train.py"),
        "MSRUN": "msrun",
        "MINDX_TASK_ID": "ms",
        "NODES": str(nodes),
        "POD_IP": "127.0.0.1",
        "MS_SCHED_HOST": "127.0.0.1" if manager else "127.0.0.2",
    }
    job = subprocess.Popen(
        alone(["bash", "train_start.sh"]),
        cwd=folder,
        env={**os.environ, **settings, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Timer(DEADLINE_S, _end, (mark,))
    late.start()
    try:
        with job:
            output = _follow(job, dict(on or {}))
    finally:
        late.cancel()
        left = _end(mark)
    return Done(job.returncode, output, left)


def _follow(job: subprocess.Popen[str], on: dict[str, Action]) -> str:
    lines = []
    assert job.stdout is not None
    for line in job.stdout:
        lines.append(line)
        for text in [text for text in on if text in line]:
            on.pop(text)()
    return "".join(lines)


def _end(mark: str) -> list[str]:
    """Kill all processes with the mark in their environment; returns their command lines."""
    ended = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            marked = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if mark.encode() in marked:
                ended.append(" ".join(process.cmdline()))
                process.kill()
    return ended


def steps(folder: Path) -> dict[int, list[int]]:
    """The steps that each rank has done, in order."""
    texts = [(folder / f"steps-{rank}.txt").read_text() for rank in range(2)]
    return {
        rank: [int(line.split()[0]) for line in text.splitlines()]
        for rank, text in enumerate(texts)
    }


def weights(folder: Path) -> set[str]:
    """The final weights of the ranks."""
    texts = [(folder / f"steps-{rank}.txt").read_text() for rank in range(2)]
    return {text.splitlines()[-1].split(" ", 2)[2] for text in texts}


def incidents(folder: Path) -> list[str]:
    """The faults in the manager's log."""
    text = (folder / "taskd_log/manager.log").read_text()
    lines = (line.partition("-> Reported: ")[2] for line in text.splitlines())
    return [line for line in lines if line]


def write(path: Path, content: Mapping[str, object]) -> None:
    """Write atomically: a reader never sees half of the file."""
    fresh = path.with_suffix(".fresh")
    fresh.write_text(json.dumps(content))
    fresh.replace(path)


def interrupt(folder: Path) -> None:
    os.kill(int((folder / "msrun.pid").read_text()), signal.SIGTERM)
