"""Writes the ranks of each process group to a file, for tools that analyse the profiles.

Parallel frameworks call `dump_group_info` when their groups exist. Nothing here raises: training
does not need this file and must not fail because of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from taskd.agent.seams import torch_names
from taskd.ascend.documented import log_constants as constants
from taskd.ascend.documented.run_log import run_log
from taskd.config import environ
from taskd.errors import UnknownTorch

HCCL = "hccl"


def get_save_path(rank: int) -> str:
    """This rank's directory, created if missing. Empty: no job id is set, or it is a link."""
    job = environ.get(constants.JOB_ID_KEY, "")
    if not job:
        run_log.error("the process groups are not written: %s is not set", constants.JOB_ID_KEY)
        return ""
    base = environ.get(constants.GROUP_BASE_DIR_ENV, "")
    if not os.path.isdir(base):
        base = constants.DEFAULT_GROUP_DIR
    path = Path(base) / job / str(rank)
    try:
        if any(part.is_symlink() for part in (path, path.parent)):
            run_log.error("the process groups are not written: %s is a symbolic link", path)
            return ""
        path.mkdir(mode=constants.PROFILING_DIR_MODE, parents=True, exist_ok=True)
    except OSError as error:
        run_log.error("the process groups are not written: %s", error)
        return ""
    return str(path)


def get_group_info(rank: int) -> dict[str, dict[str, Any]]:
    """All groups of this rank: the group's name, this rank's index in it, and its global ranks.

    The key is the communicator's name if the backend has one (HCCL), else the group's name.
    """
    # A process that has not imported torch has no groups: do not import torch for this.
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return {}
    try:
        return dict(_groups(dist, rank))
    except (UnknownTorch, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        run_log.error("the process groups of this torch version cannot be read: %s", error)
        return {}


def _groups(dist: Any, rank: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for group, ranks, name, is_default in torch_names.registered_groups():
        if rank not in ranks:
            continue  # torch also lists groups that this rank is not a member of.
        shown = constants.DEFAULT_GROUP if is_default else name
        key = name
        if HCCL in dist.get_backend(group):
            backend = torch_names.backend_of(group, "npu")
            key = backend.get_hccl_comm_name(ranks[rank])
        yield (
            key,
            {
                constants.GROUP_NAME_KEY: shown,
                constants.GROUP_RANK_KEY: ranks[rank],
                constants.GLOBAL_RANKS_KEY: sorted(ranks),
            },
        )


def dump_group_info() -> None:
    """Write `parallel_group.json` into this rank's directory."""
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized():
        run_log.warning("the process groups are not written: none exist yet")
        return
    rank = dist.get_rank()
    groups, directory = get_group_info(rank), get_save_path(rank)
    if not groups or not directory:
        return
    path = Path(directory) / constants.GROUP_INFO_NAME
    try:
        if path.is_symlink():
            run_log.error("the process groups are not written: %s is a symbolic link", path)
            return
        path.write_text(json.dumps(groups, indent=4))
    except OSError as error:
        run_log.error("the process groups are not written: %s", error)
