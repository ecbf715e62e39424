"""`DLRecoverManager` of the Elastic Agent: TaskD's, with an encrypted connection by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from taskd.ascend.documented import recover_manager as taskd_recover_manager
from taskd.ascend.elastic_agent import elastic_messages as pb
from taskd.ascend.elastic_agent.elastic_log import run_log
from taskd.ascend.mindio import Faults
from taskd.ascend.recover_channel import Security, server_address
from taskd.config import environ
from taskd.wire._pb import recover_pb2

__all__ = [
    "DLRecoverManager",
    "init_grpc_recover_manager",
    "pb",
    "report_process_fault",
    "report_recover_status",
    "report_recover_strategy",
    "report_stop_complete",
]

Info = pb.Described | recover_pb2.ClientInfo


class DLRecoverManager(taskd_recover_manager.DLRecoverManager):
    instance: ClassVar[Any] = None

    def __init__(
        self, info: Info, server_addr: str, secure_conn: bool = True, cert_path: str = ""
    ) -> None:
        """With `secure_conn` the server must show the certificate in the file `cert_path`;
        ValueError says what is wrong with that certificate."""
        if not secure_conn:
            run_log.warning("the connection to %s is not encrypted", server_addr)
        security = Security(cert_path) if secure_conn else None
        super().__init__(pb.to_wire(info), server_addr, security)

    def register(self, request: Info) -> pb.Status:
        return super().register(pb.to_wire(request))


def init_grpc_recover_manager() -> DLRecoverManager:
    """A client for the job, the server and the security that the environment names."""
    job = environ.get("MINDX_TASK_ID", "")
    if not job:
        raise ValueError("MINDX_TASK_ID is not set: the job is not known")
    return DLRecoverManager(
        pb.ClientInfo(taskId=job, role=taskd_recover_manager.ROLE),
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
