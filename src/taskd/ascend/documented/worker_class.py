"""The documented worker class, on top of `taskd.worker.worker_api`."""

from __future__ import annotations

from enum import Enum

from taskd.ascend.documented import init_worker as taskd_worker_api


class StressStatus(Enum):
    """How a stress test of one rank ended, with the text that Ascend's manager reads."""

    OK = "0-OK"
    EXEC_FAIL = "1-exec failed"
    FIND_FAULT = "2-find fault rank"
    TIMEOUT = "3-exec timeout"
    VOLTAGE_RECOVERY_FAIL = "4-voltage recovery failed"


class Worker:
    """One rank. The functions of `taskd.api` are the better way; this is for code that has one."""

    def __init__(self, global_rank: int, framework: str = "pt") -> None:
        self.global_rank, self.framework = global_rank, framework

    def init_worker(self, upper_limit_of_disk_in_mb: int = 5000) -> bool:
        return taskd_worker_api.init_taskd_worker(
            self.global_rank, upper_limit_of_disk_in_mb, self.framework
        )

    def start(self) -> bool:
        return taskd_worker_api.start_taskd_worker()

    def destroy(self) -> bool:
        return taskd_worker_api.destroy_taskd_worker()
