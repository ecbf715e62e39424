"""Documented import path of `BaseAgent`."""

from taskd.ascend.documented.agent_base import DEFAULT_MSG_TYPE, STATUS_MSG_TYPE, BaseAgent
from taskd.ascend.documented.agent_messages import DEFAULT_DST

__all__ = ["DEFAULT_DST", "DEFAULT_MSG_TYPE", "STATUS_MSG_TYPE", "BaseAgent"]
