"""The standby with real processes: it becomes a worker, it may die, it is never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

from taskd.agent.zygote import protocol
from tests.integration.run.test_zygote import DEADLINE_S, Trial, script, trial


async def standby_of(it: Trial) -> psutil.Process:
    """The zygote's child that is not a worker yet, after its warm-up."""
    await it.processes.prepare_standby()
    waiting = it.processes._standby
    assert waiting is not None
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(waiting.connection, ready.set)
    await ready.wait()
    loop.remove_reader(waiting.connection)
    return psutil.Process(waiting.process.pid)


def test_standby_becomes_next_worker(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import os, sys
        print(os.getpid(), sys.argv, sys.path[0], __name__, os.environ["RANK"], flush=True)
        sys.exit(7)
        """,
        "--lr",
    )

    async def scenario(it: Trial) -> None:
        waiting = await standby_of(it)
        first = await it.start(RANK="2")
        assert first.pid == waiting.pid
        exited = await it.exited()
        assert (exited.process, exited.exit_code) == (first, 7)
        second = await it.start(RANK="3")
        assert second.pid != waiting.pid
        assert (await it.exited()).exit_code == 7

    made = trial(tmp_path, program, scenario)
    lines = made.out.read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        f"['{program.target}', '--lr'] {tmp_path} __main__ {rank}" for rank in (2, 3)
    ]
    assert made.err.read_text() == ""


def test_second_prepare_keeps_existing_standby(tmp_path: Path) -> None:
    async def scenario(it: Trial) -> None:
        waiting = await standby_of(it)
        assert await standby_of(it) == waiting

    trial(tmp_path, script(tmp_path, ""), scenario)


def test_standby_that_still_warms_up_is_not_used(tmp_path: Path) -> None:
    async def scenario(it: Trial) -> None:
        waiting = await standby_of(it)
        os.kill(waiting.pid, signal.SIGSTOP)
        assert it.processes._standby is not None
        protocol.read(it.processes._standby.connection)  # as if not ready yet
        assert (await it.start()).pid != waiting.pid
        assert (await it.exited()).exit_code == 0
        assert it.processes._standby is not None

    trial(tmp_path, script(tmp_path, ""), scenario)


def test_worker_is_forked_if_standby_has_just_died(tmp_path: Path) -> None:
    """The standby is killed, and the agent has not noticed yet."""

    async def scenario(it: Trial) -> None:
        waiting = await standby_of(it)
        _kill(waiting)
        await it.start()
        exited = await it.exited()
        assert (exited.process.pid != waiting.pid, exited.exit_code) == (True, 0)

    trial(tmp_path, script(tmp_path, ""), scenario)


def test_dead_standby_is_forgotten_and_can_be_prepared_again(tmp_path: Path) -> None:
    async def scenario(it: Trial) -> None:
        worker = await it.start()
        waiting = await standby_of(it)
        _kill(waiting)
        it.processes.kill(worker)
        assert (await it.exited()).process == worker  # reported after the standby
        assert it.processes._standby is None
        assert await standby_of(it) != waiting

    trial(tmp_path, script(tmp_path, "import signal; signal.pause()"), scenario)


def _kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    assert not psutil.wait_procs([process], timeout=DEADLINE_S)[1]


def test_spawned_programs_have_no_standby(tmp_path: Path) -> None:
    async def scenario(it: Trial) -> None:
        await it.processes.prepare_standby()
        assert it.processes._standby is None

    trial(tmp_path, script(tmp_path, ""), scenario, spawn=True)


def test_standby_outlives_its_zygote_and_the_next_zygote_can_have_one(tmp_path: Path) -> None:
    async def scenario(it: Trial) -> None:
        waiting = await standby_of(it)
        os.kill(waiting.ppid(), signal.SIGKILL)
        assert (await it.start()).pid == waiting.pid
        assert await standby_of(it) != waiting
        assert it.exits.empty()

    trial(tmp_path, script(tmp_path, "import signal; signal.pause()"), scenario)


def test_standby_exits_when_worker_processes_are_closed(tmp_path: Path) -> None:
    left: list[psutil.Process] = []

    async def scenario(it: Trial) -> None:
        left.append(await standby_of(it))

    trial(tmp_path, script(tmp_path, ""), scenario)
    assert not psutil.wait_procs(left, timeout=DEADLINE_S)[1]


def test_warm_up_leaves_nothing_behind() -> None:
    """After the warm-up, the script finds torch as if it had just been imported."""
    code = """
        import os, sys
        from contextlib import suppress
        from time import monotonic
        import torch._dynamo, torch.distributed as dist, taskd.torch
        from torch.distributed.distributed_c10d import _world
        from taskd.torch import compat
        from taskd.torch.startup import warmup
        from taskd.worker.profiling import profiler

        def threads():
            for task in os.listdir("/proc/self/task"):
                with suppress(OSError):  # it has ended
                    yield open(f"/proc/self/task/{task}/comm").read()

        def look():
            left = dict(_world.pg_names), dict(_world.pg_map), _world.group_count
            hooks = sys.excepthook, profiler._profiler, {**os.environ}
            return sorted(threads()), left, dist.is_initialized(), hooks

        before = look()
        warmup.run()
        deadline = monotonic() + 10  # ending threads are not gone at once
        while look() != before and monotonic() < deadline:
            os.sched_yield()
        assert look() == before, (before, look())
        assert compat.check_once.cache_info().currsize, "a replacement would check torch again"
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
