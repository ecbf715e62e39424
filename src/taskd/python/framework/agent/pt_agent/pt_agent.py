"""The documented import path of PyTorch's agent."""

from taskd.agent.ptrun import PtAgent

__all__ = ["PtAgent"]
