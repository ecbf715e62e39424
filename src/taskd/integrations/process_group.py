"""Joins the job when a framework initialises `torch.distributed`.

Frameworks call `init_process_group` themselves, from the constructor of an object that the script
creates before it creates a trainer. From the import of an adapter on, that call joins the job.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from taskd import config
from taskd.errors import SettingsError
from taskd.torch.groups import resilient_group
from taskd.torch.init import TIMEOUT, init
from taskd.torch.job import Job
from taskd.worker.settings import WorkerSettings

_plain = dist.init_process_group
_job: Job | None = None
_is_joining = False


def join_at_first_use() -> None:
    """`torch.distributed.init_process_group` joins the job from now on.

    Also in a process that is forked from this one, as from a standby that has imported an adapter.
    """
    dist.init_process_group = _join


def job() -> Job:
    """The job of this process.

    Raises:
        SettingsError: The process group exists, but does not belong to a job.
    """
    global _job
    if _job is None:
        if dist.is_initialized() and config.load(WorkerSettings).proxy:
            raise SettingsError(
                [
                    "torch.distributed was initialised before the adapter could join the job: "
                    "import the adapter first, before TrainingArguments or an Accelerator is "
                    "created, and leave out taskd.torch.init"
                ]
            )
        _job = _initialised()
    return _job


def _join(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    global _job
    # The script may call `taskd.torch.init` itself, in spite of the adapter.
    is_ours = _is_joining or backend == resilient_group.BACKEND
    if is_ours or _job is not None or not config.load(WorkerSettings).proxy:
        _plain(backend, *args, **kwargs)
    else:
        timeout = kwargs.get("timeout") or TIMEOUT
        _job = _initialised(backend, timeout)


def _initialised(backend: str | None = None, timeout: timedelta = TIMEOUT) -> Job:
    global _is_joining
    _is_joining = True
    try:
        return init(backend, timeout)
    finally:
        _is_joining = False
