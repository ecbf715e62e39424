"""The messages of the Recover service, with the fields that the Elastic Agent's pages list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from taskd.wire._pb import recover_pb2
from taskd.wire._pb.recover_pb2 import Status

__all__ = ["ClientInfo", "Described", "Status", "to_wire"]


@dataclass
class ClientInfo:
    """Who calls. `ip` and `port` are taken and not used; `taskId` is what is now `jobId`."""

    ip: str = ""
    port: str = ""
    taskId: str = ""
    role: str = ""
    jobId: str = ""

    def __post_init__(self) -> None:
        self.jobId = self.taskId = self.jobId or self.taskId


class Described(Protocol):
    """Anything that names a role, and a job by `jobId` or `taskId`."""

    role: str


def to_wire(info: Described | recover_pb2.ClientInfo) -> recover_pb2.ClientInfo:
    """What today's clusterd understands. The old layout would put the address into the job."""
    if isinstance(info, recover_pb2.ClientInfo):
        return info
    job = getattr(info, "jobId", "") or getattr(info, "taskId", "")
    return recover_pb2.ClientInfo(jobId=job, role=info.role)
