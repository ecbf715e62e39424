"""With `mindio_ttp` installed, its controller is driven call by call as MindCluster does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taskd.wire._pb import recover_pb2 as pb
from tests.integration.ascend.recover_server import Running

WAIT_S = 30.0

CONTROLLER = '''
"""Stands in for Huawei's package: writes every call down, and calls back on request."""
import json, os, sys
_callbacks = {}
def _note(name, *arguments):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([name, *arguments]) + "\\n")
def tft_register_mindx_callback(action, func):
    _callbacks[action] = func
    _note("register", action)
    return 0
def tft_init_controller(*arguments): _note("init", *arguments)
def tft_start_controller(*arguments): _note("start", *arguments)
def tft_destroy_controller(): _note("destroy")
def tft_query_high_availability_switch():
    _note("query")
    return True
def tft_notify_controller_dump():
    _note("dump")
    _callbacks["report_result"](0, "dumped", {}, "dump")
    return 0
def tft_notify_controller_stop_train(*arguments):
    _note("stop_train", *arguments)
    _callbacks["report_stop_complete"](0, "stopped", arguments[0])
    return 0
def tft_notify_controller_on_global_rank(*arguments):
    _note("on_global_rank", *arguments)
    _callbacks["report_strategies"](arguments[0], ["recover", "exit"])
    return 0
def tft_notify_controller_change_strategy(*arguments):
    _note("change_strategy", *arguments)
    _callbacks["report_fault_ranks"]({5: 1}, {5: "code"})
    return 0
'''
NEWER = """
def tft_notify_controller_prepare_action(*arguments):
    _note("prepare_action", *arguments)
    return 0
"""
PROGRAM = """
from taskd.python.toolkit.recover_module import recover_manager
assert recover_manager.import_flag
recover_manager.server_address = lambda: __import__("os").environ["SERVER"]
recover_manager.init_grpc_process("pytorch")
print("over")
"""


class Job:
    """A process that runs the documented client with a package named `mindio_ttp`."""

    def __init__(self, place: Path, controller: str) -> None:
        package = place / "mindio_ttp"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "controller_ttp.py").write_text(controller)
        self.server = Running()
        self.calls_path = place / "calls"
        self.calls_path.touch()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(place), *filter(None, sys.path)]),
            "CALLS": str(self.calls_path),
            "SERVER": self.server.address,
            "MINDX_TASK_ID": "job-1",
            "MINDX_SERVER_IP": "127.0.0.1",
            "WORLD_SIZE": "16",
            "POD_IP": "10.0.0.4",
            "TTP_PORT": "8000",
            "PROCESS_RECOVER": "on",
            "TASKD_RECOVER_RETRY_S": "0.05",
        }
        environment.pop("HCCL_CONNECT_TIMEOUT", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.server.clusterd.next_call("Subscribe", timeout_s=WAIT_S)

    def calls(self) -> list[Any]:
        return [json.loads(line) for line in self.calls_path.read_text().splitlines()]

    def end(self) -> str:
        self.server.clusterd.push("killMaster")
        output, errors = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0, errors
        assert output.rstrip().endswith("over"), output
        return output

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.server.stop()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    running = Job(tmp_path, CONTROLLER + NEWER)
    yield running
    running.close()


START = [
    ["register", "report_fault_ranks"],
    ["register", "report_stop_complete"],
    ["register", "report_strategies"],
    ["register", "report_result"],
    ["init", -1, 16, False, True],
    ["start", "10.0.0.4", 8000, False, ""],
    ["query"],
]


def test_every_order_and_every_callback(job: Job) -> None:
    told, push = job.server.clusterd, job.server.clusterd.push
    faults = [pb.FaultRank(rankId="3", faultType="1")]
    push("stopTrain", "stop_train", uuid="a", faultRanks=faults)
    request = told.next_call("ReportStopComplete", timeout_s=WAIT_S)
    assert (request.uuid, request.status.info, request.faultRanks[0].rankId) == (
        "a",
        "stopped",
        "3",
    )
    push("globalFault", "on_global_rank", uuid="a", faultRanks=faults)
    push("globalFault", "on_global_rank", uuid="a", faultRanks=faults, timeout=33)
    request = told.next_call("ReportRecoverStrategy", timeout_s=WAIT_S)
    assert (request.uuid, list(request.strategies)) == ("a", ["recover", "exit"])
    push("changeStrategy", "change_strategy", uuid="a", changeStrategy="recover", extraParams="x")
    request = told.next_call("ReportProcessFault", timeout_s=WAIT_S)
    assert (request.faultRanks[0].rankId, list(request.evidence)) == ("5", ["code"])
    push("stopTrain", "pause_train", uuid="b")
    push("hot-switch", "hot switch", faultRanks=faults)
    push("hot-switch", "new pod running")
    push("hot-switch", "stop switch")
    push("saveAndExit", "save_and_exit", uuid="c")
    request = told.next_call("ReportRecoverStatus", timeout_s=WAIT_S)
    assert (request.uuid, request.strategy) == ("c", "dump")
    job.end()
    known = {"3": 1}
    assert job.calls() == [
        *START,
        ["stop_train", known, "stop"],
        ["on_global_rank", known],
        ["on_global_rank", known, 33],
        ["change_strategy", "recover"],
        ["stop_train", {}, "pause", 600],
        ["prepare_action", "hot switch", known],
        ["prepare_action", "stop switch", {}],
        ["dump"],
        ["destroy"],
    ]


def test_an_old_version_lacks_the_hot_switch(tmp_path: Path) -> None:
    job = Job(tmp_path, CONTROLLER)
    try:
        job.server.clusterd.push("hot-switch", "hot switch")
        output = job.end()
    finally:
        job.close()
    assert "this mindio_ttp is too old for 'hot switch'" in output
    assert job.calls() == [*START, ["destroy"]]


def test_a_broken_version_is_told_and_replaced(tmp_path: Path) -> None:
    job = Job(tmp_path, "raise ImportError('libttp.so: no such file')")
    try:
        job.server.clusterd.push("stopTrain", "stop_train", uuid="a")
        request = job.server.clusterd.next_call("ReportStopComplete", timeout_s=WAIT_S)
        assert request.status.code == 499
        output = job.end()
    finally:
        job.close()
    assert "cannot be loaded: libttp.so: no such file" in output
