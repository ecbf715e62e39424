"""Documented import path of PyTorch's agent."""

from taskd.agent.seams.pytorch_callbacks import PtAgent
from taskd.ascend.documented.agent_base import get_fault_workers, get_pids

__all__ = ["PtAgent", "get_fault_workers", "get_pids"]
