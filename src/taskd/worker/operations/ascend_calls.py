"""Stress tests and NIC switches by Ascend's own packages.

torch_npu and MindSpore each have one call for both. The packages are imported when an order comes:
without them, the order is answered with a failure at once (`stress_order.py`, `nic_order.py`).
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from taskd import config
from taskd.errors import Transient
from taskd.model import messages as m
from taskd.model.operations import (
    COMPUTE,
    FAULTY,
    NOT_RUN,
    P2P,
    PASSED,
    TIMED_OUT,
    UNSETTLED,
    OpResult,
)
from taskd.worker.operations.stress_order import Operation, Request

log = logging.getLogger(__name__)

TORCH, MINDSPORE = "pt", "ms"
"""The frameworks, as `init_taskd_worker` names them."""
TESTS = {COMPUTE: "aic", P2P: "hccs"}
CODES = {
    0: OpResult(PASSED, "OK"),
    1: OpResult(NOT_RUN, "exec failed"),
    2: OpResult(FAULTY, "find fault rank"),
    3: OpResult(TIMED_OUT, "exec timeout"),
    4: OpResult(UNSETTLED, "voltage recovery failed"),
}


class NotSwitched(Transient):
    """Ascend's call returned that it did not switch."""


def operations(framework: str) -> dict[int, Operation]:
    """The operations of a stress test. One that cannot start raises; the caller reports code 1."""
    return {op: _test(framework, name) for op, name in TESTS.items()}


def _test(framework: str, name: str) -> Operation:
    def test(request: Request) -> OpResult:
        if framework == MINDSPORE:
            detect = import_module("mindspore.utils").stress_detect
        else:
            npu = _npu()
            detect = npu.stress_detect
            npu.set_device(f"npu:{config.environ.get('LOCAL_RANK', '0')}")
        try:
            code = detect(name)
        except Exception as error:
            # The test has started, so the state of the device is unknown.
            log.warning("Ascend's stress test %s has failed", name, exc_info=True)
            return OpResult(UNSETTLED, f"{type(error).__name__}: {error}"[:500])
        return CODES.get(code, CODES[1])

    return test


def switch(framework: str, order: m.SwitchNic) -> None:
    """Switch the links. Raises if they were not switched, for any reason."""
    if framework == MINDSPORE:
        move = import_module("mindspore.communication.management")._comm_switch_nic
    else:
        move = _npu()._comm_switch_nic
    if not move(list(order.ranks), list(order.to_backup)):
        raise NotSwitched("Ascend's _comm_switch_nic returned a failure")


def _npu() -> Any:
    return import_module("torch_npu").npu
