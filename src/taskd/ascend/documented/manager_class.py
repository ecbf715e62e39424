"""`Manager`: the documented class behind `init_taskd_manager` and `start_taskd_manager`."""

from __future__ import annotations

from typing import Any

from taskd.ascend.documented import init_manager as taskd_manager_api
from taskd.ascend.mindio import has_mindio
from taskd.ascend.toolkit.run_log import run_log


class Manager:
    """One a process. What it does is in `taskd.manager`."""

    def __init__(self) -> None:
        self.config: dict[str, Any] | None = None

    def init_taskd_manager(self, config: dict[str, Any]) -> bool:
        accepted = taskd_manager_api.init_taskd_manager(config)
        if accepted:
            self.config = config
        return accepted

    def start_taskd_manager(self) -> bool:
        """Blocks while it serves."""
        return taskd_manager_api.start_taskd_manager()

    def start_controller(self) -> None:
        """The manager starts MindIO's controller by itself, where there is one to start."""
        if not has_mindio():
            run_log.info("mindio_ttp is not installed: ranks are mended by other means")
