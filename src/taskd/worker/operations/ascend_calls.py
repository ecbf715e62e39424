"""What Ascend's own packages do for an operation: their stress test, and their links.

torch_npu and MindSpore each have one call for either. They are looked up when they are needed: a
machine without them answers that it cannot, at once (`stress.py`, `nic.py`).
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
    """The vendor's call has said no."""


def operations(framework: str) -> dict[int, Operation]:
    """Those of a stress test. What cannot even begin raises; the caller makes code 1 of it."""
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
            # It has begun, and nobody knows how it left the device.
            log.warning("Ascend's test %s has failed", name, exc_info=True)
            return OpResult(UNSETTLED, f"{type(error).__name__}: {error}"[:500])
        return CODES.get(code, CODES[1])

    return test


def switch(framework: str, order: m.SwitchNic) -> None:
    """Raises, whatever the reason, when the links stay where they are."""
    if framework == MINDSPORE:
        move = import_module("mindspore.communication.management")._comm_switch_nic
    else:
        move = _npu()._comm_switch_nic
    if not move(list(order.ranks), list(order.to_backup)):
        raise NotSwitched("Ascend's call could not switch")


def _npu() -> Any:
    return import_module("torch_npu").npu
