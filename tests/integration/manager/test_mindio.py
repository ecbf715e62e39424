"""With `mindio_ttp` installed, its controller repairs ranks and the manager relays messages."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from taskd.model import messages as m
from taskd.model.ids import Rank
from tests.integration.manager.test_manager import PATIENCE_S, AscendAgent

CONTROLLER = '''
"""Stands in for Huawei's package: writes every call down, and answers as it would."""
import json, os, threading
_callbacks = {}
def _note(name, *arguments):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([name, *arguments]) + "\\n")
def _answer(name, *arguments):
    threading.Thread(target=_callbacks[name], args=arguments).start()
def tft_register_mindx_callback(action, func):
    _callbacks[action] = func
    return 0
def tft_init_controller(*arguments): _note("init", *arguments)
def tft_start_controller(*arguments):
    _note("start", *arguments)
    threading.Thread(target=_fault).start()
def _fault():
    with open(os.environ["GATE"]) as gate:
        gate.read()
    _callbacks["report_fault_ranks"]({1: 1}, {1: "heartbeat lost"})
def tft_destroy_controller(): _note("destroy")
def tft_query_high_availability_switch(): return True
def tft_notify_controller_dump(): _note("dump")
def tft_notify_controller_stop_train(*arguments):
    _note("stop_train", *arguments)
    _answer("report_stop_complete", 0, "stopped", arguments[0])
def tft_notify_controller_on_global_rank(*arguments):
    _note("on_global_rank", *arguments)
    _answer("report_strategies", arguments[0], ["recover", "dump", "exit"])
def tft_notify_controller_change_strategy(*arguments):
    _note("change_strategy", *arguments)
    _answer("report_result", 0, "all well", {}, arguments[0])
'''


def package(folder: Path) -> None:
    home = folder / "site" / "mindio_ttp"
    home.mkdir(parents=True)
    (home / "__init__.py").write_text("")
    (home / "controller_ttp.py").write_text(CONTROLLER)
    os.mkfifo(folder / "gate")


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")]),
        "CALLS": str(folder / "calls"),
        "GATE": str(folder / "gate"),
        "POD_IP": "127.0.0.1",
        "TTP_PORT": "8000",
        "WORLD_SIZE": "2",
    }


def calls(folder: Path) -> list[list[object]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_mindio_repairs_a_rank_in_place(tmp_path: Path) -> None:
    package(tmp_path)

    async def play() -> None:
        read, write = os.pipe()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "taskd.manager", "--listen", "127.0.0.1:0", "--procs-per-node", "2"),
            *("--strategies", "recover-in-place,dump", "--ready-fd", str(write)),
            *("--state-dir", str(tmp_path / "state")),
            env={**environment(tmp_path), "HIGH_AVAILABILITY": "dump, elastic-training"},
            pass_fds=(write,),
        )
        os.close(write)
        with os.fdopen(read) as line:
            port = json.loads(await asyncio.to_thread(line.read))["port"]
        peer = AscendAgent(port)
        await peer.join(3)
        assert await peer.hears() == m.StartWorkers(3)
        await asyncio.to_thread((tmp_path / "gate").write_text, "")
        assert await peer.hears() == m.RestartWorkers((Rank(1),))
        await peer.bus.close()
        process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0

    asyncio.run(play())
    names = [call[0] for call in calls(tmp_path)]
    assert names[:2] == ["init", "start"]
    assert calls(tmp_path)[0][-1] is True, "it may shrink the job"
    assert names[2:5] == ["stop_train", "on_global_rank", "change_strategy"]
    assert names[-1] == "destroy"
    assert ["stop_train", {"1": 1}, "stop"] in calls(tmp_path)
    assert ["change_strategy", "recover", "recover-in-place"] in calls(tmp_path)


def test_replaced_agent_starts_its_ranks_and_is_not_a_fault(tmp_path: Path) -> None:
    """While MindIO repairs the ranks, only MindIO reports faults."""
    package(tmp_path)

    async def play() -> None:
        read, write = os.pipe()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "taskd.manager", "--listen", "127.0.0.1:0", "--nodes", "2"),
            *("--strategies", "recover-in-place,dump", "--ready-fd", str(write)),
            *("--state-dir", str(tmp_path / "state")),
            env=environment(tmp_path),
            pass_fds=(write,),
        )
        os.close(write)
        with os.fdopen(read) as line:
            port = json.loads(await asyncio.to_thread(line.read))["port"]
        first, second = AscendAgent(port), AscendAgent(port, 1)
        for peer in (first, second):
            await peer.join(3)
            assert await peer.hears() == m.StartWorkers(3)
        await second.bus.close()
        replaced = AscendAgent(port, 1)
        await replaced.join(3)
        assert await replaced.hears() == m.StartWorkers(3)
        await asyncio.to_thread((tmp_path / "gate").write_text, "")
        assert await replaced.hears() == m.RestartWorkers((Rank(1),))
        for peer in (first, replaced):
            await peer.bus.close()
        process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0

    asyncio.run(play())
    names = [call[0] for call in calls(tmp_path)]
    assert names.count("stop_train") == 1


def test_controller_of_a_mindspore_job_starts_again_for_mindspore(tmp_path: Path) -> None:
    package(tmp_path)
    drive = """
import asyncio, os
from taskd.ascend.mindio_controller import MindioController
from taskd.model.clusterd import Signal
from taskd.model.ids import Incident

async def main():
    controller = MindioController(print, print, lambda: ())
    controller.start("mindspore")
    from taskd.python.framework.manager import controller as documented
    documented.backend_send_callback(
        b'{"actions": ["change_strategy"], "strategy": "downgrade", "params": "DP"}'
    )
    restart = ("restart_controller",)
    controller.handle(Signal(uuid="u", incident=Incident(1), type="x", actions=restart))
    await controller.close()

asyncio.run(main())
os._exit(0)
"""
    env = {**environment(tmp_path), "MS_WORKER_NUM": "4"}
    subprocess.run([sys.executable, "-c", drive], env=env, check=True, timeout=PATIENCE_S)
    made = calls(tmp_path)
    worlds = [call[2] for call in made if call[0] == "init"]
    assert worlds == [4, 4], "WORLD_SIZE is 2, MS_WORKER_NUM is 4"
    assert ["change_strategy", "downgrade", "DP"] in made


def test_documented_module_fails_clearly_without_mindio() -> None:
    async def play() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", "import taskd.python.framework.manager.controller"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, stderr = await process.communicate()
        assert b"No module named 'mindio_ttp'" in stderr

    asyncio.run(play())
