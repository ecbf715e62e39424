"""The documented worker functions in real processes on a real bus, in any order and repeatedly."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from taskd.bus.endpoint import Bus
from taskd.model import messages as m
from taskd.model.ids import manager, worker
from tests.integration.bus.bus_nodes import proxy, running_bus, until_delivered

TRAIN = """
    import signal, sys, threading
    import torch
    from taskd.api import init_taskd_worker, start_taskd_worker, destroy_taskd_worker

    def handler(signum, frame):
        print("handled", flush=True)
    signal.signal(signal.SIGTERM, handler)
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    assert destroy_taskd_worker() is False and start_taskd_worker() is False
    for _ in range(2):
        assert init_taskd_worker(5, 20) is True
    for _ in range(3):
        assert start_taskd_worker() is True
    assert before == {number: signal.getsignal(number) for number in signal.valid_signals()}

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
    while not over.wait(0.002):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    for _ in range(2):
        assert destroy_taskd_worker() is True
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert start_taskd_worker() is True and destroy_taskd_worker() is True
    print("trained", flush=True)
"""

STARTED_S = 60.0
"""Enough for a process that imports torch on a busy machine."""


@asynccontextmanager
async def running(
    tmp_path: Path, text: str, proxy_port: int, within: Sequence[str] = (), **env: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(text))
    process = await asyncio.create_subprocess_exec(
        *within,
        sys.executable,
        str(script),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "RANK": "5",
            "LOCAL_WORLD_SIZE": "4",
            "MINDX_TASK_ID": "the-job",
            "TASKD_PROXY": f"127.0.0.1:{proxy_port}",
            "TASKD_PROFILING_DIR": str(tmp_path / "profiling"),
            **env,
        },
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def answer_of(top: Bus, wanted: m.Body) -> None:
    async with asyncio.timeout(STARTED_S):
        while (await top.receive()).body != wanted:
            pass


def test_worker_registers_is_switched_and_leaves(tmp_path: Path) -> None:
    asyncio.run(switched(tmp_path))


async def switched(tmp_path: Path) -> None:
    async with (
        running_bus(manager(), None, serves=True, job="the-job") as top,
        running_bus(proxy(1), top, serves=True, job="the-job") as relay,
        running(tmp_path, TRAIN, relay.port) as process,
    ):
        async with asyncio.timeout(STARTED_S):
            hello = await top.receive()
        assert (hello.src, hello.body) == (worker(1, 5), m.WorkerRegistered())
        order = m.SetProfiling(True, True)
        await until_delivered(lambda: top.send(worker(1, 5), order))
        await answer_of(top, m.ProfilingSet(1, 1))
        await until_delivered(lambda: top.send(worker(1, 5), order))
        await answer_of(top, m.ProfilingSet(1, 1))  # A repeated order is answered again.
        await until_delivered(lambda: top.send(worker(1, 5), m.SetProfiling(False, False)))
        await answer_of(top, m.ProfilingSet(0, 0))
        assert process.stdin is not None
        process.stdin.write(b"\n")
        out, _ = await asyncio.wait_for(process.communicate(), STARTED_S)
        assert (out.decode(), process.returncode) == ("trained\n", 0)
    (file,) = (tmp_path / "profiling/the-job/5").iterdir()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["Name"].split()[0] for line in records} == {"forward", "step"}
    assert all(line["MsptiObjectId"]["Pt"]["ProcessId"] == process.pid for line in records)


def test_training_continues_without_a_manager(tmp_path: Path) -> None:
    """No process listens on the proxy's port, and the records cannot be written."""
    (tmp_path / "profiling").symlink_to(tmp_path)
    asyncio.run(alone(tmp_path))


REQUEST = """
    from taskd.worker.profiling import profiler
    from taskd.model.profiling import EVERYTHING
    profiler.of_process().request(EVERYTHING)
"""


async def alone(tmp_path: Path) -> None:
    text = TRAIN.replace("    over = threading", f"{REQUEST}\n    over = threading")
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        async with running(tmp_path, text, reserved.getsockname()[1]) as process:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            out, _ = await asyncio.wait_for(process.communicate(), STARTED_S)
    assert process.returncode == 0
    assert out.decode().endswith("trained\n")
    assert "profiling is a symbolic link" in out.decode()


MOUNTED = {
    "No space left": "mount -t tmpfs -o size=8k tmpfs",
    "Read-only file system": "mount -t tmpfs -o ro tmpfs",
    "symbolic link": "ln -s /",
}


@pytest.mark.parametrize("reason", MOUNTED)
def test_unwritable_directory_is_answered_with_2(tmp_path: Path, reason: str) -> None:
    """Training continues."""
    unshared = ["unshare", "--mount", "--propagation", "private"]
    if subprocess.run([*unshared, "mount", "-t", "tmpfs", "x", "/mnt"]).returncode:
        pytest.skip("needs permission to mount")
    target = tmp_path / "profiling"
    if not reason.startswith("symbolic"):
        target.mkdir()
    within = [*unshared, "sh", "-c", f'{MOUNTED[reason]} {target} && exec "$@"', "sh"]
    asyncio.run(not_written(tmp_path, within, reason))


async def not_written(tmp_path: Path, within: list[str], reason: str) -> None:
    async with (
        running_bus(manager(), None, serves=True, job="the-job") as top,
        running_bus(proxy(1), top, serves=True, job="the-job") as relay,
        running(tmp_path, TRAIN, relay.port, within) as process,
    ):
        await answer_of(top, m.WorkerRegistered())
        await until_delivered(lambda: top.send(worker(1, 5), m.SetProfiling(True, True)))
        await answer_of(top, m.ProfilingSet(2, 2))
        await until_delivered(lambda: top.send(worker(1, 5), m.SetProfiling(False, False)))
        await answer_of(top, m.ProfilingSet(0, 0))
        assert process.stdin is not None
        process.stdin.write(b"\n")
        out, _ = await asyncio.wait_for(process.communicate(), STARTED_S)
    assert process.returncode == 0
    assert out.decode().endswith("trained\n")
    assert reason in out.decode()


def test_switch_file_is_used_until_a_manager_is_connected(tmp_path: Path) -> None:
    (tmp_path / "switch").write_text('{"Step": "on"}')
    asyncio.run(first_alone(tmp_path))


async def first_alone(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    env = {"TASKD_PROFILING_SWITCH": str(tmp_path / "switch")}
    async with running(tmp_path, TRAIN, port, **env) as process:
        folder = tmp_path / "profiling/the-job/5"
        async with asyncio.timeout(STARTED_S):
            while not any(file.stat().st_size for file in folder.glob("*")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # Polls: a file of another process sends no event.
        async with (
            running_bus(manager(), None, serves=True, job="the-job") as top,
            running_bus(proxy(1), top, serves=True, job="the-job", listen=f"127.0.0.1:{port}"),
        ):
            await answer_of(top, m.ProfilingSet(1, 0))
            await until_delivered(lambda: top.send(worker(1, 5), m.SetProfiling(False, False)))
            await answer_of(top, m.ProfilingSet(0, 0))
            (tmp_path / "switch").write_text('{"Step": "on", "FP": "on"}')  # No longer read.
            assert process.stdin is not None
            process.stdin.write(b"\n")
            out, _ = await asyncio.wait_for(process.communicate(), STARTED_S)
    assert process.returncode == 0
    assert "requests to record: Step\n" in out.decode()
    assert out.decode().endswith("trained\n")
    records = "".join(file.read_text() for file in folder.iterdir())
    assert '"step ' in records
    assert "forward" not in records
