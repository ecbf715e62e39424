"""`DLRecoverManager` of the retired Elastic Agent: TaskD's, encrypted by default.

`mindx_elastic.recover_manager` and `mindx_elastic.pb` re-export this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from taskd.ascend.documented import recover_functions
from taskd.ascend.documented.elastic_log import run_log
from taskd.ascend.mindio import Faults
from taskd.ascend.recover_channel import Security, server_address
from taskd.config import environ
from taskd.wire._pb import recover_pb2
from taskd.wire._pb.recover_pb2 import Status


@dataclass
class ClientInfo:
    """The caller. `ip` and `port` are not used; `taskId` is the old name of `jobId`."""

    ip: str = ""
    port: str = ""
    taskId: str = ""
    role: str = ""
    jobId: str = ""

    def __post_init__(self) -> None:
        self.jobId = self.taskId = self.jobId or self.taskId


class AnyClientInfo(Protocol):
    """Any object with a role, and a job named by `jobId` or `taskId`."""

    role: str


Info = AnyClientInfo | recover_pb2.ClientInfo


def to_wire(info: Info) -> recover_pb2.ClientInfo:
    """The message of today's clusterd. In the old layout, the address would become the job id."""
    if isinstance(info, recover_pb2.ClientInfo):
        return info
    job = getattr(info, "jobId", "") or getattr(info, "taskId", "")
    return recover_pb2.ClientInfo(jobId=job, role=info.role)


class DLRecoverManager(recover_functions.DLRecoverManager):
    instance: ClassVar[Any] = None

    def __init__(
        self, info: Info, server_addr: str, secure_conn: bool = True, cert_path: str = ""
    ) -> None:
        """With `secure_conn`, the server must present the certificate in the file `cert_path`.
        ValueError: that certificate is not acceptable, with the reasons."""
        if not secure_conn:
            run_log.warning("the connection to %s is not encrypted", server_addr)
        security = Security(cert_path) if secure_conn else None
        super().__init__(to_wire(info), server_addr, security)

    def register(self, request: Info) -> Status:
        return super().register(to_wire(request))


def init_grpc_recover_manager() -> DLRecoverManager:
    """A client for the job, the server and the encryption named by the environment."""
    job = environ.get("MINDX_TASK_ID", "")
    if not job:
        raise ValueError("MINDX_TASK_ID is not set: the job id is unknown")
    return DLRecoverManager(
        ClientInfo(taskId=job, role=recover_functions.ROLE),
        server_address(),
        secure_conn=environ.get("ELASTIC_GRPC_SECURE_CONNECT") == "on",
        cert_path=environ.get("ELASTIC_GRPC_SECURE_CERTIFICATES_PATH", ""),
    )


def _instance() -> DLRecoverManager:
    found: DLRecoverManager | None = DLRecoverManager.instance
    return found or init_grpc_recover_manager()


def report_stop_complete(code: int, msg: str, fault_ranks: Faults) -> int:
    return _instance().report_stop_complete(code, msg, fault_ranks)


def report_recover_strategy(fault_ranks: Faults, strategy_list: Sequence[str]) -> int:
    return _instance().report_recover_strategy(fault_ranks, strategy_list)


def report_recover_status(code: int, msg: str, fault_ranks: Faults, strategy: str) -> int:
    return _instance().report_recover_status(code, msg, fault_ranks, strategy)


def report_process_fault(fault_ranks: Faults) -> int:
    return _instance().report_process_fault(fault_ranks)
