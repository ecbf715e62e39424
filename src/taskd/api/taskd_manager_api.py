"""Documented import path of the manager functions of `taskd.api`."""

from taskd.ascend.documented.manager_functions import init_taskd_manager, start_taskd_manager

__all__ = ["init_taskd_manager", "start_taskd_manager"]
