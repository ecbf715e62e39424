"""What carries out clusterd's orders inside this process: Ascend's mindio_ttp, or another engine.

`ascend/recover_client.py` passes on the orders, in the order in which they come. An engine answers
through `Reports` whenever it is done. With `mindio_ttp` installed its controller is driven call
by call as MindCluster drives it. Without it, `InProcessEngine` stands in: it refuses at once what
nobody here can do, so that clusterd need not wait for an answer that never comes. Whoever can do
more derives from it and plugs that in with `use`.
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
"""The type of the fault of each rank."""

STOP, PAUSE = "stop", "pause"
ELASTIC = "elastic-training"
STARTED_BY_CLUSTER = -1
"""The rank of a controller that is run by MindCluster and not by a training process."""

WORLD_SIZE_NAMES = {"pytorch": "WORLD_SIZE", "mindspore": "MS_WORKER_NUM"}


class Reports(Protocol):
    """How an engine answers. Each call returns clusterd's code."""

    def report_stop_complete(self, code: int, msg: str, fault_ranks: Faults) -> int: ...
    def report_recover_strategy(self, fault_ranks: Faults, strategy_list: Sequence[str]) -> int: ...
    def report_recover_status(
        self, code: int, msg: str, fault_ranks: Faults, strategy: str
    ) -> int: ...
    def report_process_fault(
        self, fault_ranks: Faults, fault_codes: Mapping[int, str] | None = None
    ) -> int: ...


class Engine(Protocol):
    """Orders. None of them waits for the training: the answer is a report, later."""

    def register_callbacks(self) -> None: ...
    def check(self, frame: str) -> None:
        """Raise ValueError if the environment lacks what `start` needs."""

    def start(self, frame: str) -> None: ...
    def is_ready(self) -> bool:
        """Whether there is a training process that it can act on."""

    def destroy(self) -> None: ...
    def save_and_exit(self) -> object: ...
    def stop_train(self, faults: Faults, mode: str, timeout: int | None = None) -> object: ...
    def on_global_rank(self, faults: Faults, timeout: int | None = None) -> object: ...
    def change_strategy(self, strategy: str) -> object: ...
    def prepare_action(self, action: str, faults: Faults) -> object: ...


def address_and_world(frame: str) -> tuple[str, int, int]:
    """Where the controller listens and how many ranks it serves: host, port, world size."""
    name = WORLD_SIZE_NAMES.get(frame)
    if name is None:
        raise ValueError(f"the framework {frame!r} is none of {', '.join(WORLD_SIZE_NAMES)}")
    missing = [each for each in (name, "POD_IP", "TTP_PORT") if not environ.get(each)]
    if missing:
        raise ValueError(f"the recovery controller needs {', '.join(missing)} to be set")
    return environ["POD_IP"], int(environ["TTP_PORT"]), int(environ[name])


class MindioEngine:
    """Drives the controller of `mindio_ttp`, and passes its callbacks on as reports."""

    def __init__(self, reports: Reports) -> None:
        self._ttp: Any = import_module("mindio_ttp.controller_ttp")
        self._reports = reports

    def check(self, frame: str) -> None:
        address_and_world(frame)

    def start(self, frame: str) -> None:
        host, port, world = address_and_world(frame)
        recover = environ.get("PROCESS_RECOVER") == "on"
        # Only controllers that are new enough know of shrinking, which the fifth argument allows.
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
            if self._ttp.tft_register_mindx_callback(name, _told(name, report)):
                log.error("mindio_ttp did not take the callback %s", name)

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

    def change_strategy(self, strategy: str) -> object:
        return self._ttp.tft_notify_controller_change_strategy(strategy)

    def prepare_action(self, action: str, faults: Faults) -> object:
        order = getattr(self._ttp, "tft_notify_controller_prepare_action", None)
        if order is None:
            log.warning("this mindio_ttp is too old for %r: nothing is done", action)
            return None
        return order(action, faults)


def _told(name: str, report: Callable[..., int]) -> Callable[..., int]:
    """Its caller is C++, which can do nothing about a report that was not accepted."""

    def call(*arguments: Any) -> int:
        try:
            code = report(*arguments)
        except grpc.RpcError as error:
            log.error("%s did not reach clusterd: %s", name, error)
            return int(RecoverCode.ClientError)
        if code != RecoverCode.OK:
            log.error("%s was answered with %d", name, code)
        return code

    return call


class InProcessEngine:
    """Stands in where `mindio_ttp` is not installed. By itself it can only let the job exit."""

    because = "no engine for in-process recovery is at work here (mindio_ttp is not available)"

    def __init__(self, reports: Reports) -> None:
        self.reports = reports

    def register_callbacks(self) -> None:
        """It calls the reports itself."""

    def check(self, frame: str) -> None:
        """It needs nothing."""

    def start(self, frame: str) -> None:
        """Nothing is to be prepared."""

    def is_ready(self) -> bool:
        return True

    def destroy(self) -> None:
        """Nothing is to be torn down."""

    def save_and_exit(self) -> object:
        return self.reports.report_recover_status(RecoverCode.DumpError, self.because, {}, "dump")

    def stop_train(self, faults: Faults, mode: str, timeout: int | None = None) -> object:
        return self.reports.report_stop_complete(RecoverCode.ClientError, self.because, faults)

    def on_global_rank(self, faults: Faults, timeout: int | None = None) -> object:
        return self.reports.report_recover_strategy(faults, ["exit"])

    def change_strategy(self, strategy: str) -> object:
        if strategy == "exit":
            log.warning("clusterd ends the job")
            return None
        code = RecoverCode.ClientError
        return self.reports.report_recover_status(code, self.because, {}, strategy)

    def prepare_action(self, action: str, faults: Faults) -> object:
        log.warning("%r is not done: %s", action, self.because)
        return None


_chosen: Callable[[Reports], Engine] | None = None


def use(factory: Callable[[Reports], Engine] | None) -> None:
    """Let every recover client made from now on use this engine; None: choose by what is there."""
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
        log.error("mindio_ttp is installed but cannot be loaded: %s", error)
        return InProcessEngine(reports)
