"""The documented agent for PyTorch: torch's own agent, registered callbacks, a real manager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.integration.ascend.test_msrun import DEADLINE_S, manager

PROGRAM = """
    import sys

    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from taskd.api import init_taskd_agent, register_func, start_taskd_agent

    port, worker = sys.argv[1:]
    rendezvous = RendezvousParameters("c10d", "localhost:0", "documented", 1, 1)
    spec = WorkerSpec(
        role="default",
        local_world_size=2,
        entrypoint=sys.executable,
        args=("-u", worker),
        rdzv_handler=get_rendezvous_handler(rendezvous),
        max_restarts=3,
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs())

    def logged(name, function):
        def call(group):
            if name != "MONITOR":
                print(name, sorted(w.global_rank for w in group.workers), flush=True)
            return function(group)
        return call

    upstream = {"UpstreamAddr": "127.0.0.1", "UpstreamPort": port}
    assert init_taskd_agent({"Framework": "PyTorch", **upstream}, agent)
    for name, function in {
        "KILL_WORKER": agent._stop_workers,
        "START_ALL_WORKER": agent._initialize_workers,
        "RESTART": agent._restart_workers,
        "MONITOR": agent._monitor_workers,
    }.items():
        assert register_func(name, logged(name, function))
    print("finished:", start_taskd_agent().state.name, flush=True)
"""
FAILS_ONCE = """
    import os, pathlib, signal

    rank = os.environ["RANK"]
    starts = pathlib.Path(f"starts{rank}")
    starts.open("a").write("x")
    if starts.read_text() == "x":
        if rank == "1":
            open("started").read()
            os.kill(os.getpid(), signal.SIGKILL)
        open("started", "w").close()
        signal.pause()
"""


def documented(folder: Path, worker: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    (folder / "worker.py").write_text(textwrap.dedent(worker))
    env = {**os.environ, "RANK": "0", "TASKD_LOG_PATH": str(folder / "log")}
    env["TASKD_LOG_STDOUT"] = "0"
    with manager(folder) as port:
        return subprocess.run(
            [sys.executable, "program.py", port, "worker.py"],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )


def test_killed_worker_is_recovered_by_the_registered_callbacks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    done = documented(tmp_path, FAILS_ONCE)
    assert done.returncode == 0, done.stdout + done.stderr
    # Torch assigns ranks at the first start, and kills the other workers when one dies.
    first, again = "START_ALL_WORKER [-1, -1]", "START_ALL_WORKER [0, 1]"
    assert done.stdout.splitlines() == [first, again, "finished: SUCCEEDED"]
    assert [(tmp_path / f"starts{rank}").read_text() for rank in "01"] == ["xx", "xx"]
    incidents = json.loads((tmp_path / "state/summary.json").read_text())["incidents"]
    assert 1 in [fault["rank"] for each in incidents for fault in each["faults"]]


def test_workers_may_finish_one_after_another(tmp_path: Path) -> None:
    """Torch reports nothing about the first worker until the last one has ended."""
    os.mkfifo(tmp_path / "started")
    os.mkfifo(tmp_path / "watched")
    worker = """
        import os, select
        if os.environ["RANK"] == "0":
            open("pid", "w").write(str(os.getpid()))
            open("started", "w").close()
            open("watched").read()
        else:
            open("started").read()
            pidfd = os.pidfd_open(int(open("pid").read()))
            open("watched", "w").close()
            select.select([pidfd], [], [])
            print("last", flush=True)
    """
    done = documented(tmp_path, worker)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines == ["START_ALL_WORKER [-1, -1]", "last", "finished: SUCCEEDED"]


def test_job_that_always_fails_exits_with_1(tmp_path: Path) -> None:
    done = documented(tmp_path, "raise SystemExit(3)")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "finished:" not in done.stdout
