"""Engines that carry out clusterd's orders inside this process: Ascend's mindio_ttp, or another.

`ascend/recover_client.py` passes on the orders in sequence. An engine answers through `Reports`
when it is done. If `mindio_ttp` is installed, `MindioEngine` makes the same calls to its controller
as MindCluster does. Otherwise `InProcessEngine` refuses each order at once, so that clusterd does
not wait for an answer that never comes. A program with another engine derives from
`InProcessEngine` and installs it with `use`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import grpc

from taskd.config import environ
from taskd.model.codes import RecoverCode

log = logging.getLogger(__name__)

Faults = Mapping[int, int]
"""The fault type of each rank."""

STOP, PAUSE = "stop", "pause"
ELASTIC = "elastic-training"
STARTED_BY_CLUSTER = -1
"""The rank of a controller that MindCluster runs instead of a training process."""

WORLD_SIZE_NAMES = {"pytorch": "WORLD_SIZE", "mindspore": "MS_WORKER_NUM"}


class Reports(Protocol):
    """The answers of an engine. Each call returns clusterd's code."""

    def report_stop_complete(self, code: int, msg: str, fault_ranks: Faults) -> int: ...
    def report_recover_strategy(self, fault_ranks: Faults, strategy_list: Sequence[str]) -> int: ...
    def report_recover_status(
        self, code: int, msg: str, fault_ranks: Faults, strategy: str
    ) -> int: ...
    def report_process_fault(
        self, fault_ranks: Faults, fault_codes: Mapping[int, str] | None = None
    ) -> int: ...


class Engine(Protocol):
    """The orders. None of them waits for the training: the answer is a later report."""

    def register_callbacks(self) -> None: ...
    def check(self, frame: str) -> None:
        """Raise ValueError if a variable that `start` needs is not set."""

    def start(self, frame: str) -> None: ...
    def is_ready(self) -> bool:
        """Whether the engine has reached a training process."""

    def destroy(self) -> None: ...
    def save_and_exit(self) -> object: ...
    def stop_train(self, faults: Faults, mode: str, timeout: int | None = None) -> object: ...
    def on_global_rank(self, faults: Faults, timeout: int | None = None) -> object: ...
    def change_strategy(self, strategy: str, params: str = "") -> object:
        """`params` is given only if clusterd sent some, as it does with downgrade and upgrade."""

    def prepare_action(self, action: str, faults: Faults) -> object: ...


def address_and_world(frame: str) -> tuple[str, int, int]:
    """Host and port that the controller listens on, and the world size."""
    name = WORLD_SIZE_NAMES.get(frame)
    if name is None:
        raise ValueError(f"unknown framework {frame!r} (expected {' or '.join(WORLD_SIZE_NAMES)})")
    missing = [each for each in (name, "POD_IP", "TTP_PORT") if not environ.get(each)]
    if missing:
        raise ValueError(f"the recovery controller needs these variables: {', '.join(missing)}")
    return environ["POD_IP"], int(environ["TTP_PORT"]), int(environ[name])


class MindioEngine:
    """Calls the controller of `mindio_ttp`, and turns its callbacks into reports."""

    def __init__(self, reports: Reports) -> None:
        self._ttp: Any = import_module("mindio_ttp.controller_ttp")
        self._reports = reports

    def check(self, frame: str) -> None:
        address_and_world(frame)

    def start(self, frame: str) -> None:
        host, port, world = address_and_world(frame)
        recover = environ.get("PROCESS_RECOVER") == "on"
        # The fifth argument allows elastic training. Older controllers do not accept it.
        shrinks = ELASTIC in environ.get("HIGH_AVAILABILITY", "").replace(" ", "").split(",")
        more = (True,) if shrinks else ()
        self._ttp.tft_init_controller(STARTED_BY_CLUSTER, world, False, recover, *more)
        self._ttp.tft_start_controller(host, port, False, "")

    def register_callbacks(self) -> None:
        callbacks: dict[str, Callable[..., int]] = {
            "report_fault_ranks": self._reports.report_process_fault,
            "report_stop_complete": self._reports.report_stop_complete,
            "report_strategies": self._reports.report_recover_strategy,
            "report_result": self._reports.report_recover_status,
        }
        for name, report in callbacks.items():
            if self._ttp.tft_register_mindx_callback(name, _without_exceptions(name, report)):
                log.error("mindio_ttp rejected the callback %s", name)

    def is_ready(self) -> bool:
        return bool(self._ttp.tft_query_high_availability_switch())

    def destroy(self) -> None:
        self._ttp.tft_destroy_controller()

    def save_and_exit(self) -> object:
        return self._ttp.tft_notify_controller_dump()

    def stop_train(self, faults: Faults, mode: str, timeout: int | None = None) -> object:
        order = self._ttp.tft_notify_controller_stop_train
        return order(faults, mode) if timeout is None else order(faults, mode, timeout)

    def on_global_rank(self, faults: Faults, timeout: int | None = None) -> object:
        order = self._ttp.tft_notify_controller_on_global_rank
        return order(faults) if timeout is None else order(faults, timeout)

    def change_strategy(self, strategy: str, params: str = "") -> object:
        order = self._ttp.tft_notify_controller_change_strategy
        return order(strategy, params) if params else order(strategy)

    def prepare_action(self, action: str, faults: Faults) -> object:
        order = getattr(self._ttp, "tft_notify_controller_prepare_action", None)
        if order is None:
            log.warning("%r is not carried out: this version of mindio_ttp is too old", action)
            return None
        return order(action, faults)


def _without_exceptions(name: str, report: Callable[..., int]) -> Callable[..., int]:
    """The report, with failures logged: its caller is C++ and cannot handle an exception."""

    def call(*arguments: Any) -> int:
        try:
            code = report(*arguments)
        except grpc.RpcError as error:
            log.error("%s did not reach clusterd: %s", name, error)
            return int(RecoverCode.ClientError)
        if code != RecoverCode.OK:
            log.error("%s was refused by clusterd: code=%d", name, code)
        return code

    return call


class InProcessEngine:
    """The engine without `mindio_ttp`. It refuses all orders except that the job exits."""

    because = "this process has no engine for in-process recovery (mindio_ttp is not available)"

    def __init__(self, reports: Reports) -> None:
        self.reports = reports

    def register_callbacks(self) -> None:
        """Not needed: this engine calls the reports itself."""

    def check(self, frame: str) -> None:
        """Nothing to check."""

    def start(self, frame: str) -> None:
        """Nothing to start."""

    def is_ready(self) -> bool:
        return True

    def destroy(self) -> None:
        """Nothing to stop."""

    def save_and_exit(self) -> object:
        return self.reports.report_recover_status(RecoverCode.DumpError, self.because, {}, "dump")

    def stop_train(self, faults: Faults, mode: str, timeout: int | None = None) -> object:
        return self.reports.report_stop_complete(RecoverCode.ClientError, self.because, faults)

    def on_global_rank(self, faults: Faults, timeout: int | None = None) -> object:
        return self.reports.report_recover_strategy(faults, ["exit"])

    def change_strategy(self, strategy: str, params: str = "") -> object:
        if strategy == "exit":
            log.warning("clusterd orders the job to exit")
            return None
        code = RecoverCode.ClientError
        return self.reports.report_recover_status(code, self.because, {}, strategy)

    def prepare_action(self, action: str, faults: Faults) -> object:
        log.warning("%r is not carried out: %s", action, self.because)
        return None


_chosen: Callable[[Reports], Engine] | None = None


def use(factory: Callable[[Reports], Engine] | None) -> None:
    """Use this engine in all recover clients created later. None: MindIO if it is installed."""
    global _chosen
    _chosen = factory


def has_mindio() -> bool:
    try:
        return find_spec("mindio_ttp.controller_ttp") is not None
    except ImportError:
        return False


def engine_for(reports: Reports) -> Engine:
    if _chosen is not None:
        return _chosen(reports)
    if not has_mindio():
        return InProcessEngine(reports)
    try:
        return MindioEngine(reports)
    except (ImportError, OSError) as error:
        log.error("mindio_ttp is installed but its import failed: %s", error)
        return InProcessEngine(reports)
