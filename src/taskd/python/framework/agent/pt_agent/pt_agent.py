"""The documented import path of PyTorch's agent, and two readers of torch's worker groups."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from taskd.agent.seams.pytorch_callbacks import PtAgent

__all__ = ["PtAgent", "get_fault_workers", "get_pids"]


def get_pids(pcontext_dict: Mapping[int, Any]) -> dict[int, int]:
    """The pid behind each local rank's process context, which holds exactly one process."""
    return {rank: context.pids()[0] for rank, context in pcontext_dict.items()}


def get_fault_workers(worker_group: Any, fault_ranks: Iterable[int]) -> Any:
    """The same group with only the workers of these global ranks in it."""
    wanted = set(fault_ranks)
    part = copy.copy(worker_group)
    part.workers = {worker for worker in worker_group.workers if worker.global_rank in wanted}
    return part
