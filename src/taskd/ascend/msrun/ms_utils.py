"""MindSpore's ranks, from the environment that `msrun` sets."""

from __future__ import annotations

from collections.abc import Iterable

from taskd.agent.seams.msrun import is_sound, local_ranks
from taskd.config import environ


def check_monitor_res_valid(rank_status_dict: object) -> bool:
    """Whether MONITOR's answer is what its contract says."""
    return is_sound(rank_status_dict)


def calculate_global_rank() -> list[int]:
    """This node's global ranks; empty if the environment does not tell."""
    return [int(rank) for rank in local_ranks()]


def calculate_local_rank_by_global_rank(global_rank_list: Iterable[int]) -> list[int] | None:
    """The same ranks within their node; None if the environment does not tell."""
    try:
        size = int(environ["MS_LOCAL_WORKER"])
        return [rank % size for rank in global_rank_list]
    except (KeyError, ValueError, ZeroDivisionError):
        return None
