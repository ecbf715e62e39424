"""Writes down which ranks form which process group, for whoever analyses the profiles.

Parallel frameworks call `dump_group_info` once their groups exist. Nothing here raises: this is a
service to somebody else, and training must not end because of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from taskd.ascend.toolkit import log_constants as constants
from taskd.ascend.toolkit.run_log import run_log
from taskd.config import environ

HCCL = "hccl"


def get_save_path(rank: int) -> str:
    """The directory of this rank, made if need be; empty without a job, or if it is a link."""
    job = environ.get(constants.JOB_ID_KEY, "")
    if not job:
        run_log.error("%s is not set: the groups are not written", constants.JOB_ID_KEY)
        return ""
    base = environ.get(constants.GROUP_BASE_DIR_ENV, "")
    if not os.path.isdir(base):
        base = constants.DEFAULT_GROUP_DIR
    path = Path(base) / job / str(rank)
    try:
        if any(part.is_symlink() for part in (path, path.parent)):
            run_log.error("%s is a symbolic link: the groups are not written", path)
            return ""
        path.mkdir(mode=constants.PROFILING_DIR_MODE, parents=True, exist_ok=True)
    except OSError as error:
        run_log.error("the groups are not written: %s", error)
        return ""
    return str(path)


def get_group_info(rank: int) -> dict[str, dict[str, Any]]:
    """Every group of this rank: its name, this rank's place in it, its ranks.

    The key is the name of the communicator where the backend has one (HCCL), else the group's.
    """
    # A process that has not imported torch has no groups, and need not import it for this.
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return {}
    try:
        return dict(_groups(torch, dist.distributed_c10d, rank))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        run_log.error("the groups of this torch cannot be told: %s", error)
        return {}


def _groups(torch: Any, c10d: Any, rank: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for group, places in c10d._world.pg_group_ranks.items():
        if rank not in places:
            continue  # torch keeps a mark for groups of others.
        name = c10d._world.pg_names[group]
        shown = constants.DEFAULT_GROUP if group is c10d._world.default_pg else name
        key = name
        if HCCL in c10d.get_backend(group):
            backend = group._get_backend(torch.device("npu"))
            key = backend.get_hccl_comm_name(places[rank])
        yield (
            key,
            {
                constants.GROUP_NAME_KEY: shown,
                constants.GROUP_RANK_KEY: places[rank],
                constants.GLOBAL_RANKS_KEY: sorted(places),
            },
        )


def dump_group_info() -> None:
    """Write `parallel_group.json` into this rank's directory."""
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized():
        run_log.warning("there are no process groups to write down yet")
        return
    rank = dist.get_rank()
    groups, directory = get_group_info(rank), get_save_path(rank)
    if not groups or not directory:
        return
    path = Path(directory) / constants.GROUP_INFO_NAME
    try:
        if path.is_symlink():
            run_log.error("%s is a symbolic link: the groups are not written", path)
            return
        path.write_text(json.dumps(groups, indent=4))
    except OSError as error:
        run_log.error("the groups are not written: %s", error)
