"""Documented import path of the agent functions of `taskd.api`."""

from taskd.ascend.documented.api_functions import init_taskd_agent, register_func, start_taskd_agent

__all__ = ["init_taskd_agent", "register_func", "start_taskd_agent"]
