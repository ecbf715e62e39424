"""Documented import path of MindSpore's agent."""

from taskd.agent.seams.msrun import MsAgent

__all__ = ["MsAgent"]
