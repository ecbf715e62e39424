"""With `mindio_ttp` installed, its controller gets the same calls as from MindCluster."""

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
"""Replaces Huawei's package: records every call, and calls back."""
import json, os, sys
_callbacks = {}
def _record(name, *arguments):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([name, *arguments]) + "\\n")
def tft_register_mindx_callback(action, func):
    _callbacks[action] = func
    _record("register", action)
    return 0
def tft_init_controller(*arguments): _record("init", *arguments)
def tft_start_controller(*arguments): _record("start", *arguments)
def tft_destroy_controller(): _record("destroy")
def tft_query_high_availability_switch():
    _record("query")
    return True
def tft_notify_controller_dump():
    _record("dump")
    _callbacks["report_result"](0, "dumped", {}, "dump")
    return 0
def tft_notify_controller_stop_train(*arguments):
    _record("stop_train", *arguments)
    _callbacks["report_stop_complete"](0, "stopped", arguments[0])
    return 0
def tft_notify_controller_on_global_rank(*arguments):
    _record("on_global_rank", *arguments)
    _callbacks["report_strategies"](arguments[0], ["recover", "exit"])
    return 0
def tft_notify_controller_change_strategy(*arguments):
    _record("change_strategy", *arguments)
    _callbacks["report_fault_ranks"]({5: 1}, {5: "code"})
    return 0
'''
NEWER = """
def tft_notify_controller_prepare_action(*arguments):
    _record("prepare_action", *arguments)
    return 0
"""
PROGRAM = """
from taskd.ascend.documented import recover_functions
from taskd.python.toolkit.recover_module import recover_manager
assert recover_manager.import_flag
recover_functions.server_address = lambda: __import__("os").environ["SERVER"]
recover_manager.init_grpc_process("pytorch")
print("finished")
"""


class Job:
    """A process that runs the documented client with a package named `mindio_ttp`."""

    def __init__(self, folder: Path, controller: str) -> None:
        package = folder / "mindio_ttp"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "controller_ttp.py").write_text(controller)
        self.server = Running()
        self.calls_path = folder / "calls"
        self.calls_path.touch()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]),
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
        assert output.rstrip().endswith("finished"), output
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


def test_all_orders_and_callbacks(job: Job) -> None:
    clusterd, push = job.server.clusterd, job.server.clusterd.push
    faults = [pb.FaultRank(rankId="3", faultType="1")]
    push("stopTrain", "stop_train", uuid="a", faultRanks=faults)
    request = clusterd.next_call("ReportStopComplete", timeout_s=WAIT_S)
    # MindIO does not say which order it answers: by that clusterd knows it.
    assert (request.uuid, request.status.info, request.faultRanks[0].rankId) == ("", "stopped", "3")
    push("globalFault", "on_global_rank", uuid="a", faultRanks=faults)
    push("globalFault", "on_global_rank", uuid="a", faultRanks=faults, timeout=33)
    request = clusterd.next_call("ReportRecoverStrategy", timeout_s=WAIT_S)
    assert (request.uuid, list(request.strategies)) == ("", ["recover", "exit"])
    push("changeStrategy", "change_strategy", uuid="a", changeStrategy="recover", extraParams="x")
    request = clusterd.next_call("ReportProcessFault", timeout_s=WAIT_S)
    assert (request.faultRanks[0].rankId, list(request.evidence)) == ("5", ["code"])
    push("stopTrain", "pause_train", uuid="b")
    push("hot-switch", "hot switch", faultRanks=faults)
    push("hot-switch", "new pod running")
    push("hot-switch", "stop switch")
    push("saveAndExit", "save_and_exit", uuid="c")
    request = clusterd.next_call("ReportRecoverStatus", timeout_s=WAIT_S)
    assert (request.uuid, request.strategy) == ("", "dump")
    job.end()
    known = {"3": 1}
    assert job.calls() == [
        *START,
        ["stop_train", known, "stop"],
        ["on_global_rank", known],
        ["on_global_rank", known, 33],
        ["change_strategy", "recover", "x"],
        ["stop_train", {}, "pause", 600],
        ["prepare_action", "hot switch", known],
        ["prepare_action", "stop switch", {}],
        ["dump"],
        ["destroy"],
    ]


def test_old_mindio_without_hot_switch_is_logged(tmp_path: Path) -> None:
    job = Job(tmp_path, CONTROLLER)
    try:
        job.server.clusterd.push("hot-switch", "hot switch")
        output = job.end()
    finally:
        job.close()
    assert "'hot switch' is not carried out: this version of mindio_ttp is too old" in output
    assert job.calls() == [*START, ["destroy"]]


def test_broken_mindio_is_logged_and_orders_are_refused(tmp_path: Path) -> None:
    job = Job(tmp_path, "raise ImportError('libttp.so: no such file')")
    try:
        job.server.clusterd.push("stopTrain", "stop_train", uuid="a")
        request = job.server.clusterd.next_call("ReportStopComplete", timeout_s=WAIT_S)
        assert request.status.code == 499
        output = job.end()
    finally:
        job.close()
    assert "its import failed: libttp.so: no such file" in output
