"""Documented import path of `taskd.ascend.documented.init_agent`."""

from taskd.ascend.documented.init_agent import (
    AGENT,
    init_taskd_agent,
    register_func,
    start_taskd_agent,
)

__all__ = [
    "AGENT",
    "init_taskd_agent",
    "register_func",
    "start_taskd_agent",
]
