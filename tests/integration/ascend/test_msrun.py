"""MindSpore's agent with callbacks like msrun's, a real manager, and workers that are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from taskd.bus.endpoint import Bus, BusConfig
from taskd.model import ids
from taskd.model import messages as m
from taskd.runtime.address import free_port
from taskd.runtime.loop_thread import LoopThread

DEADLINE_S = 60.0

MSRUN = """
    import os, subprocess, sys, threading

    from taskd.api.taskd_agent_api import init_taskd_agent, register_func, start_taskd_agent
    from taskd.api.taskd_proxy_api import init_taskd_proxy

    size = int(os.environ["MS_LOCAL_WORKER"])
    processes, starts = [None] * size, [0] * size

    def start_list(ranks):
        print("start", sorted(ranks), flush=True)
        for rank in ranks:
            env = {**os.environ, "RANK_ID": str(rank), "INCARNATION": str(starts[rank])}
            processes[rank] = subprocess.Popen([sys.executable, sys.argv[1]], env=env)
            starts[rank] += 1

    def start_all():
        start_list(range(size))
        return 0

    def monitor(ranks):
        def one(rank):
            process = processes[rank]
            if process is None:
                return {"pid": None, "status": 200, "global_rank": rank}
            return {"pid": process.pid, "status": process.poll(), "global_rank": rank}
        return {rank: one(rank) for rank in range(size)}

    def kill(pids):
        named = [rank for rank, process in enumerate(processes) if process and process.pid in pids]
        os.write(2, f"kill {'all' if -1 in pids else named}\\n".encode())  # others write, too
        for process in processes:
            if process is not None and (-1 in pids or process.pid in pids):
                process.kill()
                process.wait()
        return 0

    manager, proxy = sys.argv[2:4]
    joined = threading.Thread(target=init_taskd_proxy, daemon=True, args=[
        {"UpstreamPort": manager, "ListenPort": proxy, "ServerRank": "0"}])
    joined.start()
    joined.join(30)
    assert init_taskd_agent(
        {"Framework": "MindSpore", "UpstreamAddr": "127.0.0.1", "UpstreamPort": proxy})
    for name, func in (("KILL_WORKER", kill), ("START_ALL_WORKER", start_all),
                       ("START_WORKER_LIST", start_list), ("MONITOR", monitor)):
        assert register_func(name, func)
    start_taskd_agent()
"""


@contextmanager
def manager(folder: Path) -> Iterator[str]:
    port = str(free_port())
    arguments = ["--nodes=1", "--procs-per-node=2", f"--listen=127.0.0.1:{port}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "taskd.manager", *arguments, f"--state-dir={folder / 'state'}"]
    )
    try:
        yield port
        process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()


def msrun(folder: Path, worker: str, port: str) -> subprocess.CompletedProcess[str]:
    (folder / "msrun.py").write_text(textwrap.dedent(MSRUN))
    (folder / "worker.py").write_text(textwrap.dedent(worker))
    env = {**os.environ, "MS_NODE_RANK": "0", "MS_LOCAL_WORKER": "2", "MS_WORKER_NUM": "2"}
    env |= {"TASKD_LOG_PATH": str(folder / "log"), "TASKD_LOG_STDOUT": "0"}
    env["TASKD_AGENT_SETTLE_ALL_S"] = "2"  # Longer than the monitor interval.
    env["TASKD_AGENT_SETTLE_SOME_S"] = "1.5"
    arguments = [str(folder / "msrun.py"), str(folder / "worker.py"), port, str(free_port())]
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_healthy_job_exits_with_0(tmp_path: Path) -> None:
    with manager(tmp_path) as port:
        done = msrun(tmp_path, "pass", port)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["start [0, 1]"]


def test_killed_worker_restarts_the_job(tmp_path: Path) -> None:
    worker = """
        import os, signal
        if os.environ["INCARNATION"] == "0":
            if os.environ["RANK_ID"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
    """
    with manager(tmp_path) as port:
        done = msrun(tmp_path, worker, port)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["start [0, 1]", "start [0, 1]"]
    (incident,) = json.loads((tmp_path / "state/summary.json").read_text())["incidents"]
    assert [fault["rank"] for fault in incident["faults"]] == [1]


def test_one_worker_is_restarted_while_the_other_continues(tmp_path: Path) -> None:
    worker = f"""
        import os, signal
        fifo = {str(tmp_path / "again")!r}
        rank, incarnation = os.environ["RANK_ID"], os.environ["INCARNATION"]
        if rank == "0":
            open(fifo).read()
            print("rank 0 incarnation", incarnation, flush=True)
        elif incarnation == "0":
            signal.pause()
        else:
            open(fifo, "w").close()
    """
    os.mkfifo(tmp_path / "again")
    thread, port = LoopThread("manager"), free_port()
    bus = Bus(BusConfig(me=ids.manager(), listen=f"127.0.0.1:{port}"))

    async def manage() -> None:
        """Restart only the faulty process, as Ascend's manager does."""
        up = 0
        while True:
            received = await bus.receive()
            if isinstance(received.body, m.RestartsLeft):
                await bus.send(ids.agent(0), m.StartWorkers(received.body.remaining))
            elif isinstance(received.body, m.KeptAlive):
                up += 1
                if up == 2:  # The agent monitors its workers.
                    await bus.send(ids.agent(0), m.RestartWorkers((ids.Rank(1),)))

    thread.run(bus.start()).result(DEADLINE_S)
    managing = thread.run(manage())
    try:
        done = msrun(tmp_path, worker, str(port))
    finally:
        managing.cancel()
        thread.run(bus.close()).result(DEADLINE_S)
        thread.stop()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["start [0, 1]", "start [1]", "rank 0 incarnation 0"]
    kills = [line for line in done.stderr.splitlines() if line.startswith("kill")]
    assert kills == ["kill [1]", "kill all"], "the last one is the end of the job"


def test_job_that_always_fails_exits_with_1(tmp_path: Path) -> None:
    with manager(tmp_path) as port:
        done = msrun(tmp_path, "raise SystemExit(3)", port)
    assert done.returncode == 1, done.stderr


@pytest.mark.parametrize("size", ["", "two"])
def test_missing_msrun_variables_are_reported(tmp_path: Path, size: str) -> None:
    code = (
        "from taskd.api import *\n"
        "assert init_taskd_agent({'Framework': 'MindSpore'})\n"
        "for n in 'KILL_WORKER START_ALL_WORKER START_WORKER_LIST MONITOR'.split():\n"
        "    register_func(n, print)\n"
        "start_taskd_agent()\n"
    )
    env = {**os.environ, "MS_LOCAL_WORKER": size, "TASKD_LOG_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "MS_LOCAL_WORKER to numbers" in done.stderr


def test_agent_without_a_manager_exits_with_the_reason(tmp_path: Path) -> None:
    code = (
        "from taskd.agent.seams.hosted_agent import AgentConfig\n"
        "from taskd.agent.seams.msrun import MsAgent\n"
        f"config = AgentConfig(upstream='127.0.0.1:{free_port()}', join_timeout_s=1.0)\n"
        "agent = MsAgent(config)\n"
        "for n in 'KILL_WORKER START_ALL_WORKER START_WORKER_LIST MONITOR'.split():\n"
        "    agent.register_callbacks(n, print)\n"
        "agent.start()\n"
    )
    env = {**os.environ, "MS_NODE_RANK": "0", "MS_LOCAL_WORKER": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ValueError: no manager answered within 1 s" in done.stderr
