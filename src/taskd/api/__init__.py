"""The documented functions. Importing this is cheap, creates nothing and never raises."""

from taskd.ascend.documented.init_agent import init_taskd_agent, register_func, start_taskd_agent
from taskd.ascend.documented.init_manager import init_taskd_manager, start_taskd_manager
from taskd.ascend.documented.init_proxy import destroy_taskd_proxy, init_taskd_proxy
from taskd.ascend.documented.init_worker import (
    destroy_taskd_worker,
    init_taskd_worker,
    start_taskd_worker,
)

__all__ = [
    "destroy_taskd_proxy",
    "destroy_taskd_worker",
    "init_taskd_agent",
    "init_taskd_manager",
    "init_taskd_proxy",
    "init_taskd_worker",
    "register_func",
    "start_taskd_agent",
    "start_taskd_manager",
    "start_taskd_worker",
]
