"""The understudy with real processes: it steps in, it may die, and it is never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

from taskd.agent.zygote import protocol as letters
from tests.integration.run.test_zygote import DEADLINE_S, Trial, script, trial


async def understudy(it: Trial) -> psutil.Process:
    """The one child of the zygote that is no worker yet; it has rehearsed."""
    await it.nursery.prepare()
    waiting = it.nursery._understudy
    assert waiting is not None
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(waiting.pipe, ready.set)
    await ready.wait()
    loop.remove_reader(waiting.pipe)
    return psutil.Process(waiting.process.pid)


def test_it_becomes_the_next_worker(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import os, sys
        print(os.getpid(), sys.argv, sys.path[0], __name__, os.environ["RANK"], flush=True)
        sys.exit(7)
        """,
        "--lr",
    )

    async def story(it: Trial) -> None:
        waiting = await understudy(it)
        first = await it.start(RANK="2")
        assert first.pid == waiting.pid
        death = await it.death()
        assert (death.process, death.exit_code) == (first, 7)
        second = await it.start(RANK="3")
        assert second.pid != waiting.pid
        assert (await it.death()).exit_code == 7

    made = trial(tmp_path, program, story)
    told = made.out.read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in told] == [
        f"['{program.target}', '--lr'] {tmp_path} __main__ {rank}" for rank in (2, 3)
    ]
    assert made.err.read_text() == ""


def test_one_is_enough(tmp_path: Path) -> None:
    async def story(it: Trial) -> None:
        waiting = await understudy(it)
        assert await understudy(it) == waiting

    trial(tmp_path, script(tmp_path, ""), story)


def test_one_that_still_rehearses_is_not_waited_for(tmp_path: Path) -> None:
    async def story(it: Trial) -> None:
        waiting = await understudy(it)
        os.kill(waiting.pid, signal.SIGSTOP)
        assert it.nursery._understudy is not None
        letters.read(it.nursery._understudy.pipe)  # as if it had not said so yet
        assert (await it.start()).pid != waiting.pid
        assert (await it.death()).exit_code == 0
        assert it.nursery._understudy is not None

    trial(tmp_path, script(tmp_path, ""), story)


def test_without_it_workers_are_forked_as_ever(tmp_path: Path) -> None:
    """It is killed, and nobody has noticed yet."""

    async def story(it: Trial) -> None:
        waiting = await understudy(it)
        _kill(waiting)
        await it.start()
        death = await it.death()
        assert (death.process.pid != waiting.pid, death.exit_code) == (True, 0)

    trial(tmp_path, script(tmp_path, ""), story)


def test_one_that_has_died_is_forgotten(tmp_path: Path) -> None:
    async def story(it: Trial) -> None:
        worker = await it.start()
        waiting = await understudy(it)
        _kill(waiting)
        it.nursery.kill(worker)
        assert (await it.death()).process == worker  # told after the other's, by the same zygote
        assert it.nursery._understudy is None
        assert await understudy(it) != waiting

    trial(tmp_path, script(tmp_path, "import signal; signal.pause()"), story)


def _kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    assert not psutil.wait_procs([process], timeout=DEADLINE_S)[1]


def test_programs_that_are_not_forked_have_none(tmp_path: Path) -> None:
    async def story(it: Trial) -> None:
        await it.nursery.prepare()
        assert it.nursery._understudy is None

    trial(tmp_path, script(tmp_path, ""), story, spawn=True)


def test_it_goes_with_the_zygote_and_a_new_one_comes(tmp_path: Path) -> None:
    async def story(it: Trial) -> None:
        worker = await it.start()
        waiting = await understudy(it)
        os.kill(waiting.ppid(), signal.SIGKILL)
        assert (await it.death()).process == worker
        again = await it.start()
        assert again.pid != waiting.pid
        assert await understudy(it) != waiting

    trial(tmp_path, script(tmp_path, "import signal; signal.pause()"), story)


def test_it_does_not_outlive_the_nursery(tmp_path: Path) -> None:
    left: list[psutil.Process] = []

    async def story(it: Trial) -> None:
        left.append(await understudy(it))

    trial(tmp_path, script(tmp_path, ""), story)
    assert not psutil.wait_procs(left, timeout=DEADLINE_S)[1]


def test_a_rehearsal_leaves_nothing_behind() -> None:
    """The script that comes after it finds torch as if it had just been imported."""
    code = """
        import os, sys
        import torch._dynamo, torch.distributed as dist, taskd.torch
        from torch.distributed.distributed_c10d import _world
        from taskd.torch import rehearsal
        from taskd.worker.profiling import profiler

        def look():
            names = [f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task")]
            threads = sorted(open(name).read() for name in names)
            left = dict(_world.pg_names), dict(_world.pg_map), _world.group_count
            told = sys.excepthook, profiler._profiler, {**os.environ}
            return threads, left, dist.is_initialized(), told

        before = look()
        rehearsal.run()
        assert look() == before, (before, look())
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
