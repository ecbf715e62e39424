"""The documented `manager.py` in its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from taskd.bus.endpoint import Bus, BusConfig
from taskd.model.ids import agent, manager
from taskd.model.messages import AgentRegistered

WAIT_S = 30.0

MANAGER = """
import os, sys
from taskd.api import init_taskd_manager, start_taskd_manager
config = {"job_id": "job-1", "node_nums": 1, "proc_per_node": 1, "plugin_dir": "."}
assert init_taskd_manager(config) is True
sys.exit(0 if start_taskd_manager() else 3)
"""

LOOPBACK = "127.0.0.77"
"""An address for this test only, because the port is the documented one."""


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("MINDX_")}
    return subprocess.Popen(
        [sys.executable, "-c", MANAGER],
        cwd=folder,
        env={
            **base,
            "POD_IP": LOOPBACK,
            "TASKD_PROCESS_ENABLE": "off",
            "TASKD_LOG_PATH": "log",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def register() -> bool:
    bus = Bus(BusConfig(me=agent(0), upstream=f"{LOOPBACK}:9601"))
    await bus.start()
    joined = await bus.join(WAIT_S) and bool(await bus.send(manager(), AgentRegistered()))
    await bus.close()
    return joined


def test_manager_serves_while_the_call_blocks(tmp_path: Path) -> None:
    process = start(tmp_path)
    try:
        assert asyncio.run(register())
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, errors
        assert "listening: port=9601" in (tmp_path / "log" / "manager.log").read_text()
    finally:
        process.kill()
        process.communicate()


def test_port_in_use_returns_false_at_once(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 9601)):
        process = start(tmp_path)
        output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 3, errors
    assert "the manager did not start: Mgr:0 cannot listen on 127.0.0.77:9601" in output


@pytest.mark.parametrize("address", ["no host", "203.0.113.1"])
def test_foreign_address_returns_false(tmp_path: Path, address: str) -> None:
    process = start(tmp_path, POD_IP=address)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 3
    assert "the manager did not start" in output
