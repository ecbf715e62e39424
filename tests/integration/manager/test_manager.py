"""The manager as a separate process: its port, its files, Ascend's agents."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from taskd.bus.endpoint import Bus, BusConfig
from taskd.model import messages as m
from taskd.model.ids import Rank, agent, manager
from tests.integration.ascend.recover_server import Running

PATIENCE_S = 60.0


async def start(folder: Path, *words: str) -> tuple[Process, int]:
    """The process, and its port once it listens."""
    read, write = os.pipe()
    command = ["-m", "taskd.manager", "--ready-fd", str(write), "--state-dir", str(folder)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--listen", "127.0.0.1:0", *words, pass_fds=(write,)
    )
    os.close(write)
    ready = json.loads(await asyncio.to_thread(_read_all, read))
    assert ready["pid"] == process.pid
    return process, ready["port"]


def _read_all(descriptor: int) -> str:
    with os.fdopen(descriptor) as line:
        return line.read()


@asynccontextmanager
async def managing(folder: Path, *words: str) -> AsyncIterator[int]:
    process, port = await start(folder, *words)
    try:
        yield port
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            await process.wait()


class AscendAgent:
    """Sends and receives only the messages of Ascend's agents."""

    def __init__(self, port: int, node: int = 0) -> None:
        self.bus = Bus(BusConfig(me=agent(node), upstream=f"127.0.0.1:{port}", job="job"))

    async def join(self, remaining: int) -> None:
        await self.bus.start()
        assert await self.bus.join(PATIENCE_S)
        await self.bus.send(manager(), m.AgentRegistered())
        await self.bus.send(manager(), m.RestartsLeft(remaining))

    async def hears(self) -> m.Body:
        async with asyncio.timeout(PATIENCE_S):
            return (await self.bus.receive()).body


def test_ascend_agents_start_restart_and_exit(tmp_path: Path) -> None:
    async def play() -> None:
        async with managing(tmp_path, "--strategies", "recover-in-place") as port:
            peer = AscendAgent(port)
            await peer.join(2)
            assert await peer.hears() == m.StartWorkers(2)
            for left in (1, 0):
                await peer.bus.send(manager(), m.RanksFailed((Rank(0),), 1735689600))
                assert await peer.hears() == m.RestartAgent(left)
            await peer.bus.send(manager(), m.RanksFailed((Rank(0),), 1735689600))
            assert await peer.hears() == m.ExitAgent()
            await peer.bus.close()

    asyncio.run(play())


def test_manager_works_with_ascends_clusterd(tmp_path: Path) -> None:
    """It implements neither progress reports nor declarations."""
    server, asked = Running(), queue.Queue[str]()
    server.on_unknown(asked.put)

    async def play() -> None:
        async with managing(tmp_path, "--clusterd", server.address, "--job-id", "job") as port:
            peer = AscendAgent(port)
            await peer.join(2)
            while not (await asyncio.to_thread(asked.get, timeout=PATIENCE_S)).endswith("Progress"):
                pass
            for left in (2, 1, 1):  # the reply comes before the last of these
                assert await peer.bus.send(manager(), m.RestartsLeft(left))
            await peer.bus.send(manager(), m.RanksFailed((Rank(0),), 1735689600))
            await asyncio.to_thread(server.clusterd.next_call, "ReportProcessFault")
            await peer.bus.close()

    try:
        asyncio.run(play())
    finally:
        server.stop()


def test_used_port_is_an_error_and_the_manager_exits(tmp_path: Path) -> None:
    async def play() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "taskd.manager", "--listen", address),
                stderr=asyncio.subprocess.PIPE,
            )
            async with asyncio.timeout(PATIENCE_S):
                _, stderr = await process.communicate()
        assert process.returncode == 1
        assert f"cannot listen on {address}" in stderr.decode()

    asyncio.run(play())


def test_invalid_settings_are_reported_at_once() -> None:
    async def play() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "taskd.manager", "--nodes", "0"),
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(PATIENCE_S):
            _, stderr = await process.communicate()
        assert process.returncode == 1
        assert "nodes must be at least 1" in stderr.decode()

    asyncio.run(play())


def test_embedded_clusterd_of_a_restarted_manager_keeps_its_port(tmp_path: Path) -> None:
    async def play() -> None:
        ports = []
        for _ in range(2):
            process, _ = await start(tmp_path)
            ports.append(_clusterd_port(tmp_path))
            process.kill()
            await process.wait()
        assert ports[0] == ports[1]

    asyncio.run(play())


def test_manager_does_not_import_torch_and_needs_little_memory(tmp_path: Path) -> None:
    bare = "import asyncio, grpc.aio, resource; print(resource.getrusage(0).ru_maxrss)"

    async def play() -> None:
        process, port = await start(tmp_path, "--clusterd", "127.0.0.1:9")
        peer = AscendAgent(port)
        await peer.join(1)
        await peer.hears()
        await peer.bus.close()
        assert "torch" not in _proc(process.pid, "maps")
        peak_kib = int(_proc(process.pid, "status").split("VmHWM:")[1].split()[0])
        process.terminate()
        assert await process.wait() == 0
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", bare, stdout=asyncio.subprocess.PIPE
        )
        floor_kib = int((await process.communicate())[0])
        assert peak_kib - floor_kib < 60 * 1024

    asyncio.run(play())


def _proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def _clusterd_port(folder: Path) -> int:
    port: int = json.loads((folder / "clusterd.json").read_text())["port"]
    return port
