"""Documented import path of `taskd.ascend.documented.base_agent`."""

from taskd.ascend.documented.base_agent import (
    DEFAULT_DST,
    DEFAULT_MSG_TYPE,
    STATUS_MSG_TYPE,
    BaseAgent,
)

__all__ = [
    "DEFAULT_DST",
    "DEFAULT_MSG_TYPE",
    "STATUS_MSG_TYPE",
    "BaseAgent",
]
