"""`DLRecoverManager` and its functions, as MindCluster documents them.

`taskd.ascend.recover_client` does the work; this module adds the documented names, the environment
variables and the single instance per process.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from taskd.ascend.documented import agent_constants as constants
from taskd.ascend.documented.run_log import run_log
from taskd.ascend.mindio import Faults, address_and_world, has_mindio
from taskd.ascend.recover_channel import Security, server_address
from taskd.ascend.recover_client import ProtoBufData, RecoverClient
from taskd.config import environ
from taskd.wire._pb import recover_pb2 as pb

ROLE = "master agent"

import_flag = has_mindio()
"""Whether `mindio_ttp` is installed."""


class RecoverManager(ABC):
    @abstractmethod
    def register(self, request: pb.ClientInfo) -> pb.Status: ...

    @abstractmethod
    def start_subscribe(self, frame: str = "pytorch") -> None: ...


class DLRecoverManager(RecoverClient, RecoverManager):
    """The recover client of this process; constructing it again connects it again."""

    instance: ClassVar[Any] = None
    _creation: ClassVar[threading.Lock] = threading.Lock()

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        with cls._creation:
            if not isinstance(cls.instance, cls):
                cls.instance = super().__new__(cls)
            made: Self = cls.instance
            return made

    def __init__(
        self, info: pb.ClientInfo, server_addr: str, security: Security | None = None
    ) -> None:
        if getattr(self, "grpc_channel", None) is not None:
            self.close()
        type(self).instance = None  # If construction fails, no half-built client is left behind.
        super().__init__(info, server_addr, security)
        type(self).instance = self

    def handle_signal(self, signal: pb.ProcessManageSignal) -> None:
        self.__signal_pipe_line(signal)

    def do_action(self, action: str, data: ProtoBufData) -> None:
        self.__do_action(action, data)

    # Other programs call these two by their mangled names.

    def __signal_pipe_line(self, signal: pb.ProcessManageSignal) -> None:
        super().handle_signal(signal)

    def __do_action(self, action: str, data: ProtoBufData) -> None:
        super().do_action(action, data)


def init_grpc_recover_manager() -> DLRecoverManager:
    """A client for the job and server named by the environment; ValueError if one is missing."""
    job = environ.get("MINDX_TASK_ID", "")
    if not job:
        raise ValueError("MINDX_TASK_ID is not set: the job id is unknown")
    return DLRecoverManager(pb.ClientInfo(jobId=job, role=ROLE), server_address())


def get_instance(cls: Any) -> Any:
    if not hasattr(cls, "instance"):
        raise TypeError(f"{cls!r} is not a singleton: it has no attribute `instance`")
    if cls.instance is None:
        raise RuntimeError(f"no {cls.__name__} has been created yet")
    return cls.instance


def get_recover_manager_instance() -> DLRecoverManager:
    try:
        found: DLRecoverManager = get_instance(DLRecoverManager)
    except RuntimeError:
        found = init_grpc_recover_manager()
    return found


def init_grpc_client(frame: str = "pytorch") -> threading.Thread:
    """Run `init_grpc_process` in a daemon thread."""
    thread = threading.Thread(
        target=init_grpc_process, args=(frame,), name="taskd-recover", daemon=True
    )
    thread.start()
    return thread


def init_grpc_process(frame: str = "pytorch") -> None:
    """Connect, start the engine, and follow clusterd's orders until the job ends."""
    manager = init_grpc_recover_manager()
    if not manager.init_clusterd():
        return
    # Tells mindio_ttp that its controller runs outside the training processes.
    os.environ["TORCH_AGENT_START"] = "0"  # noqa: TID251
    manager.engine.register_callbacks()
    manager.start_engine(frame)
    if not manager.wait_for_engine():
        run_log.error("recovery stays off: the engine reached no training process in time")
        manager.engine.destroy()
        return
    manager.register_some_times(constants.GRPC_REGISTER_RETRY_TIME_LIMIT)
    manager.start_subscribe(frame)


def init_mindio_controller(frame: str = "pytorch") -> None:
    """Start the engine of this process's client; ValueError if a variable is missing."""
    address_and_world(frame)
    get_recover_manager_instance().start_engine(frame)


def register_callback_func() -> None:
    get_recover_manager_instance().engine.register_callbacks()


def report_stop_complete(code: int, msg: str, fault_ranks: Faults) -> int:
    return get_recover_manager_instance().report_stop_complete(code, msg, fault_ranks)


def report_recover_strategy(fault_ranks: Faults, strategy_list: Sequence[str]) -> int:
    return get_recover_manager_instance().report_recover_strategy(fault_ranks, strategy_list)


def report_recover_status(code: int, msg: str, fault_ranks: Faults, strategy: str) -> int:
    return get_recover_manager_instance().report_recover_status(code, msg, fault_ranks, strategy)


def report_process_fault(fault_ranks: Faults, fault_codes: Mapping[int, str] | None = None) -> int:
    return get_recover_manager_instance().report_process_fault(fault_ranks, fault_codes)


class CallBackFuncs:
    """The four reports under the names that `mindio_ttp` uses."""

    report_fault_ranks = staticmethod(report_process_fault)
    report_stop_complete = staticmethod(report_stop_complete)
    report_strategies = staticmethod(report_recover_strategy)
    report_result = staticmethod(report_recover_status)
