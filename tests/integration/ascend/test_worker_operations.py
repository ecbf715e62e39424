"""The documented worker with Ascend's manager: stress test and NIC switch in Ascend's messages.

torch_npu and MindSpore are fake packages with the same names; the worker is a separate process
behind a proxy of TaskD.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from taskd.model.ids import manager, worker
from tests.integration.bus.ascend_peers import AscendServer, ascend_server, message
from tests.integration.bus.bus_nodes import proxy, running_bus
from tests.integration.profiling.test_profiling_worker import STARTED_S, running

WORKER = """
    import sys
    from taskd.api import init_taskd_worker, start_taskd_worker
    assert init_taskd_worker(5, 20, sys.argv[1]) is True
    assert start_taskd_worker() is True
    sys.stdin.readline()
"""

NPU = """
class npu:
    device = ""

    def set_device(name):
        npu.device = name

    def stress_detect(name):
        assert npu.device == "npu:3"
        return {"aic": 0, "hccs": 2}[name]

    def _comm_switch_nic(ranks, directions):
        return (ranks, directions) == ([5, 6], [True, False])
"""

DETECT = """
def stress_detect(name):
    if name == "hccs":
        raise OSError("the device is gone")
    return 99
"""

SWITCH = """
def _comm_switch_nic(ranks, directions):
    if ranks != [5, 6]:
        raise KeyError("no such rank")
    return 1
"""

Files = dict[str, str]
TORCH_NPU: Files = {"torch_npu.py": NPU}
OLD_TORCH_NPU: Files = {"torch_npu.py": "class npu: pass"}
MINDSPORE: Files = {
    "mindspore/__init__.py": "",
    "mindspore/utils.py": DETECT,
    "mindspore/communication/__init__.py": "",
    "mindspore/communication/management.py": SWITCH,
}
NOT_RUN = {"0": "1", "1": "1"}


def switch(uuid: str, *ranks: str) -> str:
    lists = {"globalRankIDs": json.dumps(ranks), "globalOps": json.dumps([True, False])}
    return action(204, {**lists, "switchNicUUID": uuid})


def stress(uuid: str) -> str:
    ops = json.dumps({"5": {"ops": [1, 0]}, "6": {"ops": [1]}})
    return action(205, {"StressTestRankOPStr": ops, "stressTestUUID": uuid})


def action(code: int, extension: dict[str, str]) -> str:
    return json.dumps({"msg_type": "ACTION", "code": code, "message": "", "extension": extension})


async def answer(server: AscendServer, order: str, uuid: str) -> Any:
    """The worker's answer to the order; its other messages are skipped."""
    await server.send(message(manager(), worker(1, 5), order, uuid=uuid4().hex))
    async with asyncio.timeout(STARTED_S):
        while True:
            received = json.loads((await server.got.get()).body)
            if uuid in (received["extension"] or {}).values():
                return received


@pytest.mark.parametrize(
    ("framework", "files", "switched", "codes"),
    [
        ("pt", TORCH_NPU, "switchOK", {"0": "0", "1": "2"}),
        ("pt", OLD_TORCH_NPU, "switchFail", NOT_RUN),
        ("pt", {}, "switchFail", NOT_RUN),
        ("ms", MINDSPORE, "switchOK", {"0": "1", "1": "4"}),
        ("ms", {}, "switchFail", NOT_RUN),
    ],
    ids=["torch_npu", "old torch_npu", "no torch_npu", "mindspore", "no mindspore"],
)
def test_all_orders_are_answered(
    tmp_path: Path, framework: str, files: Files, switched: str, codes: dict[str, str]
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for name, text in files.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(text)
    text = WORKER.replace("sys.argv[1]", repr(framework))
    paths = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    env = {"LOCAL_RANK": "3", "MS_NODE_RANK": "1", "PYTHONPATH": paths}

    async def scenario() -> None:
        async with (
            ascend_server(manager()) as server,
            running_bus(proxy(1), None, upstream=f"127.0.0.1:{server.port}", serves=True) as relay,
            running(tmp_path, text, relay.port, **env),
        ):
            async with asyncio.timeout(STARTED_S):
                while json.loads((await server.got.get()).body)["code"] != 101:
                    pass
            first = await answer(server, switch("n1", "5", "6"), "n1")
            assert (first["code"], first["message"]) == (204, switched)
            refused = await answer(server, switch("n2", "5", "7"), "n2")
            assert refused["message"] == "switchFail"
            again = await answer(server, switch("n2", "5", "7"), "n2")
            assert again["message"] == "switchFail"
            odd = await answer(server, switch("n3", "5", "6", "7"), "n3")
            assert odd["message"] == "switchFail"
            tested = await answer(server, stress("s1"), "s1")
            results = json.loads(tested["message"])["rankResult"]
            assert {op: result["code"] for op, result in results.items()} == codes

    asyncio.run(scenario())
