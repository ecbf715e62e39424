"""The documented functions of MindIO's controller in the manager's process.

They call this process's active `taskd.ascend.mindio_controller`. Importing this module requires
`mindio_ttp`, as documented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from taskd.ascend import mindio_controller
from taskd.ascend.documented.run_log import run_log
from taskd.model.clusterd import Signal
from taskd.model.faults import Fault, FaultKind
from taskd.model.ids import Incident, Rank
from taskd.model.strategies import wire_strategy
from taskd.wire.json_reading import loads

import_module("mindio_ttp.controller_ttp")


@dataclass
class ControllerMessage:
    action: str
    code: int
    msg: str
    strategy: str
    params: str
    timeout: int
    actions: list[str] = field(default_factory=list)
    strategy_list: list[str] = field(default_factory=list)
    fault_ranks: dict[int, int] = field(default_factory=dict)


def init_controller() -> None:
    """Start the controller of this process's manager."""
    if mindio_controller.active is None:
        run_log.error("the controller is not started: no manager with MindIO runs in this process")
    else:
        mindio_controller.active.start()


def backend_send_callback(data_ptr: bytes | str) -> int:
    """Carry out a JSON message of the manager. Returns 0, or 1 if it cannot be read."""
    try:
        fields = loads(data_ptr)
        ranks = {int(rank): int(kind) for rank, kind in (fields.get("fault_ranks") or {}).items()}
        message = ControllerMessage(
            action=str(fields.get("action", "")),
            code=int(fields.get("code", 0)),
            msg=str(fields.get("msg", "")),
            strategy=str(fields.get("strategy", "")),
            params=str(fields.get("params", "")),
            timeout=int(fields.get("timeout", 0)),
            actions=list(fields.get("actions") or []),
            strategy_list=list(fields.get("strategy_list") or []),
            fault_ranks=ranks,
        )
    except (AttributeError, TypeError, ValueError) as error:
        run_log.error("a message for the MindIO controller cannot be read: %s", error)
        return 1
    for action in message.actions:
        send_msg_to_controller(action, message)
    return 0


def send_msg_to_controller(action: str, data: ControllerMessage) -> None:
    if mindio_controller.active is None:
        run_log.error("%s is not carried out: no MindIO controller runs in this process", action)
        return
    faults = tuple(
        Fault(Rank(rank), FaultKind.parse(str(kind))) for rank, kind in data.fault_ranks.items()
    )
    signal = Signal(
        uuid="",
        incident=Incident(0),
        type="",
        actions=(action,),
        faults=faults,
        strategy=wire_strategy(data.strategy),
        timeout_s=data.timeout,
        extra=data.params,
    )
    mindio_controller.active.carry_out(action, signal, data.fault_ranks)


def report_stop_complete(code: int, msg: str, fault_ranks: Mapping[int, int]) -> None:
    _report("report_stop_complete", code, msg, fault_ranks)


def report_recover_strategy(fault_ranks: Mapping[int, int], strategy_list: Sequence[str]) -> None:
    _report("report_recover_strategy", fault_ranks, strategy_list)


def report_recover_status(
    code: int, msg: str, fault_ranks: Mapping[int, int], strategy: str
) -> None:
    _report("report_recover_status", code, msg, fault_ranks, strategy)


def report_process_fault(
    fault_ranks: Mapping[int, int], fault_codes: Mapping[int, str] | None = None
) -> None:
    _report("report_process_fault", fault_ranks, fault_codes)


def _report(name: str, *arguments: Any) -> None:
    if mindio_controller.active is None:
        run_log.error("%s is dropped: no MindIO controller runs in this process", name)
    else:
        getattr(mindio_controller.active, name)(*arguments)
